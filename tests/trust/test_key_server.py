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

MASTER = bytes(range(32))
RUN = "run-7"


class Setup:
    """A key server and its client, with the state that Flower would keep for it."""

    def __init__(self, master: bytes = MASTER) -> None:
        self.signing_key = Ed25519PrivateKey.generate()
        self.client_key = new_key()
        self.public_key = public_bytes(self.client_key)
        self.server = KeyServer(master, [self.public_key], self.signing_key)
        self.state: dict[str, bytes] = {}

    def client(self, run: str = RUN) -> ClientKeys:
        verify_key = self.server.verify_key
        return ClientKeys(self.client_key, run=run, verify_key=verify_key, state=self.state)

    def answer(self, request: dict[str, bytes], run: str = RUN) -> bytes:
        return self.server.sealed_seed(request["public-key"], run, request["challenge"])


@pytest.fixture
def setup():
    return Setup()


def test_enrolled_clients_get_the_runs_seed_which_does_not_travel_in_clear(setup):
    request = setup.client().request()
    sealed = [setup.answer(request) for _ in range(2)]
    seed = setup.server.projection_seed(RUN)
    assert len(seed) == 32
    for data in (*sealed, *sealed):  # in a later message: another object, the same state
        assert setup.client().open(data) == seed
        assert seed[:8] not in data
        assert MASTER not in data
    assert sealed[0] != sealed[1]
    assert seed not in b"".join(setup.state.values())
    challenges = {setup.client().request()["challenge"] for _ in range(100)}
    assert (len(challenges), set(map(len, challenges))) == (100, {16})


@pytest.mark.parametrize("run", ["ü" * 127, "run 7\n\0"])
def test_any_name_of_a_run_travels(setup, run):
    client = setup.client(run=run)
    assert client.open(setup.answer(client.request(), run)) == setup.server.projection_seed(run)


def test_seed_depends_only_on_master_and_run():
    """A key server that is started again, even with another signing key, gives the same seed."""
    one, again, other = (
        Setup(master).server.projection_seed for master in (MASTER, MASTER, b"x" * 32)
    )
    assert one("a") == again("a")
    assert len({one("a"), one("b"), other("a")}) == 3


def test_every_changed_byte_and_every_cut_is_noticed(setup):
    client = setup.client()
    sealed = setup.answer(client.request())
    flipped = [
        sealed[:i] + bytes([sealed[i] ^ flip]) + sealed[i + 1 :]
        for i in range(len(sealed))
        for flip in (0x01, 0x80)
    ]
    cut = [sealed[:end] for end in range(len(sealed))]
    for data in (*flipped, *cut, sealed + b"\0", b"rubbish", b"\0" * 300, b"\xff" * 300):
        refused(f"signature is wrong: its {len(data)} bytes", client.open, data)
    client.open(sealed)


def test_aggregation_server_cannot_seal_a_seed_of_its_own(setup):
    """It knows the client's public key, the run and the challenge, and all of this code."""
    client = setup.client()
    request = client.request()
    forger = KeyServer(bytes(32), [setup.public_key], Ed25519PrivateKey.generate())
    forged = forger.sealed_seed(setup.public_key, RUN, request["challenge"])
    for data in (forged, forged[:-64] + setup.answer(request)[-64:]):
        refused("not from the key server that this client trusts", client.open, data)


def test_only_the_answer_to_the_newest_request_opens(setup):
    """Not what was sealed for another run, client or challenge, nor another signature of it."""
    other = public_bytes(new_key())
    setup.server.enrol([setup.public_key, other])
    client = setup.client()
    unasked = setup.answer({"public-key": setup.public_key, "challenge": bytes(16)})
    refused("none was asked for; call request first", client.open, unasked)
    former = setup.answer(client.request())
    request = client.request()
    expected = f"expected run 'run-7', key {fingerprint(setup.public_key)}"
    for data, got in (
        (former, f"run 'run-7', key {fingerprint(setup.public_key)}"),
        (setup.answer(request, "run-8"), "run 'run-8'"),
        (setup.answer({**request, "public-key": other}), f"key {fingerprint(other)}"),
    ):
        refused(f"sealed for .*{got}.*, {expected}", client.open, data)
    voucher = setup.server.voucher(setup.public_key, "a")
    vouched = b"ntkpeer1" + setup.public_key + b"a" + voucher
    refused("sealed for run ''", client.open, vouched)
    sealed = setup.answer(request)
    assert client.open(sealed) == setup.server.projection_seed(RUN)
    # a faulty key server's: the signature is right, the ciphertext is not
    spoilt = sealed[:-65] + bytes([sealed[-65] ^ 1])
    refused("signed, but damaged", client.open, spoilt + setup.signing_key.sign(spoilt))


@pytest.mark.parametrize("asked", [("sealed_seed", RUN, bytes(16)), ("voucher", RUN)])
def test_unknown_client_is_named_with_the_cure(setup, asked):
    name, *rest = asked
    serve, stranger = getattr(setup.server, name), public_bytes(new_key())
    with pytest.raises(NotEnrolled, match=f"{fingerprint(stranger)}.*add it to the enrolled"):
        serve(stranger, *rest)
    setup.server.enrol([stranger])
    serve(stranger, *rest)
    with pytest.raises(NotEnrolled, match=fingerprint(setup.public_key)):
        serve(setup.public_key, *rest)


def test_malformed_arguments_are_refused_by_name(setup):
    no_name = r"run: expected a name of 1 \.\.\. 255 bytes, got 0"
    key, seal = setup.public_key, setup.server.sealed_seed
    refused("challenge: expected 16", seal, key, RUN, b"abc")
    refused(no_name, seal, key, "", bytes(16))
    refused(no_name, setup.client, run="")
    refused("master: expected 32 bytes, got 3", KeyServer, b"abc", [], setup.signing_key)
    refused("enrolled keys: expected 32 byt", KeyServer, MASTER, [b"abc"], setup.signing_key)
    wrong = {"run": "a", "verify_key": b"abc", "state": {}}
    refused("verify_key: expected the key server's Ed25519 key", ClientKeys, new_key(), **wrong)


def test_a_voucher_is_for_one_key_and_run_of_one_key_server(setup):
    key, verify_key = setup.public_key, setup.server.verify_key
    voucher = setup.server.voucher(key, "a")
    check_voucher(voucher, key, "a", verify_key)
    for wrong in (
        (voucher, public_bytes(new_key()), "a", verify_key),
        (voucher, key, "b", verify_key),
        (voucher, key, "a", Setup().server.verify_key),
        (b"", key, "a", verify_key),
    ):
        refused("does not vouch for key", check_voucher, *wrong)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"master": 1, "signing-key": ""}', "\x80"])
def test_file_without_a_secret_is_refused(tmp_path, text):
    path = tmp_path / "secret"
    path.write_bytes(text.encode("latin-1"))
    refused("holds no key server's secret; new-key-server makes one", load_secret, path)
