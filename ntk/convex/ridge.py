"""The convex problem of TCT solved in one place, from all clients' features.

Beyond Yu et al., NeurIPS 2022: the exact solution that their stage 2 approaches round by round.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..features.normaliser import Moments, Normaliser
from ..features.rows import FeatureRows
from ..losses import one_hot
from ..payloads.feature_upload import FeatureUpload
from ..support.memory import require_memory


def ridge_regression(kernel: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Coefficients A (n, C) of W = Z^T A, the minimum of ||Z W - Y||^2 + rho ||W||^2, in the dual.

    A = (K + rho I)^{-1} Y, float64, with K = Z Z^T (n, n), targets Y (n, C) and rho = `ridge` times
    the mean of K's diagonal, so that its meaning depends neither on n nor on the features' scale.
    Full-batch steps from zero approach the limit rho -> 0.
    """
    system = kernel.double()
    system = system.clone() if system is kernel else system
    return solve_ridge(system, targets.double(), ridge, float(system.diagonal().mean()))


def solve_ridge(
    system: Tensor, right: Tensor, ridge: float, scale: float, *, free: int = 0
) -> Tensor:
    """Solve (S + rho I) X = B in float64, rho = ridge times scale; S is overwritten.

    The last `free` rows of X, such as a bias, are not counted by the ridge.
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
    found: Tensor = vectors @ (inner / (rho + values.clamp(min=0)[:, None] * squares)) @ left.T
    return found


def pooled_ridge(
    uploads: Sequence[FeatureUpload],
    num_outputs: int,
    *,
    ridge: float,
    normalise: bool = True,
    bias: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[NDArray[np.float32], Normaliser]:
    """Normalise the pooled features and solve the ridge regression on centred labels, in the dual.

    Without `normalise` features are used as they are. With `bias` the model has one, which the
    ridge does not count. Products are formed on `device`. The linear model is float32, (p, C) or
    (p + 1, C); its features' normaliser comes with it. ArithmeticError if the solution is not
    finite.
    """
    bounds = np.cumsum([0, *(len(upload.labels) for upload in uploads)]).tolist()
    n, width = bounds[-1], len(uploads[0].scale)
    require_memory(24 * n * n, f"solving for {n} examples", cure="ask fewer clients")

    def raw(start: int, stop: int) -> Tensor:
        return torch.cat(
            [
                upload.rows(max(start - first, 0), min(stop, last) - first)
                for upload, first, last in zip(uploads, bounds, bounds[1:], strict=False)
                if start < last and stop > first
            ]
        )

    normaliser = Normaliser.identity(width)
    if normalise:
        chunks = FeatureRows(raw, (n, width)).chunks()
        normaliser = Normaliser.of(Moments.join(Moments.of(z) for _, z in chunks))
    rows = FeatureRows(lambda start, stop: normaliser(raw(start, stop)), (n, width), device=device)
    labels = np.concatenate([upload.labels.astype(np.int64) for upload in uploads])
    targets = one_hot(torch.from_numpy(labels), num_outputs).double() - 1 / num_outputs
    kernel = rows.gram(torch.float64)  # else its rounding would bound the ridge from below
    scale, means, constant = float(kernel.diagonal().mean()), kernel.mean(0), targets.mean(0) * bias
    if bias:  # features and targets of mean 0 give W, and the bias is what then remains
        kernel -= means + means[:, None] - means.mean()
    coefficients = solve_ridge(kernel, targets - constant, ridge, scale)
    linear = rows.transposed_matmul(coefficients.float())
    if bias:
        linear = torch.cat([linear, (constant - means @ coefficients)[None].float()])
    if not bool(torch.isfinite(linear).all()):
        raise ArithmeticError("the solution is not finite")
    return linear.numpy(), normaliser
