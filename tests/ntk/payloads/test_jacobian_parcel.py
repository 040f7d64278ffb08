"""Rows that neighbours send each other: exact without compression, refused if they do not fit."""

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply, JacobianUpload, UploadLimits
from fedntk.ntk.payloads import JacobianParcel

from .test_uploads import SHAPES, arrays_of, compressed, received, upload

INPUTS = torch.arange(72.0).reshape(12, 6)
SENT, SOME = upload(), {"sparsity": 0.5, "bits": 6}


def parsed(arrays, inputs=None, **limits):
    own = JacobianParcel(upload(n=5, seed=1), inputs)
    return JacobianParcel.from_arrays(arrays, limits=UploadLimits(SHAPES, **limits), own=own)


@pytest.mark.parametrize("options", [{}, SOME, {"bits": 8}, {"sparsity": 0.1}])
@pytest.mark.parametrize("inputs", [None, INPUTS])
def test_what_arrives_is_an_upload_compressed_as_asked_and_exact_inputs(options, inputs):
    found = parsed(JacobianParcel(SENT, inputs).to_arrays(**options), inputs, **options)
    expected = received(compressed(SENT, **options), **options) if options else SENT
    assert arrays_of(found.upload) == arrays_of(expected)
    assert found.inputs is inputs is None or torch.equal(found.inputs, inputs)


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
    with pytest.raises(BadReply, match=f"^{reason}: "):
        parsed(arrays, INPUTS)


@pytest.mark.parametrize("options", [{}, SOME])
def test_more_rows_than_a_client_may_have_are_refused(options):
    arrays = JacobianParcel(SENT).to_arrays(**options)
    parsed(arrays, max_examples=12, **options)
    with pytest.raises(BadReply, match="expected at most 11 examples, got 12"):
        parsed(arrays, max_examples=11, **options)


def test_another_form_and_less_compression_than_was_asked_for_are_refused():
    dense = JacobianUpload(SENT.jacobian.to_dense(), SENT.outputs, SENT.targets)
    with pytest.raises(BadReply, match="another form"):
        parsed(JacobianParcel(dense).to_arrays())
    for less in ({}, {"sparsity": 0.25}, {"sparsity": 0.5, "bits": 8}):
        with pytest.raises(BadReply):
            parsed(JacobianParcel(SENT).to_arrays(**less), **SOME)
