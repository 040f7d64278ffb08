"""Rows that neighbours send each other: exact without compression, refused if they do not fit."""

from typing import Any

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply, JacobianUpload, UploadLimits
from fedntk.ntk.payloads import JacobianParcel

from .test_uploads import SHAPES, arrays_of, upload

INPUTS = torch.arange(72.0).reshape(12, 6)
OWN = JacobianParcel(upload(n=5, seed=1))
WITH_INPUTS = JacobianParcel(upload(n=5, seed=1), INPUTS[:5])


@pytest.mark.parametrize("inputs", [None, INPUTS])
def test_without_compression_every_bit_arrives(inputs):
    sent = JacobianParcel(upload(), inputs)
    own = OWN if inputs is None else WITH_INPUTS
    found = JacobianParcel.from_arrays(sent.to_arrays(), limits=UploadLimits(SHAPES), own=own)
    assert arrays_of(found.upload) == arrays_of(sent.upload)
    assert found.inputs is inputs is None or torch.equal(found.inputs, inputs)


def test_compression_is_that_of_cp_ntk_fl_and_spares_labels_and_outputs():
    sent = JacobianParcel(upload(n=200))
    arrays = sent.to_arrays(sparsity=0.5, bits=6)
    assert sum(a.nbytes for a in arrays.values()) < 0.3 * sum(
        a.nbytes for a in sent.to_arrays().values()
    )
    limits = UploadLimits(SHAPES, sparsity=0.5, bits=6)
    found = JacobianParcel.from_arrays(arrays, limits=limits, own=OWN)
    assert torch.equal(found.upload.outputs, sent.upload.outputs)
    assert torch.equal(found.upload.targets, sent.upload.targets)
    before, after = (own.upload.jacobian.dense() for own in (sent, found))
    for name, exact in before.items():
        kept = after[name] != 0
        assert 0 < kept.float().mean() < 0.8
        assert float((after[name] - exact)[kept].abs().max()) < 0.1 * float(exact.abs().max())


def without(name: str) -> Any:
    return lambda arrays: {k: a for k, a in arrays.items() if k != name}


def other(name: str, change: Any) -> Any:
    return lambda arrays: {k: change(a) if k == name else a for k, a in arrays.items()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("outputs"), "arrays"),
        (without("inputs"), "arrays"),
        (lambda arrays: {**arrays, "more": np.zeros(3)}, "arrays"),
        (other("inputs", lambda a: a[:4]), "shape"),
        (other("inputs", lambda a: a.astype(np.float64)), "dtype"),
        (other("inputs", lambda a: a * np.nan), "non-finite"),
        (other("outputs", lambda a: a[:4]), "shape"),
        (other("targets", lambda a: a + 1), "labels"),
    ],
)
def test_what_does_not_fit_is_refused(change, reason):
    arrays = change(JacobianParcel(upload(), INPUTS).to_arrays())
    with pytest.raises(BadReply) as refused:
        JacobianParcel.from_arrays(arrays, limits=UploadLimits(SHAPES), own=WITH_INPUTS)
    assert refused.value.reason == reason


@pytest.mark.parametrize("sent", [{}, {"sparsity": 0.5, "bits": 6}])
def test_more_rows_than_a_client_may_have_are_refused(sent):
    arrays = JacobianParcel(upload(n=8)).to_arrays(**sent)
    for most in (8, 7):
        limits = UploadLimits(SHAPES, max_examples=most, **sent)
        if most == 8:
            JacobianParcel.from_arrays(arrays, limits=limits, own=OWN)
            continue
        with pytest.raises(BadReply, match="expected at most 7 examples, got 8"):
            JacobianParcel.from_arrays(arrays, limits=limits, own=OWN)


def test_another_form_is_refused():
    sent = upload()
    literal = JacobianParcel(JacobianUpload(sent.jacobian.to_dense(), sent.outputs, sent.targets))
    with pytest.raises(BadReply, match="another form"):
        JacobianParcel.from_arrays(literal.to_arrays(), limits=UploadLimits(SHAPES), own=OWN)


@pytest.mark.parametrize("sent", [{}, {"sparsity": 0.25}, {"sparsity": 0.5, "bits": 8}])
def test_less_compression_than_was_asked_for_is_refused(sent):
    arrays = JacobianParcel(upload()).to_arrays(**sent)
    limits = UploadLimits(SHAPES, sparsity=0.5, bits=6)
    with pytest.raises(BadReply):
        JacobianParcel.from_arrays(arrays, limits=limits, own=OWN)
