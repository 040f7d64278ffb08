"""Mean 0 and variance 1 over the examples of all clients, from sums that add.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4.3, note a. Moments are joined by Chan, Golub and LeVeque, *Updating Formulae
and a Pairwise Algorithm for Computing Sample Variances*, 1979, eq. (2.1).
"""

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..jacobian.blocks import AT_WORK
from ..support.arrays import require_array, require_counts, take_arrays

CONSTANT = 1e-6  # a standard deviation under this share of the mean is float32's rounding
SMALLEST = 1e-30  # its inverse is a float32


@dataclass(frozen=True, eq=False)
class Moments:
    """Count n, means (p,) and sums of squared deviations (p,) of a group's features, float64.

    `class_counts` are the examples of each class, int64 (C,), if they are counted.
    """

    NAMES: ClassVar = ("mean", "sum-sq-dev")

    count: int
    mean: NDArray[np.float64]
    sum_sq_dev: NDArray[np.float64]
    class_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, features: Tensor) -> Self:
        """Return the moments of features (n, p) with n at least 1."""
        means, squares = [], []
        for columns in features.split(max(1, AT_WORK // len(features)), 1):
            z = columns.double()
            means.append(z.mean(0))
            squares.append((z - means[-1]).square_().sum(0))
        return cls(len(features), torch.cat(means).numpy(), torch.cat(squares).numpy())

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.sum_sq_dev + other.sum_sq_dev + delta**2 * (self.count * other.count / count),
            self.class_counts + other.class_counts,
        )

    @property
    def size(self) -> float:
        """Root of the examples' mean squared norm."""
        return math.sqrt(float((self.mean**2 + self.sum_sq_dev / self.count).sum()))

    @classmethod
    def join(cls, groups: Iterable["Moments"]) -> "Moments":
        """Join one or more groups; in any order up to rounding of float64."""
        return functools.reduce(operator.add, groups)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all but the count, which travels as the number of examples."""
        arrays: dict[str, NDArray[Any]]
        arrays = dict(zip(self.NAMES, (self.mean, self.sum_sq_dev), strict=True))
        return {**arrays, "counts": self.class_counts} if len(self.class_counts) else arrays

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], count: int, width: int, num_classes: int = 0
    ) -> Self:
        """Check what a client sent: float64 in float32's range, deviations at least 0.

        Of `num_classes` classes, if there are any, the counts must add up to `count`.
        """
        names = [*cls.NAMES, *(["counts"] if num_classes else [])]
        mean, sum_sq_dev, *counts = take_arrays(arrays, *names)
        largest = float(np.finfo(np.float32).max)
        expected: dict[str, Any] = {"shape": (width,), "dtype": np.float64}
        require_array("mean", mean, low=-largest, high=largest, **expected)
        require_array("sum_sq_dev", sum_sq_dev, low=0, high=count * largest**2, **expected)
        if counts:
            require_counts(counts[0], num_classes, count)
        return cls(count, mean, sum_sq_dev, *counts)


@dataclass(frozen=True, eq=False)
class Normaliser:
    """z -> (z - mean) inv_std, with both (p,) in float32; inv_std is 0 for a constant feature."""

    mean: NDArray[np.float32]
    inv_std: NDArray[np.float32]

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Return the normaliser to mean 0 and variance 1 over these examples."""
        std = np.sqrt(moments.sum_sq_dev / moments.count)
        constant = std <= np.maximum(CONSTANT * np.abs(moments.mean), SMALLEST)
        inv_std = np.where(constant, 0.0, 1 / np.where(constant, 1.0, std))
        return cls(moments.mean.astype(np.float32), inv_std.astype(np.float32))

    @classmethod
    def identity(cls, width: int) -> Self:
        """Return the normaliser that changes nothing."""
        return cls(np.zeros(width, np.float32), np.ones(width, np.float32))

    def __call__(self, features: Tensor) -> Tensor:
        """Normalise features (n, p), float32; returns a new tensor on their device."""
        mean = torch.from_numpy(self.mean).to(features.device)
        return (features - mean).mul_(torch.from_numpy(self.inv_std).to(features.device))
