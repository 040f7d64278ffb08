"""Records of arrays as numpy arrays, and the arrays of the next global model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedntk.ntk.support.arrays import ArrayDict, Arrays

Learned = ArrayRecord | Arrays  # what a run returns


def named_arrays(arrays: Learned) -> ArrayDict:
    """Name -> array of a record, or of what is a dictionary already."""
    return {n: a.numpy() if isinstance(a, Array) else a for n, a in arrays.items()}


def record_of(arrays: Arrays) -> ArrayRecord:
    """Return arrays by name as a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of arrays that only one of two models has, or in another shape."""
    first, second = ({n: tuple(a.shape) for n, a in arrays.items()} for arrays in (one, other))
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def cast_like(arrays: Arrays, expected: Arrays) -> ArrayRecord:
    """Return the arrays under the expected names, in that order, in the expected dtypes.

    Means that become whole numbers, or booleans, are rounded to the nearest, halves to the even.
    """
    converted = {}
    for name, model in expected.items():
        array = np.asarray(arrays[name])
        if model.dtype.kind in "iub" and array.dtype.kind == "f":
            array = np.rint(array)
        converted[name] = Array(np.asarray(array, dtype=model.dtype))
    return ArrayRecord(converted)
