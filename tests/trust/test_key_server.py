"""Enrolled clients share the seed; nobody else learns it or puts another in its place."""

import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedntk.trust import ClientKeys, KeyServer, NotEnrolled, SealError, fingerprint, new_key
from fedntk.trust.key_server import load_secret, new_secret
from fedntk.trust.sealing import public_bytes

MASTER = bytes(range(32))


class Parties:
    """A key server and its client, with the state that Flower would keep for it."""

    def __init__(self) -> None:
        self.signing_key = Ed25519PrivateKey.generate()
        self.client_key = new_key()
        self.public_key = public_bytes(self.client_key)
        self.server = KeyServer(MASTER, [self.public_key], self.signing_key)
        self.state: dict[str, bytes] = {}

    def client(self, run: str = "run-7", key=None) -> ClientKeys:
        return ClientKeys(
            key or self.client_key,
            run=run,
            verify_key=self.server.verify_key,
            state=self.state,
        )

    def answer(self, asked: dict[str, bytes], run: str = "run-7") -> bytes:
        return self.server.sealed_seed(asked["public-key"], run, asked["challenge"])


@pytest.fixture
def parties():
    return Parties()


def test_enrolled_client_gets_the_runs_seed(parties):
    sealed = parties.answer(parties.client().request())
    seed = parties.server.projection_seed("run-7")
    assert len(seed) == 32
    # a later message: another object, the same state; and again, as each round brings it
    assert parties.client().open(sealed) == seed
    assert parties.client().open(sealed) == seed


def test_all_enrolled_clients_share_it():
    keys = [new_key() for _ in range(3)]
    server = KeyServer(MASTER, map(public_bytes, keys), Ed25519PrivateKey.generate())
    seeds = set()
    for key in keys:
        client = ClientKeys(key, run="a", verify_key=server.verify_key, state={})
        asked = client.request()
        seeds.add(client.open(server.sealed_seed(asked["public-key"], "a", asked["challenge"])))
    assert seeds == {server.projection_seed("a")}


def test_seed_depends_on_master_and_run_alone():
    """A key server that is started again, even with another signing key, gives the same seed."""
    one = KeyServer(MASTER, [], Ed25519PrivateKey.generate())
    again = KeyServer(MASTER, [], Ed25519PrivateKey.generate())
    other = KeyServer(secrets.token_bytes(32), [], Ed25519PrivateKey.generate())
    assert one.projection_seed("a") == again.projection_seed("a")
    assert (
        len({one.projection_seed("a"), one.projection_seed("b"), other.projection_seed("a")}) == 3
    )


def test_what_travels_does_not_hold_the_seed(parties):
    asked = parties.client().request()
    sealed = [parties.answer(asked) for _ in range(2)]
    seed = parties.server.projection_seed("run-7")
    for data in sealed:
        assert seed not in data
        assert seed[:8] not in data
        assert MASTER not in data
    assert sealed[0] != sealed[1]
    assert seed not in b"".join(parties.state.values())


def test_challenges_are_fresh(parties):
    client = parties.client()
    asked = [client.request() for _ in range(100)]
    assert len({each["challenge"] for each in asked}) == 100
    assert {each["public-key"] for each in asked} == {parties.public_key}
    assert {len(each["challenge"]) for each in asked} == {16}


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_every_changed_byte_is_noticed(parties, flip):
    client = parties.client()
    sealed = parties.answer(client.request())
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= flip
        with pytest.raises(SealError):
            client.open(bytes(changed))
    client.open(sealed)


def test_every_cut_is_noticed(parties):
    client = parties.client()
    sealed = parties.answer(client.request())
    for end in range(len(sealed)):
        with pytest.raises(SealError, match="expected a sealed seed"):
            client.open(sealed[:end])
    with pytest.raises(SealError, match="cut off or changed"):
        client.open(sealed + b"\0")


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\0" * 300, b"\xff" * 300])
def test_what_is_no_sealed_seed_is_refused(parties, data):
    client = parties.client()
    client.request()
    with pytest.raises(SealError, match=f"begin with b'ntkseed1', got {len(data)} bytes"):
        client.open(data)


def test_changed_ciphertext_breaks_the_signature(parties):
    client = parties.client()
    changed = bytearray(parties.answer(client.request()))
    changed[-100] ^= 1
    with pytest.raises(SealError, match="signature is wrong: it was changed on its way"):
        client.open(bytes(changed))


def test_aggregation_server_cannot_seal_a_seed_of_its_own(parties):
    """It knows the client's public key, the run and the challenge, and all of this code."""
    client = parties.client()
    asked = client.request()
    forger = KeyServer(bytes(32), [asked["public-key"]], Ed25519PrivateKey.generate())
    forged = forger.sealed_seed(asked["public-key"], "run-7", asked["challenge"])
    with pytest.raises(SealError, match="not from the key server that this client trusts"):
        client.open(forged)
    genuine = parties.answer(asked)
    with pytest.raises(SealError, match="not from the key server that this client trusts"):
        client.open(forged[:-64] + genuine[-64:])


def test_seed_of_another_run_is_refused(parties):
    client = parties.client()
    sealed = parties.answer(client.request(), run="run-8")
    with pytest.raises(SealError, match="of another run: expected 'run-7', got 'run-8'"):
        client.open(sealed)


def test_answer_to_a_former_request_is_refused(parties):
    client = parties.client()
    former = parties.answer(client.request())
    newest = parties.answer(client.request())
    with pytest.raises(SealError, match="does not answer the newest challenge"):
        client.open(former)
    assert client.open(newest) == parties.server.projection_seed("run-7")


def test_seed_sealed_for_another_client_is_refused(parties):
    other = public_bytes(new_key())
    parties.server.enrol([parties.public_key, other])
    client = parties.client()
    sealed = parties.server.sealed_seed(other, "run-7", client.request()["challenge"])
    with pytest.raises(SealError, match=f"another client: for key {fingerprint(other)}") as error:
        client.open(sealed)
    assert fingerprint(parties.public_key) in str(error.value)


def test_damage_before_signing_is_noticed(parties):
    """What a faulty key server would send: the signature is right, the ciphertext is not."""
    client = parties.client()
    signed = bytearray(parties.answer(client.request())[:-64])
    signed[-1] ^= 1
    sealed = bytes(signed) + parties.signing_key.sign(bytes(signed))
    with pytest.raises(SealError, match="signed, but damaged"):
        client.open(sealed)


def test_seed_that_nobody_asked_for_is_refused(parties):
    asked = {"public-key": parties.public_key, "challenge": bytes(16)}
    with pytest.raises(SealError, match="none was asked for; call request first"):
        parties.client().open(parties.answer(asked))


def test_unknown_client_is_named_with_the_cure(parties):
    stranger = public_bytes(new_key())
    with pytest.raises(NotEnrolled, match=f"{fingerprint(stranger)}.*add it to the enrolled keys"):
        parties.server.sealed_seed(stranger, "run-7", bytes(16))
    parties.server.enrol([stranger])
    parties.server.sealed_seed(stranger, "run-7", bytes(16))
    with pytest.raises(NotEnrolled, match=fingerprint(parties.public_key)):
        parties.server.sealed_seed(parties.public_key, "run-7", bytes(16))


def test_malformed_arguments_are_refused_by_name(parties):
    with pytest.raises(SealError, match="challenge: expected 16 bytes, got 3"):
        parties.server.sealed_seed(parties.public_key, "run-7", b"abc")
    with pytest.raises(SealError, match=r"run: expected a name of 1 \.\.\. 255 bytes, got 0"):
        parties.server.sealed_seed(parties.public_key, "", bytes(16))
    with pytest.raises(SealError, match=r"run: expected a name of 1 \.\.\. 255 bytes, got 0"):
        parties.client(run="")
    with pytest.raises(SealError, match="master: expected 32 bytes, got 3"):
        KeyServer(b"abc", [], parties.signing_key)
    with pytest.raises(SealError, match="enrolled keys: expected 32 bytes each, got 3"):
        KeyServer(MASTER, [b"abc"], parties.signing_key)
    with pytest.raises(SealError, match="verify_key: expected the key server's Ed25519 key"):
        ClientKeys(new_key(), run="a", verify_key=b"abc", state={})


@pytest.mark.parametrize("run", ["a", "ü" * 127, "run 7\n\0"])
def test_any_name_of_a_run_travels(parties, run):
    client = parties.client(run=run)
    assert client.open(parties.answer(client.request(), run)) == parties.server.projection_seed(run)


def test_secret_file_gives_the_same_key_server_again(tmp_path):
    path = tmp_path / "secret"
    verify_key = new_secret(path)
    servers = []
    for _ in range(2):
        master, signing_key = load_secret(path)
        servers.append(KeyServer(master, [], signing_key))
    assert {server.verify_key for server in servers} == {verify_key}
    assert len({server.projection_seed("a") for server in servers}) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SealError, match="exists and is not replaced"):
        new_secret(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"master": 1, "signing-key": ""}', "\x80"])
def test_file_without_a_secret_is_refused(tmp_path, text):
    path = tmp_path / "secret"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SealError, match="holds no key server's secret; new-key-server makes one"):
        load_secret(path)
