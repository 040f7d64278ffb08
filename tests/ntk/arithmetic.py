"""Numbers to compute with, how far two results are apart, and a plain loop of local steps."""

import torch
from torch import Tensor

from fedntk.ntk.losses import Loss, residual


def normal(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64, from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Whether float64 sums of at most a few thousand terms agree to 1e-10, relative."""
    return bool((actual - expected).norm() <= 1e-10 * (1 + expected.norm()))


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    return float((actual - expected).norm() / expected.norm())


def looped_steps(
    features: Tensor,
    weights: Tensor,
    targets: Tensor,
    correction: Tensor,
    *,
    learning_rate: float,
    local_steps: int,
    loss: Loss = "mse",
) -> tuple[Tensor, Tensor]:
    """Take TCT's M steps one after another, as eq. (3) says: the closed form's oracle.

    From Z (n, p), W_0 (p, C), Y (n, C) and h (p, C), of one dtype, come W_M (p, C) and the sum of
    the residuals (n, C).
    """
    w, total = weights.clone(), torch.zeros_like(targets)
    for _ in range(local_steps):
        r = residual(features @ w, targets, loss)
        total += r
        w += learning_rate * (features.T @ r / len(features) + correction)
    return w, total
