"""What the columns of a data set look like, and whether other examples look the same.

Pooled moments cannot bound one example's values, as columns may have long tails. So a column is
judged as a whole, by its mean and spread: by Chebyshev's inequality at most 1 of 25 pooled values
is 5 standard deviations or more from the pooled mean.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["0 or 1", "whole", "real"]

FAR = 5.0  # pooled standard deviations between a node's mean and the pooled one
WIDE = 10.0  # a node's standard deviation over the pooled one
# a node's mean this far off, with a spread below 1 / WIDE of the pooled one, is another unit
SHIFTED = 2.0
NARROW_PICTURES = 20.0  # pooled standard deviation of pictures over a node's
EXTREME = 30.0  # deviations of one value from the pooled mean, or sqrt(N - 1) if that is more


def column_kinds(x: NDArray[Any]) -> tuple[Kind, ...]:
    """Return what each column of a table (n, columns) holds: 0 or 1, whole or real numbers."""
    whole, binary = (x == np.floor(x)).all(0), ((x == 0) | (x == 1)).all(0)
    return tuple(
        "0 or 1" if is_binary else "whole" if is_whole else "real"
        for is_whole, is_binary in zip(whole, binary, strict=True)
    )


def other_kinds(x: NDArray[Any], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Describe the columns of x (n, columns) that hold numbers of a wider kind than `kinds`."""
    doubts = []
    for name, expected, actual, column in zip(names, kinds, column_kinds(x), x.T, strict=True):
        fits = {"0 or 1": ("0 or 1",), "whole": ("0 or 1", "whole")}.get(expected, (actual,))
        if actual not in fits:
            numbers = {"0 or 1": "0 and 1", "whole": "whole numbers"}[expected]
            examples = ", ".join(f"{value:g}" for value in np.unique(column)[:3])
            doubts.append(f"{name} has values such as {examples}, and {numbers} in training")
    return doubts


def out_of_range(
    x: NDArray[Any],
    mean: NDArray[Any],
    std: NDArray[Any],
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
    num_train: int | None = None,
) -> list[str]:
    """Describe the columns, or channels, of x (n, ...) that are far from the pooled moments.

    `mean` and `std` broadcast over one example. A single value is judged only if `num_train`, the
    number N of pooled examples, is given: none of these lies sqrt(N - 1) deviations off.
    """
    axes = (0, *(i for i in range(1, x.ndim) if mean.ndim < x.ndim - 1 or mean.shape[i - 1] == 1))
    scaled = (x - mean.astype(np.float64)) / std
    shift, spread = scaled.mean(axes).reshape(-1), scaled.std(axes).reshape(-1)
    farthest = np.abs(scaled).max(axes).reshape(-1)
    varies = spread > 0
    outside = (np.abs(shift) > FAR) | (spread > WIDE)
    outside |= varies & (spread < 1 / WIDE) & (np.abs(shift) > SHIFTED)
    if x.ndim == 4:
        outside |= varies & (spread < 1 / NARROW_PICTURES)
    if num_train is not None:
        outside |= farthest > max(EXTREME, float(np.sqrt(num_train - 1)))
    if kinds:  # a rare 1 is far from the mean, and other values are of another kind
        outside &= np.array([kind != "0 or 1" for kind in kinds])
    pooled_mean, pooled_std = mean.reshape(-1), std.reshape(-1)
    doubts = []
    for i in np.flatnonzero(outside).tolist():
        name = names[i] if names else "the set" if len(outside) == 1 else f"channel or column {i}"
        there = pooled_mean[i] + shift[i] * pooled_std[i]
        doubts.append(
            f"{name} has mean {there:.4g}, deviation {spread[i] * pooled_std[i]:.4g} and a value "
            f"{farthest[i]:.3g} deviations off, in training mean {pooled_mean[i]:.4g} and "
            f"deviation {pooled_std[i]:.4g}"
        )
    return doubts
