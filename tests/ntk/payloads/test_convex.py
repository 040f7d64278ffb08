"""ConvexTask through Flower's records; FeatureUpload's precision, and what it refuses."""

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from fedntk.ntk import BadReply, FeatureMap, NotEnoughMemory, UploadLimits, compress, one_hot
from fedntk.ntk.payloads.compression import num_kept
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.payloads.feature_upload import FeatureUpload
from fedntk.ntk.payloads.npy import from_npy, to_npy
from fedntk.ntk.support import memory as ntk_memory

from ...conftest import refused
from ..arithmetic import normal

TASKS = [
    ConvexTask(step="moments", network_key="a key"),
    ConvexTask(
        step="linear", features="last-layer", num_features=0, feature_seed=7, head="body.fc",
        bias=True, loss="cross-entropy", learning_rate=1e-300, local_steps=1, optimizer="fedavg",
        state_round=12, control="sent", sparsity=0.9, bits=6,
    ),
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_tasks_survive_flowers_config_among_other_keys(task):
    config = dict(ConfigRecord({"server-round": 3, "lr": 0.1, **task.to_config()}))
    received = ConvexTask.of_message(config)
    for name in ConvexTask.options():
        assert getattr(received, name) == getattr(task, name)
        assert type(getattr(received, name)) is type(getattr(task, name))
    assert received.feature_map == task.feature_map
    assert ConvexTask.of_message({"server-round": 3, "step": "linear"}) is None


def test_a_key_names_network_and_map():
    """The same for the same bytes, in whatever memory; another for any change in them."""
    state = [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 2), np.float32)]
    key = ConvexTask.key_of(FeatureMap(), state)
    assert ConvexTask.key_of(FeatureMap(), [np.array(a, order="F") for a in state]) == key
    first, *rest = state
    changed = (first.reshape(3, 2), np.nextafter(first, 9), first.view(np.int64))
    others = {ConvexTask.key_of(FeatureMap(), [own, *rest]) for own in changed}
    others |= {ConvexTask.key_of(FeatureMap(), own) for own in (state[::-1], state[:2])}
    assert len({key, ConvexTask.key_of(FeatureMap(seed=1), state), *others}) == 7


N, P, C = 20, 15, 4


def features(n=N):
    """Scales from 1e-12 to 1e12, one feature that is zero, one constant, one all negative."""
    z = (normal(n, P, seed=0) * torch.logspace(-12, 12, P, dtype=torch.float64)).float()
    z[:, 3], z[:, 5], z[:, 7] = 0, -2.5, -z[:, 7].abs()
    return z


def upload(n=N):
    return FeatureUpload.of(features(n), one_hot(torch.arange(n) % C, C))


def wire(payload, **options):
    """As the server receives it: arrays that cannot be written to."""
    return {name: from_npy(to_npy(a)) for name, a in payload.to_arrays(**options).items()}


def parse(received, **asked):
    return FeatureUpload.from_arrays(received, UploadLimits({}, **asked), width=P, num_outputs=C)


def test_float16_costs_a_share_of_each_features_scale():
    """z over its largest magnitude is in [-1, 1]: float16 is right to 2^-12 of a number of 1.

    Numbers under 2^-14 are right to 2^-25. Both are under 2^-11, and 2^-11 of a number over 2^-13.
    """
    z = features()
    sent = upload()
    assert sent.features.dtype == np.float16
    received = parse(wire(sent)).rows(0, N)
    error = (received.double() - z.double()).abs()
    scale = z.abs().amax(0).double()
    assert bool((error <= 2**-11 * scale).all())
    large = z.abs() > 2**-13 * scale
    assert bool((error <= 2**-11 * z.abs().double())[large].all())
    assert torch.equal(received[:, 3], torch.zeros(N))
    assert torch.equal(received[:, 5], z[:, 5])


def test_labels_have_the_smallest_type():
    assert parse(wire(upload())).labels.dtype == np.uint8
    many = FeatureUpload.of(torch.ones(1, 2), one_hot(torch.tensor([299]), 300))
    assert (many.labels.dtype, many.labels.tolist()) == (np.uint16, [299])


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"sparsity": 0.5}])
def test_labels_and_rows_arrive_in_their_order_however_often_they_are_read(options):
    received = parse(wire(upload(), **options), **options)
    assert np.array_equal(received.labels, np.arange(N) % C)
    first = received.rows(0, N).clone()
    assert torch.equal(torch.cat([received.rows(0, 7), received.rows(7, N)]), first)
    received.rows(2, 9).zero_()
    assert torch.equal(received.rows(0, N), first)


@pytest.mark.parametrize(("sparsity", "bits"), [(0.0, 4), (0.3, 8), (0.3, 32), (0.9, 16)])
def test_compressed_features_lose_what_was_asked(sparsity, bits):
    """Each row keeps its k largest shares of the scale; b bits are right to 1/2 in 2^(b-1) - 1."""
    plain, options = parse(wire(upload())), {"sparsity": sparsity, "bits": bits}
    received = parse(wire(upload(), **options), **options)
    before, after = plain.features.astype(np.float64), received.features
    assert after.dtype == np.float32
    count = num_kept(P, sparsity)
    step = 0 if bits == 32 else 0.5 / (2 ** (bits - 1) - 1)
    for row, sent in zip(after, before, strict=True):
        order = np.argsort(-np.abs(sent), kind="stable")
        assert not row[order[count:]].any()
        assert np.abs(row - sent)[order[:count]].max() <= step + 1e-6
    assert np.array_equal(received.scale, plain.scale)


def put(value):
    """Write one number, among others."""

    def damage(array):
        array = array.copy()
        array.reshape(-1)[3] = value
        return array

    return damage


def declared(*shape, form=2, bits=8, groups=1, count=0):
    """Code of a few bytes for a tensor of any size."""
    head = struct.pack("<BBBBQQ", form, bits, 0, len(shape), groups, count)
    code = head + b"".join(struct.pack("<Q", size) for size in shape) + bytes(8 * groups)
    return np.frombuffer(code, np.uint8)


NAN = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
HOSTILE = [
    ("features", lambda a: a.astype(np.float32), "dtype"),
    ("features", lambda a: compress(a.astype(np.float32), bits=8), "dtype"),
    ("features", lambda a: a[:-1], "shape"),
    ("features", lambda a: a[:, :-1], "shape"),
    ("features", lambda a: a[..., None], "shape"),
    ("features", put(np.nan), "non-finite"),
    ("features", put(1.02), "range"),
    ("features", put(-1.02), "range"),
    ("scale", lambda a: a.astype(np.float64), "dtype"),
    ("scale", lambda a: a[:-1], "shape"),
    ("scale", put(np.inf), "non-finite"),
    ("scale", put(-1e-30), "range"),
    ("scale", put(3.4e38), "range"),
    ("labels", lambda a: a.astype(np.int64), "dtype"),
    ("labels", lambda a: a[:-1], "shape"),
    ("labels", lambda a: a[:0], "shape"),
    ("labels", lambda a: a[:, None], "shape"),
    ("labels", put(C), "labels"),
]
HOSTILE_CODE = [
    (lambda a: a[:-1], "compression"),
    (lambda a: np.concatenate([a, a[:1]]), "compression"),
    (lambda a: a[None], "compression"),
    (lambda a: a.astype(np.int8), "dtype"),
    (lambda a: upload().features, "dtype"),
    (lambda a: compress(np.ones((N, P)), bits=8), "shape"),  # float64
    (lambda a: compress(np.ones((N - 1, P), np.float32), bits=8), "shape"),
    (lambda a: compress(np.ones((N, P + 1), np.float32), bits=8), "shape"),
    (lambda a: compress(np.full((N, P), 1.5, np.float32), bits=8), "range"),
    (lambda a: declared(N, 2**40), "shape"),
    (lambda a: declared(N, P, 2**30), "shape"),
    (lambda a: declared(2**60, 2**60), "compression"),
    (lambda a: declared(N, P, count=P), "compression"),
]


@pytest.mark.parametrize(
    ("options", "name", "damage", "reason"),
    [
        *(({}, *row) for row in HOSTILE),
        *(({"bits": 8}, "features", *row) for row in HOSTILE_CODE),
        # not quantised: the last number's bytes are a NaN's
        ({"sparsity": 0.5}, "features", lambda a: np.concatenate([a[:-4], NAN]), "non-finite"),
    ],
)
def test_hostile_uploads_are_refused_with_the_reason(options, name, damage, reason):
    received = upload().to_arrays(**options)
    with pytest.raises(BadReply, match=f"^{reason}: "):
        parse(received | {name: damage(received[name])}, **options)


def test_other_arrays_and_more_examples_than_allowed_are_refused():
    for received in ({"scale": np.zeros(P)}, upload().to_arrays() | {"more": np.zeros(1)}):
        refused(r"^arrays: expected features, scale, labels, got ", parse, received, error=BadReply)
    parse(upload().to_arrays(), max_examples=N)
    refused("expected at most", parse, upload().to_arrays(), max_examples=N - 1, error=BadReply)


@pytest.mark.parametrize(
    ("options", "asked", "detail"),
    [
        ({"sparsity": 0.2}, {"sparsity": 0.4}, "asked for 180 of 300 numbers, got 240"),
        ({"bits": 8}, {"sparsity": 0.4}, "asked for 180 of 300 numbers, got 300"),
        ({"bits": 8}, {"bits": 6}, "asked for 6 bits a number, got 8"),
    ],
)
def test_more_than_was_asked_for_is_refused(options, asked, detail):
    with pytest.raises(BadReply, match=f"compression: .*{detail}"):
        parse(upload().to_arrays(**options), **asked)
    parse(upload().to_arrays(sparsity=0.9, bits=3), **asked)  # less is taken


def test_declared_sizes_are_not_allocated(monkeypatch):
    """4 GB of zeros in a code of 44 bytes, where labels agree: less than 1 MB is used."""
    wide = 10**6
    code, scale = declared(1000, wide), np.ones(wide, np.float32)
    received = {"features": code, "scale": scale, "labels": np.zeros(1000, np.uint8)}
    monkeypatch.setattr(ntk_memory, "available_memory", lambda device: 4 * 10**9 - 1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(NotEnoughMemory, match=r"4\.0 GB"):
        FeatureUpload.from_arrays(received, UploadLimits({}, bits=8), width=wide, num_outputs=C)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 10**6 + wide  # a check of `scale` takes a byte for each


def test_scaled_features_are_float32():
    """Numbers may be 1 % over 1, and scales as large as is allowed."""
    z = upload()
    largest = {"features": np.full_like(z.features, 1.01), "scale": np.full(P, 1e38, np.float32)}
    received = parse(z.to_arrays() | largest)
    assert bool(torch.isfinite(received.rows(0, N)).all())
