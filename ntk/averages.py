"""Every weighted mean of models: numpy arrays by name, all with the same names and shapes.

What all models hold alike stays as it is, to the bit: frozen arrays, masks, infinity and NaN, whole
numbers of any size. Whole numbers that differ become the one nearest to their mean, halves the even
one; booleans go by the larger share, and a tie is False. Orders of operations are part of results.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
NewArrays = dict[str, NDArray[Any]]
COLUMNS = 2**18  # of all models' numbers that are mixed at a time, in float64
ROWS = 16  # mixtures formed at a time


def weighted_mean(models: Sequence[Arrays], num_examples: Sequence[int]) -> NewArrays:
    """FedAvg's mean, in the models' precision: Flower's bit by bit, where models differ."""
    shares = [count / sum(num_examples) for count in num_examples]

    def mean(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        mixed = np.asarray(arrays[0] * shares[0])
        for array, share in zip(arrays[1:], shares[1:], strict=True):
            mixed += array * share
        return mixed

    return _means(models, num_examples, mean)


def weighted_sum(models: Sequence[Arrays], shares: Sequence[float]) -> NewArrays:
    """Sum of models times shares that add up to 1, in float64 and cast back."""
    mixed = _means(models, shares, lambda arrays: exact_sum(arrays, shares))
    return {name: array.astype(models[0][name].dtype) for name, array in mixed.items()}


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
        if all_alike([model[name] for model in models]).all():
            continue
        pairs = [(model[name], mask[name]) for model, mask in zip(models, masks, strict=True)]
        above = exact_sum([array for array, _ in pairs], shares)
        below = sum(mask * share for (_, mask), share in zip(pairs, shares, strict=True))
        mean = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        common = np.zeros_like(average[name])  # the number of a model that has one
        for array, mask in pairs:
            common = np.where(mask, array, common)
        alike = all_alike([common, *(np.where(mask, array, common) for array, mask in pairs)])
        average[name] = np.where(alike, common, mean.astype(common.dtype))
    return average


def equal_mean(models: Sequence[Arrays]) -> NewArrays:
    """Mean of models that count alike, in float64."""

    def mean(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.asarray(np.mean([np.asarray(array, np.float64) for array in arrays], axis=0))

    return _means(models, [1] * len(models), mean)


def convex_combination(models: Sequence[Arrays], shares: Sequence[float]) -> NewArrays:
    """Sum of models times shares that add up to 1, in float64, as a shift of the first model."""

    def mean(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        origin = arrays[0].astype(np.float64)
        pairs = zip(shares, arrays, strict=True)
        change = sum(s * (array.astype(np.float64) - origin) for s, array in pairs)
        return np.asarray(origin + change)

    combined = _means(models, shares, mean)
    for name in combined:
        if name.endswith("running_var"):  # rounding may leave a combination of zeros below 0
            combined[name] = np.maximum(combined[name], 0.0)
    return combined


def _means(
    models: Sequence[Arrays],
    weights: Sequence[float],
    mean: Callable[[Sequence[NDArray[Any]]], NDArray[Any]],
) -> NewArrays:
    """Return means by name: `mean` is that of floating-point arrays, which need not be alike."""
    means: NewArrays = {}
    for name, first in models[0].items():
        arrays = [np.asarray(model[name]) for model in models]
        alike = all_alike(arrays)
        if alike.all():
            means[name] = np.array(first)
        elif arrays[0].dtype.kind in "iub":
            means[name] = _integer_mean(arrays, weights)
        else:
            with np.errstate(invalid="ignore"):  # infinite numbers are put back
                means[name] = put_back(mean(arrays), arrays[0], alike)
    return means


def all_alike(arrays: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Return whether all arrays, of one shape, hold the same bits at a coordinate."""
    dtype = np.result_type(*arrays)  # models with bounded changes are in float64
    bits = f"u{dtype.itemsize}" if dtype.itemsize <= 8 else f"V{dtype.itemsize}"
    first, *others = (np.asarray(array).astype(dtype, copy=False).view(bits) for array in arrays)
    alike = np.ones(first.shape, bool)
    for array in others:
        alike &= array == first
        if not alike.any():
            break
    return alike


def put_back(mean: NDArray[Any], first: NDArray[Any], alike: NDArray[np.bool_]) -> NDArray[Any]:
    """Return a mean that has the first model's numbers, to the bit, where all models are alike."""
    np.copyto(mean, first, where=alike, casting="unsafe")
    return mean


def are_finite(after: Arrays, before: Arrays) -> bool:
    """Whether all numbers are finite, or as they were: masks may hold infinity."""
    return all(
        bool((np.isfinite(array) | all_alike([array, before[name]])).all())
        for name, array in after.items()
    )


def _integer_mean(arrays: Sequence[NDArray[Any]], weights: Sequence[float]) -> NDArray[Any]:
    """Return the rounded mean of whole numbers, exact if they are less than 2^53 apart."""
    dtype, total = arrays[0].dtype, sum(weights)
    if dtype.kind == "b":
        return np.asarray(exact_sum(arrays, weights) > total / 2)
    least = np.minimum.reduce(arrays)
    origin = np.subtract(least, least % 2)  # even, so that halves are rounded to the even number
    unsigned = f"u{dtype.itemsize}"  # differences wrap around in `dtype`, and not in this
    above = [np.asarray(np.subtract(array, origin)).view(unsigned) for array in arrays]
    shift = np.rint(np.minimum(exact_sum(above, weights) / total, 2.0**64 - 2048))
    shift = np.minimum(shift.astype(np.uint64), np.maximum.reduce(above)).astype(unsigned)
    return np.asarray(np.add(origin, np.asarray(shift).view(dtype)))


def moving_mean(mean: Arrays | None, newest: Arrays, share: float) -> NewArrays:
    """Move a mean towards the newest model by a share of the way, in float64.

    Whole numbers, such as the count of BatchNorm's batches, are the newest model's.
    """
    moved: NewArrays = {}
    for name, array in newest.items():
        if mean is not None and array.dtype.kind == "f":
            before = mean[name].astype(np.float64)
            with np.errstate(invalid="ignore"):  # infinite numbers are put back
                after = np.asarray(before + share * (array - before))
            moved[name] = put_back(after, before, all_alike([mean[name], array]))
        else:
            moved[name] = array
    return moved


def mixtures(weights: NDArray[np.float64], models: Sequence[Arrays]) -> Iterator[NewArrays]:
    """Form K means of L models by weights (K, L), whose rows add up to 1, in float64.

    They are cast to the models' dtypes. A few are formed at a time, to bound their memory.
    """
    for first in range(0, len(weights), ROWS):
        some = weights[first : first + ROWS]
        mixed = {name: _mix(some, [model[name] for model in models]) for name in models[0]}
        for row in range(len(some)):
            yield {name: np.array(array[row]) for name, array in mixed.items()}


def _mix(weights: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    first, flat = arrays[0], [np.asarray(array).reshape(-1) for array in arrays]
    rows = np.empty((len(weights), first.size), first.dtype)
    for start in range(0, first.size, COLUMNS):
        parts, mixed = [v[start : start + COLUMNS] for v in flat], rows[:, start : start + COLUMNS]
        alike = all_alike(parts)
        if alike.all():
            mixed[:] = parts[0]
        elif first.dtype.kind in "iub":
            mixed[:] = [_integer_mean(parts, row) for row in weights]
        else:
            with np.errstate(invalid="ignore"):  # infinite numbers are put back
                mixed[:] = weights @ np.stack(parts).astype(np.float64)
            mixed[:, alike] = parts[0][alike]
    return rows.reshape(len(weights), *first.shape)


def exact_sum(arrays: Sequence[NDArray[Any]], shares: Sequence[float]) -> Any:
    """Sum of arrays times their shares, in float64."""
    pairs = zip(arrays, shares, strict=True)
    return sum(np.asarray(array, np.float64) * share for array, share in pairs)


def change_size(before: Arrays, after: Arrays) -> float:
    """Euclidean norm of the change, over all floating-point arrays of `before`."""
    total = 0.0
    for name, array in before.items():
        if array.dtype.kind == "f":
            dtype = np.result_type(after[name].dtype, np.float32)
            with np.errstate(invalid="ignore"):  # of infinite numbers
                change = np.subtract(after[name], array, dtype=dtype)
            if not np.isfinite(change).all():
                change = np.where(all_alike([after[name], array]), 0, change)
            total += float(np.dot(change.ravel(), change.ravel()))
    return math.sqrt(total)
