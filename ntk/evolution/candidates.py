"""Candidate weights of NTK-FL, one for each number of steps, and the choice among them.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, eq. (10) and
(11a): w^(k,t) = w^(k) + J^T R^(k,t), and t^(k) is the t of the lowest loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..jacobian.operator import Jacobian
from ..losses import loss_value
from .gradient_flow import Evolution, GradientFlow
from .solver import OnStep


@dataclass(frozen=True, eq=False)
class Candidates:
    """Weights that follow a linearised network at several numbers of steps."""

    weights: dict[str, NDArray[Any]]  # w^(k,t), stacked over t: (T, *array shape)
    linearised_losses: tuple[float, ...]  # of f^(k,t), the linearised network's outputs
    evolution: Evolution  # that they come from

    @classmethod
    def of(
        cls,
        weights: Mapping[str, NDArray[Any]],
        jacobian: Jacobian,
        outputs: Tensor,
        targets: Tensor,
        flow: GradientFlow,
        on_step: OnStep | None = None,
    ) -> Self:
        """Follow the flow from some weights, given Jacobian, outputs and targets there."""
        evolution = flow(jacobian, outputs, targets, on_step)
        updates = [jacobian.vjp(residuals) for residuals in evolution.residuals]
        losses = tuple(loss_value(f, targets, flow.loss) for f in evolution.outputs)
        stacked = {}
        for name in weights:
            first = jacobian.shared.get(name, name)
            array = weights[first]
            stacked[name] = np.repeat(array[None], len(updates), axis=0)
            for row, update in enumerate(updates):
                if first in update:  # buffers are not
                    stacked[name][row] += update[first].cpu().numpy().astype(array.dtype)
        return cls(stacked, losses, evolution)

    def __len__(self) -> int:
        return len(self.linearised_losses)

    def weights_at(self, index: int) -> dict[str, NDArray[Any]]:
        """Name -> array of one candidate."""
        return {name: rows[index, ...] for name, rows in self.weights.items()}


def mean_losses(losses: Sequence[NDArray[np.float64]], num_examples: Sequence[int]) -> list[float]:
    """Mean over the clients of their losses (T,), weighted by their examples: eq. (11a)."""
    if not losses:
        return []
    pairs = zip(losses, num_examples, strict=True)
    total = sum((count * client for client, count in pairs), np.zeros(len(losses[0])))
    return [float(value) / sum(num_examples) for value in total]


def trimmed_losses(losses: Sequence[NDArray[np.float64]], malicious: int) -> list[float]:
    """Mean over the clients of their losses (T,) without the largest and smallest.

    As many are left out at either end as there may be malicious clients; of too few clients only
    the median's one or two count. NaN counts as the largest.
    """
    cut = min(malicious, max(0, len(losses) - 1) // 2)
    return np.sort(losses, axis=0)[cut : len(losses) - cut].mean(0).tolist() if losses else []


def lowest_loss(losses: Sequence[float]) -> int | None:
    """Position of the lowest loss, NaN counting as infinite; None if none is finite."""
    values = np.array([np.inf if np.isnan(loss) else loss for loss in losses])
    return int(np.argmin(values)) if np.isfinite(values).any() else None


def unstack_candidates(arrays: Sequence[NDArray[Any]]) -> list[list[NDArray[Any]]]:
    """Return a list of weights for each candidate, from arrays stacked over the candidates."""
    counts = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"candidates: expected one number of rows, got {sorted(counts)}")
    return [[array[row, ...] for array in arrays] for row in range(counts.pop())]
