"""What is sealed opens only for its recipient and purpose; key files are kept safe."""

import re
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedntk.trust import check_run, load_key, new_key, public_bytes, save_key, seal, unseal
from fedntk.trust.wire import frame, unframe

from .uploads import refused

KEY = new_key()


def test_what_is_sealed_opens_only_whole_for_its_recipient_and_purpose():
    sealed = seal(b"rho" * 100, public_bytes(KEY), b"purpose")
    assert unseal(sealed, KEY, b"purpose") == b"rho" * 100
    assert len(sealed) == 300 + 48
    assert b"rho" not in sealed
    assert sealed != seal(b"rho" * 100, public_bytes(KEY), b"purpose")
    no_key = bytes(len(sealed))  # an ephemeral key of small order
    flipped = bytes([sealed[0] ^ 1]) + sealed[1:]
    for spoilt in (b"", sealed[:48], sealed[:-1], sealed + b"\0", no_key, flipped):
        refused("do not open", unseal, spoilt, KEY, b"purpose")
    for other, purpose in ((new_key(), b"purpose"), (KEY, b"another")):
        refused("sealed for another key or another purpose", unseal, sealed, other, purpose)


@pytest.mark.parametrize("public_key", [b"", bytes(31), bytes(33), bytes(32)])
def test_what_is_no_public_key_is_refused(public_key):
    """Zeros are a point of small order: with it everyone would have the shared secret."""
    expected = f"expected the 32 raw bytes.*got {len(public_key)} bytes"
    refused(expected, seal, b"rho", public_key, b"purpose")


def test_only_its_owner_reads_a_key_file_which_is_never_replaced(tmp_path):
    path = tmp_path / "client.pem"
    refused(r"client\.pem", load_key, path, error=FileNotFoundError)
    save_key(KEY, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    refused("exists and is not replaced", save_key, new_key(), path)
    assert public_bytes(load_key(path)) == public_bytes(KEY)


def pem(key, encryption):
    encoding = serialization.Encoding.PEM
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no private key"),
        (pem(KEY, serialization.BestAvailableEncryption(b"word")), "holds no private key th"),
        (pem(Ed25519PrivateKey.generate(), serialization.NoEncryption()), "an X25519 key, got Ed"),
    ],
    ids=["empty", "with a password", "of another kind"],  # keys are drawn anew
)
def test_file_without_such_a_key_is_refused(tmp_path, data, message):
    path = tmp_path / "client.pem"
    path.write_bytes(data)
    refused(re.escape(str(path)) + ".*" + message, load_key, path)


def test_frames_that_declare_too_much_are_refused():
    """Any cut inside a frame is seen, and nothing of a declared length is allocated."""
    parts = [b"abc", b"de", b""]
    data = frame(parts)
    assert unframe(data) == parts
    whole_frames = {0, 8 + 3, 8 + 3 + 8 + 2}
    for cut in (*(data[:end] for end in {*range(len(data))} - whole_frames), b"\xff" * 8 + b"abc"):
        refused("cut off", unframe, cut)


@pytest.mark.parametrize(
    ("run", "message"),
    [("", "got 0"), ("a" * 256, "got 256"), ("ü" * 128, "got 256"), ("\ud800", "in Unicode")],
)
def test_names_of_runs_have_a_length(run, message):
    assert check_run("a" * 255) == b"a" * 255
    refused(message, check_run, run)
