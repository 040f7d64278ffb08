"""Features as small integers: a sum of their products is then exact, in any order."""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..support.arrays import require_array

MOST_BITS = 8  # a product of two numbers then has 14 bits, and 1,000 of them add up in float32


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """z -> round(z / step), clipped to b bits with a sign: fixed-point numbers."""

    step: NDArray[np.float32]  # of each feature (p,): powers of two, so that divisions are exact
    bits: int  # b, 2 ... 8

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= MOST_BITS:
            raise ValueError(f"bits: expected 2 ... {MOST_BITS}, got {self.bits}")

    @property
    def largest(self) -> int:
        """The largest of the integers, 2^(b - 1) - 1."""
        return int(2 ** (self.bits - 1) - 1)

    @classmethod
    def of(cls, features: Tensor, bits: int) -> Self:
        """Choose the steps by examples (n, p) like those that are to be rounded.

        A feature's largest magnitude, or if it is 0 the root mean square of all, is a quarter to a
        half of the largest representable number: other examples may have larger ones.
        """
        largest = features.abs().amax(0).double()
        common = features.double().square().mean().sqrt()
        largest = torch.where(largest > 0, largest, common if common > 0 else torch.ones(()))
        limit = 2 ** (bits - 1) - 1
        exponent = torch.ceil(torch.log2(2 * largest / limit)).clamp(-100, 100)
        return cls(torch.exp2(exponent).float().numpy(), bits)

    @classmethod
    def within(cls, bound: float, width: int, bits: int) -> Self:
        """Choose the least step with which p features up to a bound are not clipped."""
        step = 2.0 ** math.ceil(math.log2(bound / (2 ** (bits - 1) - 1)))
        return cls(np.full(width, step, np.float32), bits)

    @classmethod
    def from_arrays(cls, step: NDArray[Any], bits: int, width: int) -> Self:
        """Check steps that were sent: powers of two in float32, else BadReply."""
        require_array("step", step, shape=(width,), dtype=np.float32, low=0)
        if (np.frexp(step)[0] != 0.5).any():
            raise BadReply("range", "step: expected powers of two")
        return cls(step, bits)

    def __call__(self, features: Tensor) -> Tensor:
        """Round features (n, p) to whole numbers in float32."""
        scaled = features / torch.from_numpy(self.step)
        return scaled.round_().clamp_(-self.largest, self.largest)
