"""Every weighted mean of models: numpy arrays by name, all with the same names and shapes.

Precision and order of operations are part of each method's results.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
NewArrays = dict[str, NDArray[Any]]
COLUMNS = 2**18  # of all models' numbers that are mixed at a time, in float64
ROWS = 16  # mixtures formed at a time


def weighted_mean(models: Sequence[Arrays], num_examples: Sequence[int]) -> NewArrays:
    """FedAvg's mean, in the models' precision: Flower's, operation by operation and bit by bit."""
    total = sum(num_examples)
    shares = [count / total for count in num_examples]
    mean = {name: array * shares[0] for name, array in models[0].items()}
    for model, share in zip(models[1:], shares[1:], strict=True):
        for name in mean:
            mean[name] += model[name] * share
    return mean


def weighted_sum(models: Sequence[Arrays], shares: Sequence[float]) -> NewArrays:
    """Sum of models times their shares, in float64 and cast back; whole numbers are rounded."""
    mixed: NewArrays = {}
    for name, first in models[0].items():
        exact = exact_sum([model[name] for model in models], shares)
        mixed[name] = np.asarray(_round(exact, first.dtype)).astype(first.dtype)
    return mixed


def masked_mean(
    models: Sequence[Arrays],
    masks: Sequence[Mapping[str, NDArray[np.bool_]]],
    shares: Sequence[float],
) -> NewArrays:
    """Mean of sparse models over those that have a coordinate; zero where none has it.

    Arrays without a mask are averaged over all models, as in :func:`weighted_sum`.
    """
    total = sum(shares)
    average = weighted_sum(models, [share / total for share in shares])
    for name in masks[0]:
        above = exact_sum([model[name] for model in models], shares)
        below = sum(mask[name] * share for mask, share in zip(masks, shares, strict=True))
        mean = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        average[name] = mean.astype(average[name].dtype)
    return average


def equal_mean(models: Sequence[Arrays]) -> NewArrays:
    """Mean of models that count alike, in float64."""
    return {
        name: np.mean([np.asarray(own[name], np.float64) for own in models], axis=0)
        for name in models[0]
    }


def convex_combination(models: Sequence[Arrays], shares: Sequence[float]) -> NewArrays:
    """Sum of models times shares that add up to 1, in float64, as a shift of the first model.

    Where all models agree the result is theirs, whatever the shares.
    """
    combined: NewArrays = {}
    for name, first in models[0].items():
        origin = first.astype(np.float64)
        shift = sum(
            share * (model[name].astype(np.float64) - origin)
            for share, model in zip(shares, models, strict=True)
        )
        combined[name] = origin + shift
        if name.endswith("running_var"):  # rounding may leave a combination of zeros below 0
            combined[name] = np.maximum(combined[name], 0.0)
    return combined


def moving_mean(mean: Arrays | None, newest: Arrays, share: float) -> NewArrays:
    """Move a mean towards the newest model by a share of the way, in float64.

    Whole numbers, such as the count of BatchNorm's batches, are the newest model's.
    """
    moved: NewArrays = {}
    for name, array in newest.items():
        if mean is not None and array.dtype.kind == "f":
            before = mean[name].astype(np.float64)
            moved[name] = before + share * (array - before)
        else:
            moved[name] = array
    return moved


def mixtures(weights: NDArray[np.float64], models: Sequence[Arrays]) -> Iterator[NewArrays]:
    """Form K weighted sums of L models by weights (K, L), in float64; cast to the models' dtypes.

    A few are formed at a time, to bound their memory.
    """
    for row in range(0, len(weights), ROWS):
        yield from _mix(weights[row : row + ROWS], models)


def _mix(weights: NDArray[np.float64], models: Sequence[Arrays]) -> Iterator[NewArrays]:
    mixed: NewArrays = {}
    for name, first in models[0].items():
        flat = [np.asarray(model[name]).reshape(-1) for model in models]
        rows = np.empty((len(weights), first.size), first.dtype)
        for start in range(0, first.size, COLUMNS):
            part = np.stack([own[start : start + COLUMNS] for own in flat]).astype(np.float64)
            rows[:, start : start + COLUMNS] = _round(weights @ part, first.dtype)
        mixed[name] = rows.reshape(len(weights), *first.shape)
    for row in range(len(weights)):
        yield {name: np.array(array[row]) for name, array in mixed.items()}


def exact_sum(arrays: Sequence[NDArray[Any]], shares: Sequence[float]) -> Any:
    """Sum of arrays times their shares, in float64."""
    pairs = zip(arrays, shares, strict=True)
    return sum(np.asarray(array, np.float64) * share for array, share in pairs)


def _round(exact: Any, dtype: np.dtype[Any]) -> Any:
    return np.rint(exact) if dtype.kind in "iu" else exact
