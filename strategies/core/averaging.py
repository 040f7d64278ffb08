"""Means of clients' arrays, and the arrays of the next global model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

__all__ = ["cast_like", "named_arrays", "weighted_mean"]


def named_arrays(arrays: ArrayRecord | Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Name -> array of a record, or of what is a dictionary already."""
    return {n: a.numpy() if isinstance(a, Array) else a for n, a in arrays.items()}


def weighted_mean(
    replies: Sequence[Mapping[str, NDArray[Any]]], weights: Sequence[int]
) -> dict[str, NDArray[Any]]:
    """Mean of each array over the replies: Flower's, operation by operation and so bit by bit.

    Flower's own would read each array from its bytes again.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    mean = {name: array * shares[0] for name, array in replies[0].items()}
    for arrays, share in zip(replies[1:], shares[1:], strict=True):
        for name in mean:
            mean[name] += arrays[name] * share
    return mean


def cast_like(
    arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]
) -> ArrayRecord:
    """Return the arrays under the expected names, in that order, in the expected dtypes."""
    converted = {}
    for name, model in expected.items():
        array = np.asarray(arrays[name])
        if np.issubdtype(model.dtype, np.integer):
            array = np.rint(array)
        converted[name] = Array(np.asarray(array, dtype=model.dtype))
    return ArrayRecord(converted)
