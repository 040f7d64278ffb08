"""Rows come back whole, in an order that tells nothing; only bad uploads are dropped."""

import io
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from fedntk.ntk import CompressedUpload, Jacobian, JacobianUpload, UploadLimits
from fedntk.ntk.payloads.npy import to_npy
from fedntk.trust import SealError, ShufflingServer, new_key, public_bytes, seal, seal_upload
from fedntk.trust.sealing import agree
from fedntk.trust.shuffling_server import Shuffled
from fedntk.trust.wire import frame, frame_arrays

from .uploads import (
    CLIENTS,
    ENROLLED,
    LIMITS,
    ROUND,
    RUN,
    refused,
    rows,
    sealed,
    senders,
    shuffle,
    upload,
)


@pytest.fixture
def server():
    return ShufflingServer(ENROLLED)


def reasons(shuffled: Shuffled) -> dict[int, str]:
    return {i: error.reason for i, error in shuffled.rejected.items()}


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_rows_stay_whole_and_none_is_lost(server, structure):
    parts = [upload(seed, 10 + seed, structure=structure) for seed in range(3)]
    shuffled = shuffle(server, [sealed(part, server) for part in parts])
    assert (shuffled.rejected, shuffled.accepted, shuffled.message) == ({}, 3, "")
    assert rows(shuffled.upload) == rows(JacobianUpload.concatenate(parts))


def test_all_orders_are_equally_likely():
    """Three rows, 120 times: chi^2 of 5 degrees of freedom is over 50.8 with probability 1e-9."""
    parts = [upload(0, 1), upload(1, 2)]
    data = JacobianUpload.concatenate(parts).outputs
    counts = Counter()
    for _ in range(120):
        server = ShufflingServer(ENROLLED)
        pooled = shuffle(server, [sealed(part, server) for part in parts]).upload
        counts[tuple(int((data == row).all(1).nonzero()) for row in pooled.outputs)] += 1
    chi_squared = sum((counts[order] - 20) ** 2 / 20 for order in permutations(range(3)))
    assert chi_squared < 50.8


def hostile_uploads(server: ShufflingServer) -> list[tuple[bytes, str]]:
    """Sealed bytes that cannot be used, and the reason for each."""
    part = upload(9, 10)
    arrays = CompressedUpload.compress(part).to_arrays()
    key, info = server.public_key, b'["fedntk upload 1", "run-7", 3]'

    def holding(content: bytes) -> bytes:
        sender = next(senders)
        return public_bytes(sender) + seal(content, key, info + agree(sender, key))

    blocks = [b.with_arrays([1e4 * a for a in b.arrays]) for b in part.jacobian.blocks]
    scaled = JacobianUpload(Jacobian(tuple(blocks)), part.outputs, part.targets)
    pickled = io.BytesIO()
    np.save(pickled, np.array([None]), allow_pickle=True)
    no_arrays = [b"abc", to_npy(np.zeros(9))[:-1], pickled.getvalue()]
    return [
        (b"rubbish" * 100, "not-enrolled"),
        (b"", "not-enrolled"),
        (ENROLLED[0], "sealed"),
        (sealed(part, ShufflingServer(ENROLLED)), "sealed"),
        (sealed(part, server, run="run-8"), "sealed"),
        (sealed(part, server, server_round=ROUND + 1), "sealed"),
        (holding(b"\xff" * 8), "arrays"),  # a frame that is cut off
        *((holding(frame([b"outputs", data])), "arrays") for data in no_arrays),
        (holding(b""), "arrays"),
        (holding(frame_arrays(dict(list(arrays.items())[:-1]))), "shape"),
        (sealed(upload(9, LIMITS.max_examples + 1), server), "shape"),
        (sealed(upload(9, 10, structure="dense"), server), "layout"),
        (sealed(scaled, server), "scale"),
    ]


@pytest.mark.parametrize("first", [True, False])
def test_only_bad_uploads_are_dropped(server, first):
    parts = [upload(seed, 10) for seed in range(5)]
    good = [sealed(part, server) for part in parts]
    bad, why = zip(*hostile_uploads(server), strict=True)
    shuffled = shuffle(server, [*bad, *good, good[0]] if first else [*good, *bad, good[0]])
    expected = {i + (0 if first else len(good)): reason for i, reason in enumerate(why)}
    assert reasons(shuffled) == expected | {len(bad) + len(good): "replayed"}
    assert shuffled.accepted == 5
    assert rows(shuffled.upload) == rows(JacobianUpload.concatenate(parts))


def forgeries(server: ShufflingServer) -> list[tuple[bytes, str]]:
    """Return what someone can make who knows every public key, the run, the round and this code."""
    arrays = CompressedUpload.compress(upload(9, 10)).to_arrays()
    victim, stranger, to = ENROLLED[0], new_key(), server.public_key
    info = b'["fedntk upload 1", "run-7", 3]'
    content = frame_arrays(arrays)
    return [
        (sealed(upload(9, 10), server, key=stranger), "not-enrolled"),
        (seal(content, to, info), "not-enrolled"),
        (victim + seal(content, to, info), "sealed"),
        (victim + seal(content, to, info + agree(stranger, to)), "sealed"),
        (victim + seal(content, to, info + agree(stranger, victim)), "sealed"),
        # an enrolled client in another's name
        (victim + sealed(upload(9, 10), server, key=CLIENTS[1])[32:], "sealed"),
    ]


def test_nobody_but_an_enrolled_client_spends_a_round(server):
    """A cheating server cannot mix one client's rows with those of uploads that it made."""
    mine, yours = (sealed(upload(k, 10), server, key=CLIENTS[k]) for k in range(2))
    false, why = zip(*forgeries(server), strict=True)
    shuffled = shuffle(server, [*false, mine])
    assert (shuffled.upload, shuffled.accepted) == (None, 1)
    assert reasons(shuffled) == dict(enumerate(why))
    shuffled = shuffle(server, [*false, mine, yours])
    assert (len(shuffled.upload.outputs), shuffled.accepted) == (20, 2)


def test_a_client_counts_once_in_a_round(server):
    """Neither its upload again nor another one of it counts."""
    first, again, other = (sealed(upload(k, 10), server, key=CLIENTS[k > 1]) for k in range(3))
    shuffled = shuffle(server, [first, first, again])
    assert (shuffled.upload, reasons(shuffled)) == (None, {1: "replayed", 2: "replayed"})
    shuffled = shuffle(server, [again, first, other, other])
    assert (shuffled.accepted, reasons(shuffled)) == (2, {1: "replayed", 3: "replayed"})


def test_uploads_of_one_round_count_in_no_other(server):
    """Neither in later ones, nor in another run; after a round, none before it is given out."""
    late, early = (
        [sealed(upload(k, 10), server, key=CLIENTS[k], server_round=r) for k in range(2)]
        for r in (ROUND, ROUND - 1)
    )
    assert reasons(shuffle(server, late, server_round=ROUND + 1)) == {0: "sealed", 1: "sealed"}
    other = server.shuffle(late, limits=LIMITS, run="run-8", server_round=ROUND)
    assert reasons(other) == {0: "sealed", 1: "sealed"}
    assert shuffle(server, late).accepted == 2
    refused = shuffle(server, early, server_round=ROUND - 1)
    assert "or a later one, was given out before" in refused.message
    assert server._given_out == {RUN: ROUND}  # what is refused takes no memory


def test_clients_may_be_enrolled_and_removed(server):
    data = [sealed(upload(k, 10), server, key=CLIENTS[k]) for k in range(2)]
    server.enrol(ENROLLED[1:])
    shuffled = shuffle(server, data)
    assert reasons(shuffled) == {0: "not-enrolled"}
    assert "add it to the enrolled keys" in shuffled.rejected[0].detail
    server.enrol(ENROLLED)
    assert shuffle(server, data).accepted == 2


def test_claims_of_another_number_of_examples_are_dropped(server):
    data = [sealed(upload(seed, 10), server) for seed in range(3)]
    place = {"limits": LIMITS, "run": RUN, "server_round": ROUND}
    with pytest.raises(SealError, match="expected one for each of 3 uploads, got 2"):
        server.shuffle(data, num_examples=[10, 10], **place)
    shuffled = server.shuffle(data, num_examples=[10, 11, 10], **place)
    assert (reasons(shuffled), shuffled.accepted) == ({1: "num-examples"}, 2)


def test_uploads_must_be_compressed_as_asked(server):
    tools = {"sparsity": 0.5, "bits": 6}
    limits = UploadLimits(LIMITS.parameters, 10, **tools)
    made = [
        CompressedUpload.compress(upload(seed, 10), by_row=seed > 0, **tools).to_arrays()
        for seed in range(2)
    ]
    pairs = zip(made, CLIENTS, strict=False)
    sent = [seal_upload(arrays, server.public_key, key, RUN, ROUND) for arrays, key in pairs]
    others = sealed(upload(2, 10), server, key=CLIENTS[2])
    shuffled = shuffle(server, [*(arrays.tobytes() for arrays in sent), others], limits)
    assert reasons(shuffled) == {2: "compression"}
    expected = [CompressedUpload.from_arrays(arrays, limits) for arrays in made]
    assert rows(shuffled.upload) == rows(JacobianUpload.concatenate(expected))


def test_upload_that_does_not_fit_in_memory_is_dropped(server, monkeypatch):
    data = [sealed(upload(seed, 10), server) for seed in range(2)]
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda *_: 0)
    assert reasons(shuffle(server, data)) == {0: "memory", 1: "memory"}


def test_too_few_clients_get_nothing_and_may_come_again(server, monkeypatch):
    """What was given out may not, even sealed anew: missing rows would be the missing client's."""
    data = [sealed(upload(seed, 10), server) for seed in range(3)]
    for count in (0, 1):
        shuffled = shuffle(server, [*data[:count], b"rubbish"])
        assert (shuffled.upload, shuffled.accepted) == (None, count)
        assert list(shuffled.rejected) == [count]
        assert f"expected the good uploads of 2 clients or more, got {count}" in shuffled.message

    def fail(_):
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(JacobianUpload, "concatenate", staticmethod(fail))
        refused("can't allocate", shuffle, server, data, error=RuntimeError)
    assert shuffle(server, data).accepted == 3
    for others in (data[1:], [sealed(upload(seed, 10), server) for seed in range(1, 3)]):
        again = shuffle(server, others)
        assert (again.upload, again.accepted) == (None, 0)
        assert "was given out before" in again.message


def test_more_clients_can_be_required_and_a_key_be_kept():
    key = new_key()
    data = [sealed(upload(seed, 10), ShufflingServer([], key)) for seed in range(4)]
    server = ShufflingServer(ENROLLED, key, min_clients=4)
    assert server.public_key == public_bytes(key)
    assert shuffle(server, data[:3]).upload is None
    assert shuffle(server, data).accepted == 4
    with pytest.raises(ValueError, match="min_clients: expected at least 2, got 1"):
        ShufflingServer([], min_clients=1)
