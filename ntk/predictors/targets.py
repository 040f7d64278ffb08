"""Real targets: how they are standardised for training, and how predictions are judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FAR = 5.0  # pooled standard deviations between a node's mean and the pooled one
WIDE = 10.0  # a node's standard deviation over the pooled one


@dataclass(frozen=True, eq=False)
class TargetTransform:
    """Standardises real targets (n, C) to ``(y - mean) / std``, and gives predictions their unit.

    `mean` and `std`, float64 (C,), are moments of the training targets.

    Examples
    --------
    >>> targets = TargetTransform.fit(np.array([[1.0], [3.0]]))
    >>> targets([1, 5])
    tensor([[-1.],
            [ 3.]])
    >>> targets.restore(targets([1, 5])).tolist()
    [[1.0], [5.0]]
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]

    @classmethod
    def fit(cls, y: NDArray[np.float64], *, standardise: bool = True) -> Self:
        """Take the moments of training targets (n, C); not standardised, they are 0 and 1."""
        if not standardise:
            return cls(np.zeros(y.shape[1]), np.ones(y.shape[1]))
        mean, std = y.mean(0), y.std(0)
        if not (std > 1e-12 * np.abs(mean)).all() or not np.isfinite(std).all():
            raise ValueError(
                "targets: expected numbers that differ, and whose variance is finite, got means "
                f"{mean.tolist()} and standard deviations {std.tolist()}"
            )
        return cls(mean, std)

    def __call__(self, y: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return standardised targets (n, C) of targets (n, C), or (n,) if C is 1."""
        array = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
        array = array[:, None] if array.ndim == 1 else array
        expected = f"expected targets of shape (n, {len(self.mean)}), finite numbers"
        if array.dtype.kind not in "iuf" or array.shape[1:] != self.mean.shape:
            raise ValueError(f"{expected}, got {array.dtype} of shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{expected}, got NaN or infinity")
        return torch.from_numpy((array - self.mean) / self.std).to(dtype)

    def require_alike(self, y: Any) -> None:
        """Refuse targets (n, C) of another unit: their mean or spread is far from the pooled one.

        By Chebyshev's inequality at most 1 of 25 pooled values is as far off as a mean may be.
        """
        scaled = self(y, torch.float64).numpy()
        shift, spread = np.abs(scaled.mean(0)), scaled.std(0)
        if (shift > FAR).any() or (spread > WIDE).any():
            raise ValueError(
                "expected targets in the unit of training, of means "
                f"{self.mean.tolist()} and standard deviations {self.std.tolist()}; got means and "
                f"deviations, in these, of {shift.tolist()} and {spread.tolist()}; correct them, "
                "or, if they are right, leave this check out: check-ranges=false"
            )

    def restore(self, outputs: Tensor) -> Tensor:
        """Return a model's outputs (n, C) in the targets' units, float64 on the same device."""
        mean, std = (torch.from_numpy(part).to(outputs.device) for part in (self.mean, self.std))
        return outputs.double() * std + mean

    def scale(self, predictions: Tensor) -> Tensor:
        """Return predictions (n, C) in the targets' units as standardised ones, float64."""
        mean, std = (torch.from_numpy(part) for part in (self.mean, self.std))
        return (predictions - mean) / std


def real_targets(y: Tensor, num_outputs: int, *, name: str = "y") -> Tensor:
    """Return real targets (n,) or (n, C) as (n, C), in float32 or float64; else ValueError."""
    targets = y[:, None] if y.ndim == 1 else y
    if targets.shape[1:] != (num_outputs,) or y.is_complex():
        raise ValueError(
            f"{name}: expected real targets of shape (n, {num_outputs}), one for each of the "
            f"model's outputs, got shape {tuple(y.shape)}"
        )
    if not bool(torch.isfinite(targets).all()):
        raise ValueError(f"{name}: expected finite targets, got NaN or infinity")
    return targets.to(torch.promote_types(torch.float32, targets.dtype))


def regression_metrics(
    outputs: Tensor, targets: Tensor, unit: Sequence[float] | NDArray[np.float64] = (1.0,)
) -> dict[str, float]:
    """Return ``mae`` and ``r2`` of outputs (n, C) for real targets (n, C), means over the C.

    ``mae`` is the mean absolute error times `unit`, one number or (C,). ``r2`` is 1 - sum (y - f)^2
    / sum (y - mean y)^2, as scikit-learn's ``r2_score``; targets that do not vary have none.

    Examples
    --------
    >>> y = torch.tensor([[1.0], [2.0], [3.0]])
    >>> regression_metrics(y + 0.5, y, [10.0])
    {'mae': 5.0, 'r2': 0.625}
    """
    f, y = outputs.double().cpu(), targets.double().cpu()
    errors = y - f
    metrics = {"mae": float((errors.abs().mean(0) * torch.as_tensor(np.asarray(unit))).mean())}
    around = (y - y.mean(0)).square().sum(0)
    varies = around > 1e-20 * y.square().sum(0)
    if bool(varies.any()):
        metrics["r2"] = float((1 - errors.square().sum(0)[varies] / around[varies]).mean())
    return metrics
