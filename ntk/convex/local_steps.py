"""M corrected full-batch steps of a client on its convex problem, and their closed form.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, algorithm 1 (eq. (3)) with full-batch gradients (appendix A.2):

    W_{m+1} = W_m - eta (grad L_k(W_m) - h_k),       m = 0 ... M - 1.

Here L_k(W) = 1/(2 n_k) ||Z W - Y||^2, so grad L_k = -Z^T R / n_k with the residual R = Y - Z W, as
in the authors' MNIST example; eq. (1) has no 1/2, and algorithm 2 no 1/n_k. Steps diverge where
eta lambda_max / n is above 2.

Whatever the loss, W_M = W_0 + eta (Z^T S / n + M h) with S = sum of R_m (n x C). For least squares
R_{m+1} = (I - eta K / n) R_m - eta Z h with K = Z Z^T, a geometric series in the eigenbasis of K:
for an eigenvalue with a = eta lambda / n,

    S = phi_1 R_0 - eta phi_2 Z h,   phi_1 = (1 - (1 - a)^M) / a,   phi_2 = (M - phi_1) / a.

For cross-entropy R = Y - softmax(Z W), and the M steps are taken on Z W (n x C) instead of W
(p x C). Normalisation: this loss is a mean over examples and a sum over outputs, that of
:mod:`fedntk.ntk.losses` a mean over both for MSE.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..losses import Loss, check_loss, residual
from ..support.memory import require_memory


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues (n,) >= 0 of K = Z Z^T, ascending; eigenvectors (n, n) in columns; float64."""

    BYTES: ClassVar[int] = 5 * 8  # of n^2 numbers, in memory while it is formed
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, kernel: Tensor) -> "Spectrum":
        """Decompose a kernel (n, n), in float64."""
        n = len(kernel)
        require_memory(
            cls.BYTES * n * n,
            f"the eigendecomposition for {n} examples",
            cure="give the client fewer examples",
        )
        values, vectors = torch.linalg.eigh(kernel.double())
        return cls(values.clamp(min=0), vectors)

    def rate(self, learning_rate: float) -> float:
        """Return eta lambda_max / n; full-batch steps diverge above 2."""
        return learning_rate * float(self.values[-1]) / len(self.values)


def convex_loss(outputs: Tensor, targets: Tensor, loss: Loss) -> float:
    """L_k at outputs Z W (n, C): half the mean squared norm, or the cross-entropy."""
    if check_loss(loss) == "mse":
        return float((outputs.double() - targets.double()).square().sum(1).mean() / 2)
    logs = torch.log_softmax(outputs.double(), 1)
    return float(-(targets.double() * logs).sum(1).mean())


def centred_targets(targets: Tensor, loss: Loss, real: bool = False) -> Tensor:
    """Return one-hot targets (n, C), minus 1/C for least squares; real ones stay."""
    return targets - 1 / targets.shape[1] if loss == "mse" and not real else targets


def best_bias(counts: NDArray[np.int64], loss: Loss) -> NDArray[np.float32]:
    """Return the bias (C,) with the least loss beside features of mean 0, before these count.

    Beyond Yu et al. 2022, where b starts at 0. Of least squares it is the classes' shares minus
    1/C, of cross-entropy their logarithm, with one example more of each. `counts` are over clients.
    """
    shares = counts / counts.sum() - 1 / len(counts)
    logarithms = np.log((counts + 1) / (counts + 1).mean())
    return np.asarray(shares if loss == "mse" else logarithms, np.float32)


def geometric_sums(rate: Tensor, local_steps: int) -> tuple[Tensor, Tensor]:
    """phi_1 = sum of (1 - a)^m and phi_2 = sum of (1 - (1 - a)^m) / a, over m = 0 ... M - 1.

    `rate` is a = eta lambda / n, at least 0, in float64; above 2 both sums grow as the loop does.
    At a = 0 they are M and M (M - 1) / 2.
    """
    small = rate * local_steps < 1e-2
    a = torch.where(small, torch.ones_like(rate), rate)
    # expm1 keeps the digits where M a is of order 1 and a is tiny
    log = local_steps * torch.log1p(-a.clamp(max=0.5))
    power = torch.where(a < 0.5, -torch.expm1(log), 1 - (1 - a) ** local_steps)
    first = power / a
    second = (local_steps - first) / a
    series = [torch.zeros_like(rate), torch.zeros_like(rate)]
    term = torch.full_like(rate, float(local_steps))  # binom(M, j) (-a)^(j - 1)
    for j in range(1, 8):
        series[0] = series[0] + term
        term = term * (local_steps - j) / (j + 1)  # binom(M, j + 1) (-a)^(j - 1)
        series[1] = series[1] + term
        term = -term * rate
    return torch.where(small, series[0], first), torch.where(small, series[1], second)


def residual_sum(
    kernel: Spectrum | Tensor,
    outputs: Tensor,
    targets: Tensor,
    drift: Tensor,
    *,
    learning_rate: float,
    local_steps: int,
    loss: Loss = "mse",
) -> Tensor:
    """S, the sum of the residuals R_0 ... R_{M-1} along M corrected steps: shape (n, C), float64.

    `kernel` is K = Z Z^T (n, n), for least squares its spectrum, unused for one step. Outputs,
    targets and drift are Z W_0, Y and Z h, (n, C). Diverging steps may leave it not finite.
    """
    n, first = len(outputs), residual(outputs.double(), targets.double(), check_loss(loss))
    if local_steps == 1:
        return first
    drift = drift.double()
    if loss == "mse":
        if not isinstance(kernel, Spectrum):
            raise TypeError("kernel: least squares need its Spectrum")
        one, two = geometric_sums(learning_rate * kernel.values / n, local_steps)
        basis = kernel.vectors
        inner = one[:, None] * (basis.T @ first) - learning_rate * two[:, None] * (basis.T @ drift)
        return basis @ inner
    if not isinstance(kernel, Tensor):
        raise TypeError("kernel: cross-entropy needs the matrix")
    f, k = outputs.double(), kernel.double() / n
    total = torch.zeros_like(f)
    for _ in range(local_steps):
        r = residual(f, targets, loss)
        total += r
        f = f + learning_rate * ((r.T @ k.T).T + drift)  # k @ r, faster with few columns
    return total


def mean_gradient(before: Tensor, after: Tensor, span: float) -> Tensor:
    """Algorithm 1's eq. (2): c = (theta^{t-1} - theta^t) / (M eta), of two rounds' first models.

    It is the clients' mean gradient along the last round, if all took part. `span` is M eta.
    """
    return (before - after) / span
