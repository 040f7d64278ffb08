"""What a table's transform learns from rows, taken from sums over all clients' rows."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .inputs import InputTransform
from .schema import MEAN, REFUSE, Measured, Schema
from .targets import TargetTransform

SAME = 1e-12  # relative difference of two numbers for a gap that is rounding
ROUNDING = 1e-12  # of a sum of squares in float64, over this
SHARE = 1e-8  # of rows, below which there is none: masked sums are of up to 2^25
WITHIN = 1e-9  # variance without gaps, over that with, below which it is rounding of masked sums

Moments = tuple[NDArray[np.float64], NDArray[np.float64]]  # means and standard deviations (p,)
Transform = TypeVar("Transform", InputTransform, TargetTransform)


def moments_of(
    total: NDArray[np.float64], squares: NDArray[np.float64], weight: float, rounding: float
) -> Moments:
    """Return moments of columns (p,) from sums of x and of x^2, and from the sum of weights.

    The deviation is 0 if the variance is below its error: sums are off by `rounding` r at most, so
    with w the sum of weights the mean m and the mean square s are off by r (1 + |m|) / w and
    r (1 + s) / w.
    """
    mean, square = total / weight, squares / weight
    variance, error = square - mean**2, rounding / weight * (1 + np.abs(mean))
    error = ROUNDING * square + rounding / weight * (1 + square) + 2 * np.abs(mean) * error
    return mean, np.sqrt(np.where(variance > error, variance, 0.0))


def with_moments(
    inputs: InputTransform, of_columns: Moments, of_targets: Moments | None = None
) -> InputTransform:
    """Return a table's transform by the moments of rows that it has standardised.

    A column of deviation 0 is only centred. Real targets (C,) have theirs.
    """
    targets = inputs.targets
    if targets is not None and of_targets is not None:
        targets = _moved(targets, of_targets)
    return replace(_moved(inputs, of_columns), targets=targets)


def _moved(before: Transform, moments: Moments) -> Transform:
    mean, std = moments
    scale = np.where(std > 0, before.std * std, 1.0)
    return replace(before, mean=before.mean + before.std * mean, std=scale)


def with_schema(
    inputs: InputTransform, schema: Schema | None, columns: Sequence[str]
) -> InputTransform:
    """Return a transform by the moments of the same rows, whose gaps a schema fills.

    With gap = mean that is the mean of the rows without a gap. The indicator's mean q is their
    share with one. Filled by g the column has the mean (1 - q) m + q g and the variance
    w + q (1 - q) (g - m)^2, where m is the mean without gaps, and w the variance within.
    ValueError if columns or schema differ by more than that, or if there is no indicator.
    """
    if tuple(columns) != inputs.columns or (schema is None) != (inputs.schema is None):
        raise ValueError(
            f"expected the columns {', '.join(inputs.columns) or 'of no table'}, of a schema if "
            f"these are, got {', '.join(columns) or 'no table'}"
        )
    if schema is None or inputs.schema is None:
        return inputs
    mean, variance = inputs.mean.astype(np.float64), inputs.std.astype(np.float64) ** 2
    filled, place = dict(schema.columns), {name: i for i, name in enumerate(columns)}
    for name, column in schema.columns.items():
        before = inputs.schema.columns.get(name)
        if not column.outputs(name) or column == before:
            continue
        if not (
            isinstance(column, Measured)
            and isinstance(before, Measured)
            and column.copy(gap=before.gap) == before
        ):
            raise ValueError(f"{name}: expected the same settings, but for gap, as in its schema")
        if column.gap == REFUSE or not np.isfinite(before.fill):
            raise ValueError(
                f"{name}: expected gap = {before.gap!r}, as in its schema, or a number"
            )
        i, share = place[name], mean[place[f"{name}=?"]] if column.indicator else 1.0
        share = 0.0 if abs(share) < SHARE else float(share)
        if not 0 <= share < 1 - SHARE:
            raise ValueError(
                f"{name}: expected indicator = true, which tells how many gaps there are, and a "
                "row without a gap"
            )
        present = before.fill + (mean[i] - before.fill) / (1 - share)
        low, high = column.bounds
        gap = min(max(present, low), high) if column.gap == MEAN else column.fill
        if math.isclose(gap, before.fill, rel_tol=SAME):
            filled[name] = before
            continue
        between = share * (1 - share)
        within = variance[i] - between * (before.fill - present) ** 2
        within = within if within > WITHIN * variance[i] else 0.0
        mean[i] = present + share * (gap - present)
        variance[i] = within + between * (gap - present) ** 2 or 1.0
        filled[name] = column.copy(gap=float(gap))
    return replace(inputs, mean=mean, std=np.sqrt(variance), schema=Schema(filled))
