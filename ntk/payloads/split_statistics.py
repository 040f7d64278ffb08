"""Sums over a group's features in two parts: most examples, and some held out to choose a ridge.

The server adds the parts up over clients, chooses the ridge of the first by its squared error on
the second, and solves on both together: no example has to be on the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..features.fixed_point import FixedPoint
from ..support.arrays import ArrayDict, Arrays, require_counts, take_arrays
from ..support.memory import require_memory
from .feature_statistics import FEWER, FeatureStatistics, SumFormat

HELD_OUT = "held-out-"  # begins the names of arrays


@dataclass(frozen=True, eq=False)
class SplitStatistics:
    """Sums over the examples to fit, and over those held out; of one client either may be empty."""

    fitting: FeatureStatistics
    held_out: FeatureStatistics

    @staticmethod
    def require_memory(width: int) -> None:
        """Raise NotEnoughMemory if adding up both parts, 16 p^2 bytes, would not fit."""
        require_memory(16 * width**2, f"the sums of {width} features, twice,", cure=FEWER)

    @property
    def everyone(self) -> FeatureStatistics:
        """Sums over both parts together."""
        return self.fitting + self.held_out

    @property
    def size(self) -> float:
        """The larger of the parts' roots of their examples' mean squared norm."""
        return max(part.size for part in (self.fitting, self.held_out) if part.num_examples)

    def __add__(self, other: "SplitStatistics") -> "SplitStatistics":
        return SplitStatistics(self.fitting + other.fitting, self.held_out + other.held_out)

    def __sub__(self, other: "SplitStatistics") -> "SplitStatistics":
        return SplitStatistics(self.fitting - other.fitting, self.held_out - other.held_out)

    def require_positive(self) -> None:
        """Raise BadReply unless both Gram matrices are positive semidefinite."""
        for part in (self.fitting, self.held_out):
            part.require_positive()

    def scaled(self, fixed_point: FixedPoint) -> "SplitStatistics":
        """Convert both parts of fixed-point numbers to the features' units, float64."""
        return SplitStatistics(self.fitting.scaled(fixed_point), self.held_out.scaled(fixed_point))

    def folded(self, count: int) -> "SplitStatistics":
        """Return both parts as :meth:`.FeatureStatistics.folded` does."""
        return SplitStatistics(self.fitting.folded(count), self.held_out.folded(count))

    def to_arrays(self, fixed_point: FixedPoint | None = None, packed: bool = False) -> ArrayDict:
        """Return both parts' arrays by name, of those held out with a prefix."""
        held_out = self.held_out.to_arrays(fixed_point, packed)
        renamed = {HELD_OUT + name: array for name, array in held_out.items()}
        return self.fitting.to_arrays(fixed_point, packed) | renamed

    def to_words(self, dtype: Any) -> NDArray[Any]:
        """Return all whole numbers of both parts."""
        return np.concatenate([self.fitting.to_words(dtype), self.held_out.to_words(dtype)])

    @staticmethod
    def num_words(width: int, num_classes: int) -> int:
        """Count the numbers that :meth:`to_words` returns."""
        return 2 * FeatureStatistics.num_words(width, num_classes)

    @classmethod
    def from_words(
        cls, words: NDArray[Any], expected: SumFormat, num_examples: int | None = None
    ) -> Self:
        """Check the sum over clients of what :meth:`to_words` made."""
        both = (FeatureStatistics.from_words(part, expected) for part in np.split(words, 2))
        return cls(*both)._with_counts(expected, num_examples)

    def _with_counts(self, expected: SumFormat, num_examples: int | None) -> Self:
        counts = self.fitting.counts + self.held_out.counts
        require_counts(counts, expected.num_classes, num_examples)
        return self

    @classmethod
    def from_arrays(
        cls, arrays: Arrays, expected: SumFormat, num_examples: int | None = None
    ) -> Self:
        """Check what :meth:`to_arrays` made, both parts as in FeatureStatistics."""
        names = FeatureStatistics.NAMES
        both = take_arrays(arrays, *names, *(HELD_OUT + name for name in names))
        fitting, held_out = (
            FeatureStatistics.from_arrays(dict(zip(names, part, strict=True)), expected)
            for part in (both[:3], both[3:])
        )
        return cls(fitting, held_out)._with_counts(expected, num_examples)


def draw_held_out(labels: Tensor, share: float, seed: Sequence[int]) -> Tensor:
    """Draw which of a client's examples are held out: a share, at most 0.5, of each class; (n,).

    In an order by class, and by chance within it, every (1/share)-th is held out from a random
    place on: each class's share to within one example, round(share n) of all, at least one. An only
    example is held out with probability `share`.
    """
    generator = np.random.default_rng(seed)
    n, place = len(labels), generator.random()
    order = np.lexsort((generator.random(n), labels.numpy()))
    count = max(1, round(share * n)) if n > 1 else n * int(place < share)
    positions = ((np.arange(count) + place) * n / max(count, 1)).astype(int)
    held = torch.zeros(n, dtype=torch.bool)
    held[torch.from_numpy(order[positions])] = True
    return held
