"""What a table's transform learns from rows, taken from sums over all clients' rows."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .inputs import InputTransform
from .schema import MEAN, Measured, Schema
from .targets import TargetTransform

SAME = 1e-12  # relative difference of two numbers for a gap that is rounding
CONSTANT = 1e-6  # deviation, over that of before, below which a column is rounding


Moments = tuple[NDArray[np.float64], NDArray[np.float64]]  # means and standard deviations (p,)
Transform = TypeVar("Transform", InputTransform, TargetTransform)


def with_moments(
    inputs: InputTransform, of_columns: Moments, of_targets: Moments | None = None
) -> InputTransform:
    """Return a table's transform by the moments of rows that it has standardised.

    A column that is constant in these rows is only centred. Real targets (C,) have theirs.
    """
    targets = inputs.targets
    if targets is not None and of_targets is not None:
        targets = _moved(targets, of_targets)
    return replace(_moved(inputs, of_columns), targets=targets)


def _moved(before: Transform, moments: Moments) -> Transform:
    mean, std = moments
    scale = np.where(std > CONSTANT, std, 1.0)
    return replace(before, mean=before.mean + before.std * mean, std=before.std * scale)


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
        if not isinstance(column, Measured) or not isinstance(before, Measured):
            raise ValueError(f"{name}: expected the same settings, but for gap, as in its schema")
        if column.copy(gap=before.gap) != before or not np.isfinite(before.fill):
            raise ValueError(f"{name}: expected the same settings, but for gap, as in its schema")
        i, share = place[name], mean[place[f"{name}=?"]] if column.indicator else 1.0
        if not 0 <= share < 1:
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
        within = max(variance[i] - between * (before.fill - present) ** 2, 0.0)
        mean[i] = present + share * (gap - present)
        variance[i] = within + between * (gap - present) ** 2 or 1.0
        filled[name] = column.copy(gap=float(gap))
    return replace(inputs, mean=mean, std=np.sqrt(variance), schema=Schema(filled))
