"""CompressedUpload: exact without tools, bounded before allocation; rows in any order."""

import struct

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.ntk import (
    BadReply,
    CompressedUpload,
    Jacobian,
    JacobianUpload,
    NotEnoughMemory,
    UploadLimits,
    compress,
    jacobian,
    one_hot,
)
from fedntk.ntk.payloads import compressed_upload as module
from fedntk.ntk.payloads import screen_uploads
from fedntk.ntk.payloads.compression import top_k
from fedntk.ntk.payloads.jacobian_format import jacobian_to_arrays


def network(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


MODEL = network()
SHAPES = {name: list(p.shape) for name, p in MODEL.named_parameters()}


def upload(n=12, seed=0, structure="factored"):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 6, generator=generator), torch.arange(n) % 3
    rows = jacobian(MODEL, x)
    with torch.no_grad():
        outputs = MODEL(x)
    return JacobianUpload(rows.to_dense() if structure == "dense" else rows, outputs, one_hot(y, 3))


def arrays_of(payload):
    return [array.tobytes() for array in payload.to_arrays()]


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_without_compression_every_bit_arrives(structure):
    sent = upload(structure=structure)
    received = CompressedUpload.from_arrays(
        CompressedUpload.compress(sent).to_arrays(), UploadLimits(SHAPES)
    )
    assert arrays_of(received) == arrays_of(sent)


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_each_tensor_is_sparsified_by_itself(structure):
    """In factors, layer inputs and output gradients; literally, each parameter's tensor."""
    sent = upload(structure=structure)
    asked = UploadLimits(SHAPES, sparsity=0.5)
    compressed = CompressedUpload.compress(sent, sparsity=0.5)
    received = CompressedUpload.from_arrays(compressed.to_arrays(), asked)
    pairs = zip(
        jacobian_to_arrays(sent.jacobian)[1:],
        jacobian_to_arrays(received.jacobian)[1:],
        strict=True,
    )
    for before, after in pairs:
        assert np.array_equal(
            after, np.where(top_k(before.reshape(1, -1), 0.5).reshape(before.shape), before, 0)
        )
    assert torch.equal(received.outputs, sent.outputs)
    assert torch.equal(received.targets, sent.targets)


def test_bytes_fall_as_declared():
    """Half the numbers with 6 bits of 32, and a bitmap of 1 bit: 4 bits of 32, plus scales."""
    sent = upload(n=200)
    plain, small = (
        sum(tensor.size for tensor in CompressedUpload.compress(sent, **options).tensors)
        for options in ({}, {"sparsity": 0.5, "bits": 6})
    )
    arrays = jacobian_to_arrays(sent.jacobian)[1:]
    heads, scales = sum(20 + 8 * a.ndim for a in arrays), 8 * len(arrays)
    assert small - heads - scales == pytest.approx((plain - heads) * 4 / 32, abs=8)


def test_embeddings_tokens_travel_as_they_are():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))
    x = torch.arange(30).reshape(10, 3)
    sent = JacobianUpload(jacobian(model, x), model(x).detach(), one_hot(torch.arange(10) % 3, 3))
    asked = UploadLimits({name: list(p.shape) for name, p in model.named_parameters()}, bits=8)
    arrays = CompressedUpload.compress(sent, bits=8).to_arrays()
    received = CompressedUpload.from_arrays(arrays, asked)
    assert torch.equal(received.jacobian.blocks[0].inputs, sent.jacobian.blocks[0].inputs)


def changed(position, value, **options):
    arrays = CompressedUpload.compress(upload(), **options).to_arrays()
    arrays[position] = value(arrays[position])
    return arrays


def reshaped(*shape):
    """Declare another shape for no numbers at all: a payload of a few bytes."""
    head = struct.pack("<BBBBQQ", 2, 32, 0, len(shape), 1, 0)
    code = head + b"".join(struct.pack("<Q", size) for size in shape)
    return lambda _: np.frombuffer(code, np.uint8)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (changed(0, lambda a: a[:-1]), "shape"),
        (changed(0, lambda a: a[:, :2]), "shape labels"),
        (changed(0, lambda a: a.astype(np.float16)), "dtype"),
        (changed(0, lambda a: a.astype(np.float64)), "dtype"),
        (changed(0, lambda a: a * np.nan), "non-finite"),
        (changed(0, lambda a: a[:0]), "shape"),
        (changed(0, lambda a: a[0]), "shape"),
        (changed(1, lambda a: a[:-1]), "shape"),
        (changed(1, lambda a: a.astype(np.int64)), "dtype"),
        (changed(1, lambda a: a + np.uint8(3)), "labels"),
        (changed(2, lambda a: a[:-1]), "layout"),
        (changed(3, lambda a: a[:-1]), "compression"),
        (changed(3, lambda a: a.astype(np.float32)), "compression"),
        (changed(3, lambda a: a.astype(np.int64)), "dtype shape"),
        (changed(3, reshaped(12, 1, 7)), "shape"),
        (changed(3, reshaped(11, 1, 6)), "shape"),
        (changed(3, reshaped(12)), "shape"),
        (changed(3, reshaped()), "shape"),
        (changed(4, reshaped(12, 3, 2**40, 8)), "compression"),
        (changed(4, reshaped(12, 3, 2**30, 8)), "shape"),
        (changed(4, reshaped(12, 2**30, 1, 8)), "shape"),
        ([], "shape"),
        (CompressedUpload.compress(upload()).to_arrays()[:-1], "shape"),
        ([*CompressedUpload.compress(upload()).to_arrays(), compress(np.ones(12))], "shape"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arrays, reason):
    with pytest.raises(BadReply) as refused:
        CompressedUpload.from_arrays(arrays, UploadLimits(SHAPES))
    assert refused.value.reason in reason.split()


def test_factors_larger_than_what_they_make_are_refused():
    """Positions are the client's to declare; the dense block bounds them, before they exist."""
    arrays = CompressedUpload.compress(upload()).to_arrays()
    arrays[3] = reshaped(12, 2**20, 6)(None)
    arrays[4] = reshaped(12, 3, 2**20, 8)(None)
    with pytest.raises(BadReply, match="factors larger"):
        CompressedUpload.from_arrays(arrays, UploadLimits(SHAPES))


@pytest.mark.parametrize(
    ("options", "asked", "detail"),
    [
        ({"sparsity": 0.4}, {"sparsity": 0.5}, "asked for 36 of 72 numbers, got 44"),
        ({}, {"sparsity": 0.1}, "asked for 65 of 72"),
        ({"bits": 7}, {"bits": 6}, "asked for 6 bits a number, got 7"),
        ({}, {"bits": 16}, "asked for 16 bits a number, got 32"),
    ],
)
def test_more_than_was_asked_for_is_refused(options, asked, detail):
    arrays = CompressedUpload.compress(upload(), **options).to_arrays()
    with pytest.raises(BadReply, match=detail):
        CompressedUpload.from_arrays(arrays, UploadLimits(SHAPES, **asked))


def test_less_than_was_asked_for_is_taken():
    arrays = CompressedUpload.compress(upload(), sparsity=0.9, bits=3).to_arrays()
    CompressedUpload.from_arrays(arrays, UploadLimits(SHAPES, sparsity=0.5, bits=6))


def test_too_many_examples_are_refused():
    arrays = CompressedUpload.compress(upload(n=12)).to_arrays()
    with pytest.raises(BadReply, match="at most 11 examples, got 12"):
        CompressedUpload.from_arrays(arrays, UploadLimits(SHAPES, max_examples=11))


def test_what_would_not_fit_in_memory_is_refused_undecoded(monkeypatch):
    def refuse(needed, what, **_):
        raise NotEnoughMemory(f"{what} {needed}")

    monkeypatch.setattr(module, "require_memory", refuse)
    arrays = CompressedUpload.compress(upload(), sparsity=0.5).to_arrays()
    with pytest.raises(NotEnoughMemory, match="decoded"):
        CompressedUpload.from_arrays(arrays, UploadLimits(SHAPES, sparsity=0.5))


# -------------------------------------------------------------------- order of rows


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_canonical_order_is_the_same_for_every_permutation(structure):
    whole = upload(n=20, structure=structure)
    expected = arrays_of(whole.canonical())
    for seed in range(3):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
        assert arrays_of(whole.rows(order).canonical()) == expected


def test_canonical_order_of_equal_outputs_is_that_of_the_jacobians():
    whole = upload(n=6)
    alike = JacobianUpload(
        whole.jacobian, torch.zeros(6, 3), one_hot(torch.zeros(6, dtype=torch.int64), 3)
    )
    expected = arrays_of(alike.canonical())
    assert arrays_of(alike.rows(torch.tensor([5, 3, 1, 0, 2, 4])).canonical()) == expected


def test_rows_keep_jacobian_outputs_and_targets_together():
    whole = upload(n=9)
    order = torch.tensor([4, 0, 8, 2])
    some = whole.rows(order)
    for before, after in zip(
        whole.jacobian.dense().values(), some.jacobian.dense().values(), strict=True
    ):
        assert torch.equal(after, before[order])
    assert torch.equal(some.outputs, whole.outputs[order])
    assert torch.equal(some.targets, whole.targets[order])


# ------------------------------------------------------------------------- pooling


def scaled(payload, rows=1.0, outputs=1.0):
    blocks = tuple(
        b.with_arrays([*b.arrays[:-1], b.arrays[-1] * rows]) for b in payload.jacobian.blocks
    )
    return JacobianUpload(Jacobian(blocks), payload.outputs * outputs, payload.targets)


def reasons(uploads):
    return [verdict and verdict.reason for verdict in screen_uploads(uploads)]


def test_uploads_alike_are_all_usable():
    assert reasons([upload(n, n) for n in (3, 5, 9)]) == [None, None, None]
    assert reasons([]) == []


def test_the_rarer_form_is_left_out_and_the_first_of_two():
    factored, dense = upload(seed=1), upload(seed=2, structure="dense")
    assert reasons([dense, factored, factored]) == ["layout", None, None]
    assert reasons([dense, factored]) == [None, "layout"]


def test_rows_and_outputs_far_over_the_median_are_left_out():
    three = [upload(seed=s) for s in range(3)]
    assert reasons([*three, scaled(upload(), rows=1e4)]) == [None] * 3 + ["scale"]
    assert reasons([*three, scaled(upload(), outputs=1e5)]) == [None] * 3 + ["scale"]
    assert reasons([upload(), scaled(upload(), rows=1e4)]) == [None, None]
    assert reasons([scaled(upload(), rows=float("inf")), *three])[0] == "scale"
