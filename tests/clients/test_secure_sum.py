"""A client's part in secure sums: with one nonce in one sum, whatever a server asks again."""

import errno
import json

import numpy as np
import pytest

from fedntk.clients.core import secure_sum
from fedntk.clients.core.secure_sum import SecureSum, load_or_draw_key
from fedntk.ntk.support.files import claimed
from fedntk.trust import ParcelKeys, SealError, new_key, public_bytes
from fedntk.trust.secure_sum import exchange_of

from ..conftest import refused

IDS = np.arange(4)
WORDS = np.arange(5, dtype=np.uint32)


@pytest.fixture
def clients(tmp_path):
    folders = [tmp_path / str(k) for k in IDS]
    for folder in folders:
        folder.mkdir()
    return [SecureSum(folder, ParcelKeys(new_key())) for folder in folders]


def roster(clients):
    """What a server says of those who take part."""
    own = [client.public_key() for client in clients]
    return {
        "clients": IDS,
        "keys": np.stack([o["public-key"] for o in own]),
        "nonces": np.stack([o["nonce"] for o in own]),
        "vouchers": np.zeros((len(IDS), 0), np.uint8),
        "threshold": np.array(3),
    }


def sharing(clients):
    told = roster(clients)
    return told, [client.shares(told) for client in clients]


def named(told):
    name = exchange_of(row.tobytes() for row in told["nonces"])
    return {"exchange": np.frombuffer(name, np.uint8), "clients": IDS}


def parcels(told, shared, client):
    return {**named(told), "parcels": np.stack([own["parcels"][client] for own in shared])}


def test_with_one_nonce_a_client_takes_part_in_one_sum(clients, tmp_path):
    """Else it would take the others' old parcels, and give the other share of their secrets."""
    told, shared = sharing(clients)
    same_time = {**told, "threshold": np.array(4)}
    refused("drew another nonce", clients[0].shares, same_time, error=SealError)
    for k, client in enumerate(clients):
        message = parcels(told, shared, k), WORDS, b""
        client.mask(*message)
        refused("has masked its numbers for this sum", client.mask, *message, error=SealError)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/sum-*")} == {0o600}
    tags = [client.confirm(named(told))["tags"] for client in clients]
    for k, client in enumerate(clients):
        message = {**named(told), "tags": np.stack([own[k] for own in tags])}
        client.reveal(message)
        refused("has given its shares before", client.reveal, message, error=SealError)
    assert not list(tmp_path.glob("*/sum-*"))
    refused("drew another nonce", clients[1].shares, told, error=SealError)
    again, _ = sharing(clients)
    old = parcels(again, shared, 1), WORDS, b""
    refused("what client 0 sent does not open", clients[1].mask, *old, error=SealError)


def test_who_gave_a_sum_up_takes_part_in_it_no_more_and_counts_who_else_did(clients, tmp_path):
    """Of four, three open it; one may lie. A server has two give up and two give shares."""
    told, shared = sharing(clients)
    for k, client in enumerate(clients):
        client.mask(parcels(told, shared, k), WORDS, b"")
    everyone, nobody = named(told), {**named(told), "clients": IDS[:0]}
    confirmed = [client.confirm(everyone)["tags"] for client in clients]
    secret = (tmp_path / "0" / f"sum-{everyone['exchange'].tobytes().hex()}").read_bytes()
    void = np.stack([client.confirm(nobody)["tags"] for client in clients[:3]])
    assert not np.isin(void[:2, 2], [own[2] for own in confirmed]).all(1).any()
    np.testing.assert_array_equal(clients[0].confirm(nobody)["tags"], void[0])
    saved = (tmp_path / "0" / f"sum-{everyone['exchange'].tobytes().hex()}").read_bytes()
    parts = [json.loads(kind) for kind in (secret, saved)]
    assert not {parts[0]["seed"], parts[0]["self_mask"], *parts[0]["received"].values()} & {
        parts[1]["seed"], parts[1]["self_mask"], *parts[1]["received"].values()
    }  # fmt: skip

    tags = {**everyone, "tags": np.stack([own[0] for own in confirmed])}
    refused("were told the same of who is in the sum", clients[0].reveal, tags, error=SealError)
    refused("has confirmed other clients", clients[0].confirm, everyone, error=SealError)
    again = parcels(told, shared, 0)
    refused("has masked its numbers", clients[0].mask, again, WORDS, b"", error=SealError)

    two, three = ({**everyone, "clients": IDS[:n], "tags": void[:n, 0]} for n in (2, 3))
    refused("3 clients may yet open the sum", clients[0].free, two, error=SealError)
    refused("may yet open the sum", clients[3].free, {**three, "tags": void[:, 3]}, error=SealError)
    assert clients[0].free(three) == {}
    clients[3].reveal({**everyone, "tags": np.stack([own[3] for own in confirmed])})
    refused("has given its shares before", clients[3].confirm, nobody, error=SealError)
    refused("has given its shares before", clients[3].free, three, error=SealError)


def test_one_message_at_a_time_is_worked_on(clients, tmp_path):
    """Two that read the same secrets would mask the same words twice, with other masks."""
    told, shared = sharing(clients)
    message = parcels(told, shared, 0), WORDS, b""
    with claimed(tmp_path / "0", "sum"):
        refused("another process is at work", clients[0].mask, *message, error=BlockingIOError)
        refused("another process is at work", clients[0].shares, told, error=BlockingIOError)
    assert clients[0].mask(*message).shape == WORDS.shape


def test_secrets_of_sums_that_were_not_ended_go_with_the_next(clients, tmp_path):
    for _ in range(2):
        clients[0].shares(roster(clients))
    assert len(list((tmp_path / "0").glob("sum-*"))) == 1


def test_a_key_that_did_not_fit_on_the_disk_is_drawn_again(tmp_path, monkeypatch):
    """None is left half written, which nobody could load."""

    def cut_off(key, path):
        path.write_bytes(b"-----BEGIN")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(secure_sum, "save_key", cut_off)
        refused("No space left", load_or_draw_key, tmp_path / "a", error=OSError)
    drawn = load_or_draw_key(tmp_path / "a")
    assert public_bytes(load_or_draw_key(tmp_path / "a")) == public_bytes(drawn)


def test_a_part_in_a_sum_is_named_by_all_that_was_agreed_on_and_the_clients_place(clients):
    """A server may give two rosters with the same nonces. What frees one frees no other."""
    told = roster(clients)
    other = {**told, "threshold": np.array(4)}
    for k, client in enumerate(clients):
        client.shares(told if k % 2 else other)
    names = [client.name(named(told)) for client in clients]
    assert [name.rpartition("-")[2] for name in names] == ["0", "1", "2", "3"]
    first, second, *_ = (name.rpartition("-")[0] for name in names)
    assert first != second
