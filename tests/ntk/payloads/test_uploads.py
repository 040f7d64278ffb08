"""Compressed uploads and parcels of neighbours: exact without tools, bounded before allocation."""

import struct

import numpy as np
import pytest
import torch
from torch import nn

from fedntk import ntk
from fedntk.ntk.payloads.compression import top_k
from fedntk.ntk.payloads.screening import screen_uploads
from fedntk.ntk.payloads.uploads import JacobianParcel

from ...conftest import refused

with torch.random.fork_rng(devices=[]):
    torch.default_generator.manual_seed(0)
    MODEL = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
SHAPES = {name: list(p.shape) for name, p in MODEL.named_parameters()}
both_structures = pytest.mark.parametrize("structure", ["factored", "dense"])


def upload(n=12, seed=0, structure="factored"):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 6, generator=generator), torch.arange(n) % 3
    jac = ntk.jacobian(MODEL, x, structure="dense" if structure == "dense" else "factored")
    jac = jac if structure == "read out" else jac.expanded()
    return ntk.JacobianUpload(jac, MODEL(x).detach(), ntk.one_hot(y, 3))


def compressed(sent=None, **options):
    return ntk.CompressedUpload.compress(sent or upload(), **options).to_arrays()


def received(arrays, **limits):
    return ntk.CompressedUpload.from_arrays(arrays, ntk.UploadLimits(SHAPES, **limits))


def arrays_of(payload):
    return {name: array.tobytes() for name, array in payload.to_arrays().items()}


def tensors_of(payload):
    return [array for block in payload.jacobian.blocks for array in block.arrays]


@both_structures
def test_without_compression_every_bit_arrives_in_any_order_of_arrays(structure):
    sent = upload(structure=structure)
    assert arrays_of(received(compressed(sent))) == arrays_of(sent)
    assert arrays_of(received(dict(reversed(compressed(sent).items())))) == arrays_of(sent)
    turned = dict(reversed(sent.to_arrays().items()))
    assert arrays_of(ntk.JacobianUpload.from_arrays(turned, parameters=SHAPES)) == arrays_of(sent)


def test_layers_that_are_read_out_travel_by_themselves_only_uncompressed():
    """What is compressed has all of the Jacobian in it."""
    sent, weights = upload(structure="read out"), MODEL.state_dict()
    arrays = dict(reversed(sent.to_arrays().items()))
    actual = ntk.JacobianUpload.from_arrays(arrays, parameters=SHAPES, weights=weights)
    assert arrays_of(actual) == arrays_of(sent)
    assert torch.equal(actual.jacobian.gram(), sent.jacobian.gram())
    assert ntk.JacobianUpload.concatenate([actual, sent]).jacobian.form == sent.jacobian.form
    with pytest.raises(ntk.BadReply, match=r"^layout: "):
        ntk.JacobianUpload.from_arrays(arrays, parameters=SHAPES)
    assert arrays_of(received(compressed(sent))) == arrays_of(upload())
    parcel, limits = JacobianParcel(sent), ntk.UploadLimits(SHAPES)
    actual = JacobianParcel.from_arrays(parcel.to_arrays(), limits=limits, receiver=parcel)
    assert arrays_of(actual.upload) == arrays_of(sent)


@both_structures
def test_each_tensor_is_sparsified_by_itself(structure):
    """In factors, layer inputs and output gradients; literally, each parameter's tensor."""
    sent = upload(structure=structure)
    actual = received(compressed(sent, sparsity=0.5), sparsity=0.5)
    for before, after in zip(tensors_of(sent), tensors_of(actual), strict=True):
        mask = top_k(before.numpy().reshape(1, -1), 0.5).reshape(before.shape)
        assert np.array_equal(after, np.where(mask, before, 0))
    assert torch.equal(actual.outputs, sent.outputs)
    assert torch.equal(actual.targets, sent.targets)


def test_embeddings_tokens_travel_as_they_are():
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))
    x = torch.arange(30).reshape(10, 3)
    targets = ntk.one_hot(torch.arange(10) % 3, 3)
    sent = ntk.JacobianUpload(ntk.jacobian(model, x), model(x).detach(), targets)
    limits = ntk.UploadLimits({name: list(p.shape) for name, p in model.named_parameters()}, bits=8)
    actual = ntk.CompressedUpload.from_arrays(compressed(sent, bits=8), limits)
    assert torch.equal(actual.jacobian.blocks[0].inputs, x)


def changed(name, change):
    return compressed() | {name: change(compressed()[name])}


def reshaped(name, *shape):
    """Declare another shape for no numbers at all: a payload of a few bytes."""
    code = struct.pack(f"<BBBBQQ{len(shape)}Q", 2, 32, 0, len(shape), 1, 0, *shape)
    return compressed() | {name: np.frombuffer(code, np.uint8)}


def without(name):
    return {key: array for key, array in compressed().items() if key != name}


MANY_POSITIONS = reshaped("block-000", 12, 2**20, 6)
MANY_POSITIONS["block-001"] = reshaped("block-001", 12, 3, 2**20, 8)["block-001"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed("outputs", lambda a: a[:-1]), "shape"),
        (changed("outputs", lambda a: a[:, :2]), "labels"),
        (changed("outputs", lambda a: a.astype(np.float64)), "dtype"),
        (changed("outputs", lambda a: a * np.nan), "non-finite"),
        (changed("outputs", lambda a: a[:0]), "shape"),
        (changed("outputs", lambda a: a[0]), "shape"),
        (changed("labels", lambda a: a[:-1]), "shape"),
        (changed("labels", lambda a: a.astype(np.int64)), "dtype"),
        (changed("labels", lambda a: a + np.uint8(3)), "labels"),
        (changed("layout", lambda a: a[:-1]), "layout"),
        (changed("block-000", lambda a: a[:-1]), "compression"),
        (changed("block-000", lambda a: a.astype(np.float32)), "compression"),
        (changed("block-000", lambda a: a.astype(np.int64)), "shape"),
        (reshaped("block-000", 12, 1, 7), "shape"),
        (reshaped("block-000", 11, 1, 6), "shape"),
        (reshaped("block-000"), "shape"),
        (reshaped("block-001", 12, 3, 2**40, 8), "compression"),
        (reshaped("block-001", 12, 3, 2**30, 8), "shape"),
        (reshaped("block-001", 12, 2**30, 1, 8), "shape"),
        # positions are the client's to declare; the dense block bounds them, before they exist
        (MANY_POSITIONS, "shape: .* factors larger"),
        ({}, "arrays"),
        (without("block-000"), "arrays"),
        (without("block-003"), "shape"),
        (compressed() | {"block-004": ntk.compress(np.ones(12))}, "shape"),
        (compressed() | {"targets": np.ones((12, 3), np.float32)}, "arrays"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arrays, message):
    refused(f"^{message}", received, arrays, error=ntk.BadReply)


@pytest.mark.parametrize(
    ("options", "asked", "detail"),
    [
        ({"sparsity": 0.4}, {"sparsity": 0.5}, "asked for 36 of 72 numbers, got 44"),
        ({"bits": 7}, {"bits": 6}, "asked for 6 bits a number, got 7"),
        ({}, {"bits": 16}, "asked for 16 bits a number, got 32"),
        ({}, {"max_examples": 11}, "at most 11 examples, got 12"),
    ],
)
def test_more_than_was_asked_for_is_refused_and_less_is_taken(options, asked, detail):
    refused(detail, received, compressed(**options), **asked, error=ntk.BadReply)
    received(compressed(sparsity=0.9, bits=3), **asked | {"max_examples": 12})


def test_what_would_not_fit_in_memory_is_refused_undecoded(monkeypatch):
    arrays = compressed(sparsity=0.5)
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda device: 100)
    refused("decoded", received, arrays, sparsity=0.5, error=ntk.NotEnoughMemory)


@both_structures
def test_canonical_order_is_the_same_for_every_permutation(structure):
    """Also where outputs and targets are equal, and the Jacobians decide."""
    whole = upload(n=20, structure=structure)
    zeros = torch.zeros(20, 3)
    for part in (whole, ntk.JacobianUpload(whole.jacobian, zeros, zeros)):
        expected = arrays_of(part.canonical())
        for seed in range(3):
            order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
            assert arrays_of(part.rows(order).canonical()) == expected


def test_rows_keep_jacobian_outputs_and_targets_together():
    whole, order = upload(n=9), torch.tensor([4, 0, 8, 2])
    some = whole.rows(order)
    actual, before = ([*tensors_of(part), part.outputs, part.targets] for part in (some, whole))
    assert all(torch.equal(rows, part[order]) for rows, part in zip(actual, before, strict=True))


def scaled(rows=1.0, outputs=1.0):
    part = upload()
    blocks = [b.with_arrays([*b.arrays[:-1], b.arrays[-1] * rows]) for b in part.jacobian.blocks]
    return ntk.JacobianUpload(ntk.Jacobian(tuple(blocks)), part.outputs * outputs, part.targets)


THREE = [upload(n, n) for n in (3, 5, 9)]
FACTORED, DENSE = upload(seed=1), upload(seed=2, structure="dense")


@pytest.mark.parametrize(
    ("uploads", "reasons"),
    [
        ([], []),
        (THREE, [None] * 3),
        ([DENSE, FACTORED, FACTORED], ["layout", None, None]),
        ([DENSE, FACTORED], [None, "layout"]),
        ([*THREE, scaled(rows=1e4)], [None] * 3 + ["scale"]),
        ([*THREE, scaled(outputs=1e5)], [None] * 3 + ["scale"]),
        ([upload(), scaled(rows=1e4)], [None, None]),
        ([scaled(rows=float("inf")), *THREE], ["scale", None, None, None]),
    ],
)
def test_rare_forms_and_rows_and_outputs_far_over_the_median_are_left_out(uploads, reasons):
    assert [verdict and verdict.reason for verdict in screen_uploads(uploads)] == reasons


INPUTS = torch.arange(72.0).reshape(12, 6)
SENT, SOME = upload(), {"sparsity": 0.5, "bits": 6}


def parsed(arrays, inputs=None, **limits):
    parcel = JacobianParcel(upload(n=5, seed=1), inputs)
    return JacobianParcel.from_arrays(
        arrays, limits=ntk.UploadLimits(SHAPES, **limits), receiver=parcel
    )


@pytest.mark.parametrize("options", [{}, SOME, {"bits": 8}, {"sparsity": 0.1}])
@pytest.mark.parametrize("inputs", [None, INPUTS])
def test_what_arrives_is_an_upload_compressed_as_asked_and_exact_inputs(options, inputs):
    actual = parsed(JacobianParcel(SENT, inputs).to_arrays(**options), inputs, **options)
    expected = received(compressed(SENT, **options), **options) if options else SENT
    assert arrays_of(actual.upload) == arrays_of(expected)
    assert actual.inputs is inputs is None or torch.equal(actual.inputs, inputs)


ARRAYS = JacobianParcel(SENT, INPUTS).to_arrays()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outputs": None}, "arrays"),
        ({"inputs": None}, "arrays"),
        ({"more": np.zeros(3)}, "arrays"),
        ({"inputs": ARRAYS["inputs"][:4]}, "shape"),
        ({"inputs": ARRAYS["inputs"].astype(np.float64)}, "dtype"),
        ({"inputs": ARRAYS["inputs"] * np.nan}, "non-finite"),
        ({"outputs": ARRAYS["outputs"][:4]}, "shape"),
        ({"targets": ARRAYS["targets"] + 1}, "labels"),
    ],
)
def test_what_does_not_fit_is_refused(changes, reason):
    arrays = {name: a for name, a in {**ARRAYS, **changes}.items() if a is not None}
    refused(f"^{reason}: ", parsed, arrays, INPUTS, error=ntk.BadReply)


@pytest.mark.parametrize("options", [{}, SOME])
def test_parcels_with_more_rows_another_form_or_less_compression_are_refused(options):
    arrays, bad = JacobianParcel(SENT).to_arrays(**options), {"error": ntk.BadReply}
    parsed(arrays, max_examples=12, **options)
    refused("most 11 examples, got 12", parsed, arrays, max_examples=11, **options, **bad)
    dense = ntk.JacobianUpload(SENT.jacobian.to_dense(), SENT.outputs, SENT.targets)
    refused("another form", parsed, JacobianParcel(dense).to_arrays(), **bad)
    for less in ({}, {"sparsity": 0.25}, {"sparsity": 0.5, "bits": 8}):
        words = "^(compression|arrays): "
        refused(words, parsed, JacobianParcel(SENT).to_arrays(**less), **SOME, **bad)
