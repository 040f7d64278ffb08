"""Real targets as columns beside features: sums over both hold Z^T Y and Y^T Y.

Targets that were standardised are rounded in two digits, y = a + b, so that numbers of few bits
hold them: with 8 bits up to 63 standard deviations, to 1/512 of one. Of n numbers none is further
than sqrt(n - 1) standard deviations from their mean.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .fixed_point import FixedPoint

LARGEST = 63.0  # standard deviations
FEWEST_BITS = 7  # with fewer, two digits are too coarse


def num_columns(num_targets: int, fixed_point: bool) -> int:
    """Count the columns of C real targets: two each in fixed-point numbers."""
    return num_targets * (1 + fixed_point)


def target_steps(num_targets: int, bits: int) -> NDArray[np.float32]:
    """Return the steps of the columns of C targets, powers of two: (2 C,)."""
    coarse = float(FixedPoint.within(LARGEST, 1, bits).step[0])
    fine = float(FixedPoint.within(coarse / 2, 1, bits).step[0])
    return np.repeat(np.array([coarse, fine], np.float32), num_targets)


def with_targets(
    chunks: Iterable[Tensor], targets: Tensor, fixed_point: FixedPoint | None
) -> Iterator[Tensor]:
    """Append the columns of real targets (n, C) to features (n, p), which come in chunks.

    ValueError if fixed-point numbers cannot hold a target.
    """
    columns = targets
    if fixed_point is not None:
        if bool((targets.abs() > LARGEST).any()):
            raise ValueError(
                f"targets: expected up to {LARGEST:g} standard deviations from the mean, which is "
                "what fixed-point numbers hold; transform them, such as by a logarithm, or set "
                "sums.bits = 32"
            )
        step = torch.from_numpy(fixed_point.step[-2 * targets.shape[1] :][: targets.shape[1]])
        most = fixed_point.largest
        coarse = (targets / step).round().clamp(-most, most) * step
        columns = torch.cat([coarse, targets - coarse], 1)
    start = 0
    for chunk in chunks:
        yield torch.cat([chunk, columns[start : start + len(chunk)]], 1)
        start += len(chunk)
