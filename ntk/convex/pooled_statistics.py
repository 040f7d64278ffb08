"""Ridge regression: from a kernel; from nothing but sums over clients; between two matrices.

Beyond Yu et al., NeurIPS 2022, whose convex problem the sums solve in one place: a p x p matrix is
a sum over examples, the same however these are split among clients.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..features.normaliser import Moments, Normaliser
from ..payloads.feature_statistics import FeatureStatistics
from ..payloads.split_statistics import SplitStatistics

RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
CLIENT_WEIGHTS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def ridge_regression(kernel: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Coefficients A (n, C) of W = Z^T A, the minimum of ||Z W - Y||^2 + rho ||W||^2, in the dual.

    A = (K + rho I)^{-1} Y, float64, with K = Z Z^T (n, n), targets Y (n, C) and rho = `ridge` times
    the mean of K's diagonal. Full-batch steps from zero approach the limit rho -> 0.
    """
    system = kernel.double()
    system = system.clone() if system is kernel else system
    return solve_ridge(system, targets.double(), ridge, float(system.diagonal().mean()))


def solve_ridge(
    system: Tensor, right: Tensor, ridge: float, scale: float, *, free: int = 0
) -> Tensor:
    """Solve (S + rho I) X = B in float64, rho = ridge times scale but for the last `free` rows.

    S is overwritten.
    """
    if not ridge > 0:  # also NaN
        raise ValueError(f"ridge: expected more than 0, got {ridge}")
    system.diagonal()[: len(system) - free].add_(ridge * (scale or 1.0))
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed) or not bool(torch.isfinite(factor.diagonal()).all()):
        raise ValueError(f"ridge = {ridge:g} is too small for these features; raise it")
    return torch.cholesky_solve(right, factor)


def sandwiched_ridge(
    gram: Tensor, cross: Tensor, linear: Tensor, ridge: float, num_examples: int
) -> Tensor:
    """Return Omega (m, p), the minimum of ||R - F Omega W||^2 + rho ||Omega||^2, float64.

    Source: Tang et al., *DeepAFL*, ICLR 2026, arXiv 2603.00579, their program. Given are F^T F
    (m, m), F^T R (m, C) and W (p, C). With F^T F = V diag(s) V^T and W = U diag(t) Q^T

        Omega = V M U^T,  M_ij = (V^T F^T R Q)_ij t_j / (rho + s_i t_j^2).

    rho is `ridge` times the mean squared norms of the rows of F and of the columns of W.
    """
    values, vectors = torch.linalg.eigh(gram.double())
    left, scales, right = torch.linalg.svd(linear.double(), full_matrices=False)
    squares = scales.square()
    rho = ridge * float(values.sum()) / num_examples * float(squares.sum()) / linear.shape[1]
    inner = (vectors.T @ cross.double() @ right.T) * scales
    omega: Tensor = vectors @ (inner / (rho + values.clamp(min=0)[:, None] * squares)) @ left.T
    return omega


def normaliser_of(statistics: FeatureStatistics, num_targets: int = 0) -> Normaliser:
    """Return the normaliser to mean 0 and variance 1, by the examples' weights.

    The last `num_targets` features are real targets, and not normalised.
    """
    width = statistics.width - num_targets
    total = float(statistics.counts @ statistics.weights)
    mean = statistics.class_sums.sum(0)[:width] / total
    variance = np.maximum(statistics.diagonal[:width] / total - mean**2, 0.0)
    return Normaliser.of(Moments(1, mean, variance))


@dataclass(frozen=True, eq=False)
class NormalEquations:
    """Z^T Z W = Z^T Y of normalised features, and of real targets or one-hot labels."""

    gram: Tensor  # Z^T Z, float64 (q, q) with q = p, or p + 1 with a bias
    cross: Tensor  # Z^T Y, float64 (q, C)
    squared_targets: float  # ||Y||^2
    total: float  # weight of all examples; their number if they count alike
    squared_weights: float  # sum of the examples' squared weights; their number if they count alike
    free: int = 0  # last features that the ridge does not count

    @classmethod
    def of(
        cls,
        statistics: FeatureStatistics,
        normaliser: Normaliser,
        *,
        bias: bool = False,
        centred: bool = True,
        free_bias: bool = False,
        num_targets: int = 0,
    ) -> Self:
        """Normalise, centre labels (one-hot minus 1/C) and append a feature that is 1, by the sums.

        The ridge does not count a `free_bias`. With `num_targets` there are no classes: the last C
        features are real targets, which stay as they are.
        """
        num_classes, width = len(statistics.counts), statistics.width - num_targets
        mean = np.concatenate([normaliser.mean, np.zeros(num_targets)]).astype(np.float64)
        inv_std = np.concatenate([normaliser.inv_std, np.ones(num_targets)]).astype(np.float64)
        per_class = statistics.counts * statistics.weights  # weight of each class
        total = float(per_class.sum())
        sums = statistics.class_sums.sum(0).astype(np.float64)
        matrix = statistics.matrix()
        matrix -= np.outer(mean, sums - total * mean)
        matrix -= np.outer(sums, mean)
        matrix *= inv_std
        matrix *= inv_std[:, None]
        of_class = (statistics.class_sums - np.outer(per_class, mean)) * inv_std  # (C, p)
        ones = of_class.sum(0)
        mean_target = 1 / num_classes if centred else 0.0
        cross = of_class.T - ones[:, None] * mean_target
        of_bias, squared = per_class - total * mean_target, total * (1 - mean_target)
        if num_targets:
            matrix, cross, rest = matrix[:width, :width], matrix[:width, width:], matrix[width:]
            of_bias, squared = ones[width:], float(rest[:, width:].trace())
            ones = ones[:width]
        if bias:
            matrix = np.block([[matrix, ones[:, None]], [ones[None], np.full((1, 1), total)]])
            cross = np.concatenate([cross, of_bias[None]])
        squared_weights = float(per_class @ statistics.weights)
        gram, right, free = torch.from_numpy(matrix), torch.from_numpy(cross), bias and free_bias
        return cls(gram, right, squared, total, squared_weights, int(free))

    def plus(self, other: Self, weight: float) -> Self:
        """Add another group's equations, each of its examples counted `weight` times."""
        return type(self)(
            self.gram + weight * other.gram,
            self.cross + weight * other.cross,
            self.squared_targets + weight * other.squared_targets,
            self.total + weight * other.total,
            self.squared_weights + weight * other.squared_weights,  # these are no rarer examples
            self.free,
        )

    def solve(self, ridge: float) -> Tensor:
        """Return W (q, C), the minimum of ||Z W - Y||^2 + rho ||W||^2, float64.

        rho is `ridge` times the examples' mean squared norm, as in
        :func:`~fedntk.ntk.ridge_regression`. With weights w it is sum w^2 / sum w times as much
        (Kish 1965), as is the variance of the noise of Z^T W Y.
        """
        size = len(self.gram)
        counted = self.gram.diagonal()[: size - self.free]
        scale = float(counted.sum()) / self.total * (self.squared_weights / self.total)
        return solve_ridge(self.gram.clone(), self.cross, ridge, scale, free=self.free)

    def least_norm(self) -> Tensor:
        """Return the least-squares solution of least norm W (q, C), float64: a ridge of 0.

        Directions within the sums' rounding are dropped: eigenvalues up to max(n, q) eps times the
        largest, with weights w for n = (sum w)^2 / sum w^2.
        """
        size = len(self.gram)
        values, vectors = torch.linalg.eigh(self.gram)
        number = self.total**2 / self.squared_weights  # of examples, if they count alike
        rounding = max(size, number) * torch.finfo(values.dtype).eps
        nonzero = values > rounding * values[-1]
        basis = vectors[:, nonzero]
        linear: Tensor = basis @ ((basis.T @ self.cross) / values[nonzero, None])
        return linear

    def loss(self, linear: Tensor) -> float:
        """Half the mean squared error of a linear model (q, C) on these examples."""
        products = float((linear * (self.gram @ linear)).sum())
        inner = float((linear * self.cross).sum())
        return (products - 2 * inner + self.squared_targets) / (2 * self.total)


def best_ridge(
    training: NormalEquations, validation: NormalEquations, ridges: Sequence[float] = RIDGES
) -> float:
    """Return the ridge with the least squared error on validation examples, of one normaliser.

    Ridges too small for a Cholesky factor are skipped.
    """
    losses: dict[float, float] = {}
    for ridge in ridges:
        with contextlib.suppress(ValueError):  # no factor
            losses[ridge] = validation.loss(training.solve(ridge))
    finite = {ridge: loss for ridge, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        raise ValueError(f"ridge: none of {min(ridges):g} ... {max(ridges):g} has a solution")
    return min(finite, key=finite.__getitem__)


def personal_model(
    total: SplitStatistics,
    client: SplitStatistics,
    ridge: float,
    *,
    bias: bool = False,
    weights: Sequence[float] = CLIENT_WEIGHTS,
) -> tuple[Tensor, float]:
    """Return a client's model W_k (q, C), float64, and its weight w.

    Beyond the papers: W_k = argmin over W of ||Z W - Y||^2 + w ||Z_k W - Y_k||^2 + rho ||W||^2 for
    all clients' examples (Z, Y), with rho as in :meth:`NormalEquations.solve`. w is the one of
    `weights` with the least squared error on the client's held-out examples, the first if there are
    none; 0 gives the joint model.
    """

    def of(sums: FeatureStatistics) -> NormalEquations:
        return NormalEquations.of(sums, Normaliser.identity(sums.width), bias=bias)

    weight = weights[0]
    if client.held_out.num_examples:
        common, fitting, held = of(total.fitting), of(client.fitting), of(client.held_out)
        weight = min(weights, key=lambda w: held.loss(common.plus(fitting, w).solve(ridge)))
    return of(total.everyone).plus(of(client.everyone), weight).solve(ridge), weight


def class_weights(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return w_c = n / (C' n_c), shape (C,), by which C' classes with n_c examples weigh alike.

    A class without examples has the weight 1.
    """
    there = counts > 0
    weights = counts.sum() / (there.sum() * np.where(there, counts, 1))
    return np.where(there, weights, 1.0)
