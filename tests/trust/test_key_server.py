"""Enrolled clients share the seed; nobody else learns it or puts another in its place."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedntk.trust import (
    ClientKeys,
    KeyServer,
    NotEnrolled,
    check_voucher,
    fingerprint,
    new_key,
    public_bytes,
)
from fedntk.trust.key_server import load_secret

from .uploads import refused

MASTER, RUN = bytes(range(32)), "run-7"
SIGNING, KEY, OTHER = Ed25519PrivateKey.generate(), new_key(), public_bytes(new_key())
PUBLIC = public_bytes(KEY)


@pytest.fixture
def server():
    return KeyServer(MASTER, [PUBLIC], SIGNING)


def client_of(server, state=None, run=RUN):
    state = {} if state is None else state
    return ClientKeys(KEY, run=run, verify_key=server.verify_key, state=state)


def answer(server, request, run=RUN):
    return server.sealed_seed(request["public-key"], request["challenge"], run)


@pytest.mark.parametrize("run", [RUN, "ü" * 127, "run 7\n\0"])
def test_enrolled_clients_get_the_runs_seed_which_does_not_travel_in_clear(server, run):
    state = {}
    request = client_of(server, state, run).request()
    sealed = [answer(server, request, run) for _ in range(2)]
    seed = server.projection_seed(run)
    assert len(seed) == 32
    for data in (*sealed, *sealed):  # in a later message: another object, the same state
        assert client_of(server, state, run).open(data) == seed
        assert seed[:8] not in data
        assert MASTER not in data
    assert sealed[0] != sealed[1]
    assert seed not in b"".join(state.values())
    challenges = {client_of(server).request()["challenge"] for _ in range(100)}
    assert (len(challenges), set(map(len, challenges))) == (100, {16})


def test_seed_depends_only_on_master_and_run(server):
    """A key server that is started again, even with another signing key, gives the same seed."""
    again, other = (
        KeyServer(master, [], Ed25519PrivateKey.generate()) for master in (MASTER, bytes(32))
    )
    assert server.projection_seed("a") == again.projection_seed("a")
    seeds = {server.projection_seed("a"), server.projection_seed("b"), other.projection_seed("a")}
    assert len(seeds) == 3


def test_every_changed_byte_and_every_cut_is_noticed(server):
    client = client_of(server)
    sealed = answer(server, client.request())
    flipped = [sealed[:i] + bytes([byte ^ 1]) + sealed[i + 1 :] for i, byte in enumerate(sealed)]
    cut = [sealed[:end] for end in range(len(sealed))]
    for data in (*flipped, *cut, sealed + b"\0"):
        refused(f"signature is wrong: its {len(data)} bytes", client.open, data)
    client.open(sealed)


def test_aggregation_server_cannot_seal_a_seed_of_its_own(server):
    """It knows the client's public key, the run and the challenge, and all of this code."""
    client = client_of(server)
    request = client.request()
    forged = answer(KeyServer(MASTER, [PUBLIC], Ed25519PrivateKey.generate()), request)
    for data in (forged, forged[:-64] + answer(server, request)[-64:]):
        refused("not from the key server that this client trusts", client.open, data)


def test_only_the_answer_to_the_newest_request_opens(server):
    """Not what was sealed for another run, client or challenge, nor another signature of it."""
    server.enrol([PUBLIC, OTHER])
    client = client_of(server)
    unasked = answer(server, {"public-key": PUBLIC, "challenge": bytes(16)})
    refused("none was asked for; call request first", client.open, unasked)
    former = answer(server, client.request())
    request = client.request()
    for data, got in (
        (former, f"run 'run-7', key {fingerprint(PUBLIC)}"),
        (answer(server, request, "run-8"), "run 'run-8'"),
        (answer(server, {**request, "public-key": OTHER}), f"key {fingerprint(OTHER)}"),
        (b"ntkpeer1" + PUBLIC + b"a" + server.voucher(PUBLIC, "a"), "run ''"),
    ):
        expected = f"expected run 'run-7', key {fingerprint(PUBLIC)}"
        refused(f"sealed for .*{got}.*, {expected}", client.open, data)
    sealed = answer(server, request)
    assert client.open(sealed) == server.projection_seed(RUN)
    # a faulty key server's: the signature is right, the ciphertext is not
    spoilt = sealed[:-65] + bytes([sealed[-65] ^ 1])
    refused("sealed bytes do not open", client.open, spoilt + SIGNING.sign(spoilt))


@pytest.mark.parametrize("asked", [("sealed_seed", bytes(16), RUN), ("voucher", RUN)])
def test_unknown_client_is_named_with_the_cure(server, asked):
    name, *rest = asked
    serve = getattr(server, name)
    refused(f"{fingerprint(OTHER)}.*add it to the enrolled", serve, OTHER, *rest, error=NotEnrolled)
    server.enrol([OTHER])
    serve(OTHER, *rest)
    refused(fingerprint(PUBLIC), serve, PUBLIC, *rest, error=NotEnrolled)


def test_malformed_arguments_are_refused_by_name(server):
    no_name = r"run: expected a name of 1 \.\.\. 255 bytes, got 0"
    refused("challenge: expected 16", server.sealed_seed, PUBLIC, b"abc", RUN)
    refused(no_name, server.sealed_seed, PUBLIC, bytes(16), "")
    refused(no_name, client_of, server, run="")
    refused("master: expected 32 bytes, got 3", KeyServer, b"abc", [], SIGNING)
    refused("enrolled keys: expected 32 byt", server.enrol, [b"abc"])
    wrong = {"run": "a", "verify_key": b"abc", "state": {}}
    refused("verify_key: expected the key server's Ed25519 key", ClientKeys, KEY, **wrong)


def test_a_voucher_is_for_one_key_and_run_of_one_key_server(server):
    voucher, verify_key = server.voucher(PUBLIC, "a"), server.verify_key
    check_voucher(voucher, PUBLIC, "a", verify_key)
    stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    refused("does not vouch for key", check_voucher, voucher, OTHER, "a", verify_key)
    refused("does not vouch for key", check_voucher, voucher, PUBLIC, "b", verify_key)
    refused("does not vouch for key", check_voucher, voucher, PUBLIC, "a", stranger)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"master": 1, "signing-key": ""}', "\x80"])
def test_file_without_a_secret_is_refused(tmp_path, text):
    path = tmp_path / "secret"
    path.write_bytes(text.encode("latin-1"))
    refused("holds no key server's secret; new-key-server makes one", load_secret, path)
