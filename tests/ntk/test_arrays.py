"""The one check of arrays that others sent."""

import numpy as np
import pytest

from fedntk.ntk import BadReply
from fedntk.ntk.support.arrays import require_array

from ..conftest import refused

ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (ONES, {"shape": (2, 3), "dtype": np.float32}),
        (ONES, {"shape": (-1, 3), "dtype": (np.float16, np.float32)}),
        (ONES, {"limit": 1.0, "low": 1.0, "high": 1.0}),
        (np.array([0, 255], np.uint8), {"dtype": "unsigned", "high": 255}),
        (np.zeros((0, 3)), {"shape": (0, 3), "low": 1.0}),
        (np.array([True, False]), {"dtype": bool}),  # a model's mask
    ],
)
def test_what_was_expected_passes(array, expected):
    require_array("w", array, **expected)


@pytest.mark.parametrize(
    ("array", "expected", "message"),
    [
        (ONES, {"shape": (3, 2)}, r"shape: w: expected \(3, 2\), got \(2, 3\)"),
        (ONES[:0], {"shape": (-1, 3)}, r"shape: w: expected \(any, 3\), got \(0, 3\)"),
        (ONES, {"dtype": (np.float16, np.float64)}, "dtype: w: expected float16 or float64, got"),
        (ONES, {"dtype": "unsigned"}, "dtype: w: expected unsigned integers, got float32"),
        (ONES.astype(bool), {}, "dtype: w: expected numbers, got bool"),
        (ONES * np.nan, {}, "non-finite: w: expected finite numbers, got NaN or infinity"),
        (ONES * -np.inf, {}, "non-finite"),
        (ONES * -2, {"limit": 1.0}, "scale: w: expected magnitudes up to 1, got -2.0 ... -2.0"),
        (np.array([-(2**63)]), {"limit": 2.0**53}, "scale"),  # whose absolute value overflows
        (ONES, {"low": 2.0}, "range: w: expected at least 2, got 1.0 ... 1.0"),
        (ONES, {"low": 0.0, "high": 0.5}, "range: w: expected 0 ... 0.5, got 1.0 ... 1.0"),
    ],
)
def test_anything_else_is_refused_under_its_reason(array, expected, message):
    refused(message, require_array, "w", array, error=BadReply, **expected)
