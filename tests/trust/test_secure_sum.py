"""Sums of masked words: exact whoever drops out, closed to everything but the sum of all."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedntk.trust import MaskedSum, Masker, Roster, SealError, new_key, public_bytes, secure_sum
from fedntk.trust.secure_sum import PARCEL_BYTES

from .uploads import refused

IDS = (2, 3, 5, 8, 13)
SIZE = 1000
KEYS = {k: new_key() for k in IDS}
PUBLIC = tuple(public_bytes(key) for key in KEYS.values())


def roster(threshold: int = 3, **changes: Any) -> Roster:
    values = {
        "exchange": b"0123456789abcdef",
        "clients": IDS,
        "threshold": threshold,
        "keys": PUBLIC,
    }
    return Roster(**{**values, **changes})


def numbers(client: int) -> np.ndarray:
    """Whole numbers of both signs."""
    return np.random.default_rng(client).integers(-(2**26), 2**26, SIZE)


def total_of(clients: Sequence[int], dtype: Any = np.uint32) -> np.ndarray:
    return np.sum([numbers(k) for k in clients], axis=0).astype(dtype)


def agreed(sharing: Sequence[int] = IDS, threshold: int = 3) -> dict[int, Masker]:
    """Clients that have each other's parcels."""
    maskers = {k: Masker(roster(threshold), k, KEYS[k]) for k in sharing}
    parcels = {k: masker.parcels() for k, masker in maskers.items()}
    for k, masker in maskers.items():
        masker.receive({j: parcels[j][k] for j in sharing if j != k})
    return maskers


def server_of(maskers: dict[int, Masker]) -> MaskedSum:
    promises = {k: masker.promise for k, masker in maskers.items()}
    return MaskedSum(next(iter(maskers.values())).roster, promises)


def given(
    maskers: dict[int, Masker], arrived: Sequence[int], revealing: Sequence[int]
) -> dict[int, dict[int, bytes]]:
    """Shares of some, after all those whose words arrived have confirmed it."""
    fresh = {k: replace(maskers[k], arrived=()) for k in arrived}
    tags = {k: masker.confirm(arrived) for k, masker in fresh.items()}
    return {k: fresh[k].reveal({j: tags[j][k] for j in arrived if j != k}) for k in revealing}


def masked(maskers: dict[int, Masker], arrived: Sequence[int], dtype: Any = np.uint32):
    words = [maskers[k].mask(numbers(k).astype(dtype)) for k in arrived]
    return np.sum(words, axis=0, dtype=dtype)


def opened(
    maskers: dict[int, Masker], arrived: Sequence[int], revealing: Sequence[int], dtype: Any = "u4"
) -> np.ndarray:
    words = masked(maskers, arrived, dtype)
    return server_of(maskers).unmask(words, arrived, given(maskers, arrived, revealing))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_the_sum_is_exact_whoever_drops_out_at_whatever_step(dtype):
    """All ways in which three of five, or more, go on to the end."""
    for sharing in (IDS, IDS[1:], IDS[::2]):
        maskers = agreed(sharing)
        for count in range(3, len(sharing) + 1):
            for arrived in itertools.combinations(sharing, count):
                actual = opened(maskers, arrived, arrived[-3:], dtype)
                np.testing.assert_array_equal(actual, total_of(arrived, dtype))


def test_masks_of_pairs_are_known_only_to_the_pair_and_uniform():
    """Without the own mask words have mean and variance of uniform ones, to 4 standard errors."""
    actual, zeros = [], np.zeros(100_000, np.uint32)
    for _ in range(2):
        masker = agreed()[5]
        words = masker.mask(zeros)
        assert not zeros.any()  # the client's own are as they were
        masker.roster.add_self_mask(words, masker.self_mask, -1)
        actual.append(words)
    assert (actual[0] == 0).mean() < 1e-3
    assert (actual[0] == actual[1]).mean() < 1e-3
    for words in (actual[0], agreed()[5].mask(zeros)):
        shares = words.astype(np.float64) / 2**32
        assert abs(shares.mean() - 1 / 2) < 4 * (1 / 12 / 100_000) ** 0.5
        assert abs(shares.var() - 1 / 12) < 4 * (1 / 180 / 100_000) ** 0.5


def test_the_masks_of_a_subset_or_about_different_things_do_not_cancel():
    maskers = agreed()
    shares = given(maskers, IDS, IDS)
    words = {k: masker.mask(numbers(k).astype(np.uint32)) for k, masker in maskers.items()}
    server = server_of(maskers)

    def share_opened(server: MaskedSum, some: Sequence[int]) -> float:
        total = np.sum([words[k] for k in some], axis=0, dtype=np.uint32)
        return (server.unmask(total, IDS, shares) == total_of(some)).mean()  # with all shares

    assert share_opened(server, IDS) == 1
    for some in ([2], [2, 3], [2, 3, 5, 8]):
        assert share_opened(server, some) == 0
        # as if the others' words had not arrived
        refused("not of what it promised", server.unmask, words[2], some, shares)
    words[5] = maskers[5].mask(numbers(5).astype(np.uint32), b"network 2")
    for about in (b"network 2", b""):
        assert share_opened(replace(server, about=about), IDS) == 0


def test_secrets_are_drawn_anew_and_promises_do_not_tell_them():
    first, second = (Masker(roster(), 2, KEYS[2]) for _ in range(2))
    assert len({first.seed, first.self_mask, second.seed, second.self_mask}) == 4
    public = first.promise.mask_key + first.promise.commitment
    assert first.seed not in public
    assert first.self_mask not in public
    parcels = [*first.parcels().values(), *first.parcels().values()]
    assert len({parcel[:12] for parcel in parcels}) == 8  # nonces: twice with the same key


def test_fewer_shares_than_the_threshold_open_nothing():
    maskers = agreed()
    for place, secret in (
        (slice(32, 48), maskers[13].seed),
        (slice(48, 64), maskers[13].self_mask),
    ):
        shares = [(i + 1, maskers[k].received[13][place]) for i, k in enumerate(IDS)]
        assert Shamir.combine(shares[:3]) == secret
        assert Shamir.combine(shares[:2]) != secret
    refused("2 clients are left, 3 are needed", opened, maskers, IDS, IDS[:2])


def test_secrets_are_those_that_the_shares_library_finds():
    rng = np.random.default_rng(0)
    for threshold, count in ((2, 2), (3, 5), (40, 60)):
        secret = rng.bytes(16)
        shares = Shamir.split(threshold, count, secret, ssss=False)
        some = [shares[i] for i in rng.permutation(count)[:threshold]]
        wrong = [(i, rng.bytes(16)) for i, _ in some]
        for points, expected in ((some, secret), (wrong, Shamir.combine(wrong, ssss=False))):
            actual = secure_sum._value({i: int.from_bytes(share) for i, share in points})
            assert actual.to_bytes(16) == expected


def test_clients_who_were_told_different_things_give_no_shares():
    """Else five clients that each leave out one would open sums that differ by single clients."""
    maskers = agreed(threshold=4)
    tags = {k: maskers[k].confirm(set(IDS) - {IDS[i - 1]}) for i, k in enumerate(IDS)}
    for k, masker in maskers.items():
        came = {j: tags[j][k] for j in IDS if k in tags[j]}
        refused("1 clients were told the same of who is in the sum", masker.reveal, came)


def test_a_client_confirms_once_and_counts_each_tag_for_what_it_is():
    maskers = agreed(threshold=4)
    refused("0 clients were told the same", maskers[2].reveal, {})
    tags = {k: maskers[k].confirm(IDS) for k in IDS}
    maskers[2].confirm(IDS)  # the same again
    refused("has confirmed other clients", maskers[2].confirm, IDS[:4])
    good = {k: tags[k][2] for k in (3, 5, 8)}
    assert len(maskers[2].reveal(good)) == 5
    for bad in (
        {k: good[k] for k in (3, 5)},
        {**good, 8: good[5]},  # another client's
        {**good, 8: tags[8][3]},  # for another client
        {**good, 8: tags[2][8]},  # its own, as if from there
        {**good, 8: b""},
        {3: good[3], 5: good[5], 2: good[3], 99: good[5]},
    ):
        refused("3 clients were told the same", maskers[2].reveal, bad)


def test_a_client_gives_shares_only_for_its_sum():
    maskers = agreed()
    for arrived, words in (
        ([3, 5, 8], "this one among them"),
        ([2, 3, 99], "expected clients of this sum"),
        ([2, 3], "2 clients are left, 3 are needed"),
    ):
        refused(words, maskers[2].confirm, arrived)
    both = maskers[2].received
    expected = {k: both[k][48:] if k in (2, 3, 5) else both[k][32:48] for k in IDS}
    assert given(maskers, (2, 3, 5), (2,))[2] == expected  # of either secret, never of both


def test_a_server_with_an_accomplice_opens_single_clients_if_the_threshold_is_low():
    """Client 2 stands with the server, and confirms two sets, c = 1 of K = 5.

    Up to a threshold of (K + c) / 2 = 3 it gets shares of both secrets of the others. Above it any
    two sets have an honest client in common, who confirms only one.
    """
    maskers, sets = agreed(threshold=3), [(2, 3, 5), (2, 8, 13)]
    first, second = (given(maskers, arrived, arrived) for arrived in sets)
    server = server_of(maskers)
    secret, seed = (
        server._secret({IDS.index(k) + 1: int.from_bytes(s[3]) for k, s in some.items()}, 3, in_sum)
        for some, in_sum in ((first, True), (second, False))
    )
    broken = replace(maskers[3], seed=seed, self_mask=secret)
    words = masked(maskers, [3]) - broken.mask(np.zeros(SIZE, np.uint32))
    np.testing.assert_array_equal(words, total_of([3]))

    maskers = agreed(threshold=4)
    maskers[5].confirm((2, 3, 5, 8))
    refused("confirmed other clients", maskers[5].confirm, (2, 5, 8, 13))


@functools.cache
def sharing(count: int, threshold: int) -> tuple[MaskedSum, dict[int, dict[int, bytes]], bytes]:
    """A server, the shares of the secrets of 1, 2 and 3 that clients give, and what it opens."""
    keys = tuple(bytes([k]) * 32 for k in range(count))
    told = Roster(bytes(16), tuple(range(count)), keys, threshold)
    secrets = {k: bytes([7 * k]) * 16 for k in (1, 2, 3)}
    promises = {k: told.promise(secret, secret) for k, secret in secrets.items()}
    shares = {
        k: Shamir.split(threshold, count, shares_of, ssss=False) for k, shares_of in secrets.items()
    }
    given = {i: {k: shares_of[i][1] for k, shares_of in shares.items()} for i in range(count)}
    server = MaskedSum(told, promises)
    return server, given, server.unmask(np.zeros(4, np.uint64), promises, given).tobytes()


def opens(
    count: int, threshold: int, givers: Sequence[int], lies: dict[int, dict[int, bytes]]
) -> dict[int, set[int]] | None:
    """Return the conflicts if the sum opens, and is right; None if it stays closed."""
    server, given, expected = sharing(count, threshold)
    fresh, given = replace(server, conflicts={}), {k: given[k] | lies.get(k, {}) for k in givers}
    try:
        opened = fresh.unmask(np.zeros(4, np.uint64), server.promises, given)
    except SealError:
        return None
    assert opened.tobytes() == expected
    return fresh.conflicts


def false_shares(count: int, threshold: int, liars: Sequence[int], agree: bool, rng: Any):
    """Shares of other secrets: each drawn by itself, or all on one other polynomial."""
    wrong = Shamir.split(threshold, count, rng.bytes(16), ssss=False)
    return {i: {k: wrong[i][1] if agree else rng.bytes(16) for k in (1, 2, 3)} for i in liars}


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize(
    ("count", "threshold", "missing"), [(5, 3, 0), (7, 4, 1), (8, 5, 0), (12, 7, 0), (12, 7, 1)]
)
def test_false_shares_are_corrected_up_to_the_bound_wherever_they_are(
    count, threshold, missing, agree
):
    """With m givers, e of them false: m - e >= threshold + e. Liars in the way are named."""
    rng = np.random.default_rng(count)
    for trial in range(6):
        givers = sorted(rng.permutation(count)[missing:].tolist())
        most = (len(givers) - threshold) // 2
        liars = [
            givers[:most],
            givers[-most:],
            givers[threshold - most : threshold],
            givers[1::2][:most],
            *[rng.permutation(givers)[:most].tolist()] * 2,
        ][trial]
        lies = false_shares(count, threshold, liars, agree, rng)
        actual = opens(count, threshold, givers, lies)
        assert actual is not None
        in_the_way = set(givers[:threshold]) & set(liars)
        assert actual == ({k: {1, 2, 3} for k in liars} if in_the_way else {})


def test_two_givers_of_false_shares_close_no_sum_that_has_enough_right_ones():
    """Every pair of five: three right shares are enough, whoever lies, about however much."""
    rng = np.random.default_rng(0)
    for liars in itertools.combinations(range(5), 2):
        for agree in (False, True):
            lies = false_shares(5, 3, liars, agree, rng)
            assert opens(5, 3, range(5), lies) is not None
            assert opens(5, 3, range(5), {liars[0]: lies[liars[0]]}) is not None
        some = {k: {i + 1: lies[k][i + 1]} for i, k in enumerate(liars)}  # of one secret each
        actual = opens(5, 3, range(5), some)
        assert actual is not None
        assert all(actual[k] == set(some[k]) for k in actual)


@pytest.mark.parametrize("agree", [False, True])
def test_beyond_the_bound_a_sum_opens_as_long_as_sets_can_be_tried(agree, monkeypatch):
    """Six of ten are right, and of 210 sets of six one has no other; with five right, none."""
    rng = np.random.default_rng(1)
    lies = false_shares(10, 6, (0, 2, 5, 9), agree, rng)
    assert opens(10, 6, range(10), lies) == {k: {1, 2, 3} for k in lies}
    assert opens(10, 6, range(10), false_shares(10, 6, range(5), agree, rng)) is None
    monkeypatch.setattr(secure_sum, "MOST_SETS", 10)
    assert opens(10, 6, range(10), lies) is None


def test_those_known_to_lie_are_left_out_so_that_more_false_shares_are_corrected(monkeypatch):
    """Two of nine can be corrected. Two lie about all secrets, and a third later on."""
    monkeypatch.setattr(secure_sum, "MOST_SETS", 0)
    lies = false_shares(9, 5, (0, 3, 1), False, np.random.default_rng(2))
    assert opens(9, 5, range(9), lies) is None
    del lies[1][1]
    assert opens(9, 5, range(9), lies) == {0: {1, 2, 3}, 3: {1, 2, 3}, 1: {2, 3}}


def test_in_an_honest_sum_nothing_is_decoded_and_no_share_more_than_needed_is_read(monkeypatch):
    decoded, read, value = [], [], secure_sum._value
    monkeypatch.setattr(secure_sum, "_wrong_points", lambda *_: decoded.append(1) or set())
    monkeypatch.setattr(secure_sum, "_value", lambda some, at=0: read.append(at) or value(some, at))
    sharing.cache_clear()
    server, *_ = sharing(9, 5)
    assert not decoded
    assert read == [0] * 3
    assert not server.conflicts


def test_whose_secret_cannot_be_had_is_named():
    """It promised something else than it shared, or too many gave false shares of it."""
    maskers, arrived = agreed(), IDS[:4]
    total, shares = masked(maskers, arrived), given(maskers, arrived, arrived)
    server = server_of(maskers)
    lying = replace(server.promises[3], commitment=bytes(32))
    closed = replace(server, promises={**server.promises, 3: lying})
    said = r"shares of client 3's secret are not of.*or more than 0 of \[2, 3, 5, 8\], does not"
    refused(said, closed.unmask, total, arrived, shares)
    named = replace(closed, names={k: k + 1 for k in IDS})
    refused(said.replace("3's", "4's").replace("2, 3, 5, 8", "3, 4, 6, 9"),
            named.unmask, total, arrived, shares)  # fmt: skip
    for k in (2, 3):
        shares[k] = dict.fromkeys(IDS, bytes(16))
    refused("shares of client 2's secret", server.unmask, total, arrived, shares)


def voiding(threshold: int, some: Sequence[int]) -> tuple[dict[int, Masker], dict]:
    """Clients of whom some have given the sum up, and their tags."""
    maskers = agreed(threshold=threshold)
    return maskers, {k: maskers[k].void() for k in some}


@pytest.mark.parametrize("liars", [0, 1, 2])
@pytest.mark.parametrize("threshold", [3, 4, 5])
def test_a_sum_counts_as_given_up_once_too_few_are_left_to_open_it(threshold, liars):
    """Of five, those who gave it up and do not lie about it have no shares."""
    for count in range(1, 6):
        maskers, tags = voiding(threshold, IDS[:count])
        came = {k: tags[k][2] for k in IDS[1:count]}
        if 5 - (count - liars) < threshold:
            maskers[2].require_void(came, liars)
        else:
            refused("may yet open the sum", maskers[2].require_void, came, liars)


def test_tags_of_a_sum_given_up_count_once_for_what_they_are():
    maskers, tags = voiding(4, (2, 3, 5))
    good = {k: tags[k][2] for k in (3, 5)}
    maskers[2].require_void(good, 1)
    other, same = voiding(4, IDS)  # of another sum
    other[2] = replace(other[2], roster=roster(4, exchange=bytes(16)))
    for masker, bad in (
        (maskers[2], {3: good[3]}),
        (maskers[2], {3: good[3], 5: good[3], 8: good[3], 99: good[3]}),  # one's in others' names
        (maskers[2], {3: good[3], 5: tags[5][3]}),  # to another client
        (maskers[2], {3: good[3], 5: tags[2][5]}),  # its own, as if from there
        (maskers[2], {3: good[3], 2: good[3], 5: b""}),
        (maskers[8], {k: tags[k][8] for k in tags}),  # it has not given the sum up itself
        (other[2], {k: same[k][2] for k in IDS[1:]}),
    ):
        refused("clients may yet open the sum", masker.require_void, bad, 1)
    confirming = agreed(threshold=4)
    confirming[2].confirm(IDS)
    confirmed = {k: confirming[k].confirm(IDS)[2] for k in IDS[1:]}
    for masker in (maskers[2], confirming[2]):
        refused("may yet open the sum", masker.require_void, confirmed, 1)


def test_who_gave_a_sum_up_keeps_no_secret_and_confirms_and_reveals_nothing():
    """Whether before or after it confirmed; nor do others take its tags for confirmations."""
    for confirmed in (False, True):
        maskers = agreed()
        known = {maskers[2].seed, maskers[2].self_mask}
        known |= {c[32 + i : 48 + i] for c in maskers[2].received.values() for i in (0, 16)}
        if confirmed:
            maskers[2].confirm(IDS)
        tags = {k: maskers[k].void() for k in (2, 3, 5)}
        kept = maskers[2].to_bytes()
        assert not any(secret.hex().encode() in kept for secret in known)
        maskers[2] = Masker.from_bytes(kept, KEYS[2])
        refused("confirmed other clients", maskers[2].confirm, IDS)
        for came in (tags, {k: maskers[k].confirm(IDS) for k in (8, 13)}):
            tags_of_others = {k: tag[2] for k, tag in came.items() if k != 2}
            refused("1 clients were told the same", maskers[2].reveal, tags_of_others)
        tags_of_others = {k: tags[k][8] for k in tags}
        refused("1 clients were told the same", maskers[8].reveal, tags_of_others)


def test_parcels_open_for_their_receiver_only_in_their_sum():
    sender, receiver = (Masker(roster(), k, KEYS[k]) for k in (2, 3))
    parcels = sender.parcels()
    refused("2 clients are left, 3 are needed", receiver.receive, {2: parcels[3]})
    assert parcels[3] != replace(sender, received={}).parcels()[3]
    others = {5: bytes(PARCEL_BYTES), 8: bytes(PARCEL_BYTES)}
    for parcel in (parcels[5], parcels[3][:-1], parcels[3][:20] + bytes(72), b""):
        damaged = {2: parcel, **others}
        refused("what client 2 sent does not open", receiver.receive, damaged)
    renamed = {**others, 5: parcels[3]}  # another one's, under its name
    refused("what client 5 sent does not open", receiver.receive, renamed)
    returned = {3: parcels[3], **others}  # its own, as if from the receiver
    refused("what client 3 sent does not open", sender.receive, returned)
    key, info = sender._channel(3, sends=True)
    longer = bytes(12) + ChaCha20Poly1305(key).encrypt(bytes(12), bytes(65), info)
    refused("expected 92 bytes of shares", receiver.receive, {2: longer, **others})
    came = {2: parcels[3], **others, 13: bytes(92)}
    for changed in (  # the server told these two something else
        roster(4), roster(exchange=bytes(16)), roster(keys=(*PUBLIC[:4], public_bytes(new_key())))
    ):  # fmt: skip
        refused("what client 2 sent does not open", Masker(changed, 3, KEYS[3]).receive, came)
    refused("another public key of this client", Masker, roster(), 2, KEYS[3])
    weak = roster(keys=(*PUBLIC[:4], bytes(32)))  # of low order: everybody would know the secret
    refused("full order", Masker(weak, 2, KEYS[2]).parcels)


def first(count: int, threshold: int) -> dict[str, Any]:
    return {"clients": IDS[:count], "keys": PUBLIC[:count], "threshold": threshold}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (first(5, 6), "more than half of 5 clients"),
        (first(4, 2), "more than half of 4 clients"),
        ({"clients": (*IDS, 21), "keys": (*PUBLIC, bytes(32))}, "half of 6 clients.*, got 3"),
        (first(3, 2), "at least 3 and at most all, got 2"),
        (first(2, 2), "at least 3 clients"),
        ({"clients": IDS[::-1]}, "clients in order"),
        ({"clients": (2, 3, 5, 8, 8)}, "each once"),
        ({"keys": (bytes(32),) * 5}, "keys of their own"),
        ({"keys": (bytes(31),) * 5}, "5 public keys of 32 bytes"),
    ],
)
def test_a_roster_under_which_numbers_would_not_be_safe_is_refused(changes, words):
    refused(words, roster, **changes)


def test_a_client_goes_on_from_what_it_kept():
    maskers = agreed()
    kept = {k: Masker.from_bytes(masker.to_bytes(), KEYS[k]) for k, masker in maskers.items()}
    np.testing.assert_array_equal(opened(kept, IDS[:4], IDS[:3]), total_of(IDS[:4]))
    assert kept == maskers
