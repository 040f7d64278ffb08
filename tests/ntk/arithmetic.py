"""Numbers to compute with, and how far two results are apart."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64, from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    return float((actual - expected).norm() / expected.norm())
