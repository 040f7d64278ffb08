"""Rows that neighbours send each other: exact without compression, refused if they do not fit."""

from typing import Any

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply, UploadLimits
from fedntk.ntk.payloads import JacobianParcel

from .test_uploads import SHAPES, arrays_of, upload

INPUTS = torch.arange(72.0).reshape(12, 6)
OWN = JacobianParcel(upload(n=5, seed=1))
WITH_INPUTS = JacobianParcel(upload(n=5, seed=1), INPUTS[:5])


@pytest.mark.parametrize("inputs", [None, INPUTS])
def test_without_compression_every_bit_arrives(inputs):
    sent = JacobianParcel(upload(), inputs)
    own = OWN if inputs is None else WITH_INPUTS
    found = received(sent.to_arrays(), own)
    assert arrays_of(found.upload) == arrays_of(sent.upload)
    assert found.inputs is inputs is None or torch.equal(found.inputs, inputs)


def test_compression_is_that_of_cp_ntk_fl_and_spares_labels_and_outputs():
    sent = JacobianParcel(upload(n=200))
    arrays = sent.to_arrays(sparsity=0.5, bits=6)
    assert sum(a.nbytes for a in arrays.values()) < 0.3 * sum(
        a.nbytes for a in sent.to_arrays().values()
    )
    found = received(arrays, sparsity=0.5, bits=6)
    assert torch.equal(found.upload.outputs, sent.upload.outputs)
    assert torch.equal(found.upload.targets, sent.upload.targets)
    before, after = (own.upload.jacobian.dense() for own in (sent, found))
    for name, exact in before.items():
        kept = after[name] != 0
        assert 0 < kept.float().mean() < 0.8
        assert float((after[name] - exact)[kept].abs().max()) < 0.1 * float(exact.abs().max())


def received(arrays: Any, own: JacobianParcel = OWN, **limits: Any) -> JacobianParcel:
    return JacobianParcel.from_arrays(arrays, limits=UploadLimits(SHAPES, **limits), own=own)


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
        received(arrays, WITH_INPUTS)
    assert refused.value.reason == reason


@pytest.mark.parametrize("sent", [{}, {"sparsity": 0.5, "bits": 6}])
def test_more_rows_than_a_client_may_have_are_refused(sent):
    arrays = JacobianParcel(upload(n=8)).to_arrays(**sent)
    received(arrays, max_examples=8, **sent)
    with pytest.raises(BadReply, match="expected at most 7 examples, got 8"):
        received(arrays, max_examples=7, **sent)


def test_another_form_or_inputs_that_were_not_asked_for_are_refused():
    with pytest.raises(BadReply, match="another form"):
        received(JacobianParcel(upload(structure="dense")).to_arrays())
    with pytest.raises(BadReply, match="expected inputs if one sends some, and none else"):
        received(JacobianParcel(upload(), INPUTS).to_arrays())


@pytest.mark.parametrize("sent", [{}, {"sparsity": 0.25}, {"sparsity": 0.5, "bits": 8}])
def test_less_compression_than_was_asked_for_is_refused(sent):
    with pytest.raises(BadReply):
        received(JacobianParcel(upload()).to_arrays(**sent), sparsity=0.5, bits=6)
