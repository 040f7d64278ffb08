"""Ridge regression, and DeepAFL's between two matrices."""

import torch
from torch import Tensor


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
