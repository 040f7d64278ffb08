"""Layers of random features that a seed draws, before a network's last layer.

None is trained, or in the state dict, but for the solved blocks of :class:`ResidualFeatures` and
the limits of :class:`OverlapCodes`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize, pad

from ..support.precision import full_float32

# s, for inputs of length 1. Between 0.07 and 0.56 the accuracy on validation examples of
# Fashion-MNIST, from a SimpleCNN's last inputs with p = 2,000, was 86.5 to 87.1 %.
BANDWIDTH = 0.3
LARGEST_GROUP = 12  # bits that choose one of 4,096 rows
RESIDUAL_LAYER = "residual-layer"  # key of a message: whose random features are asked for
_rows = ContextVar("_rows", default=128)  # of a call


class FourierFeatures(nn.Module):
    """h (n, d) -> z (n, p), float32: cosines of h scaled to length 1.

    Inner products estimate a Gaussian kernel: z_j(h) = sqrt(2 / p) cos(w_j . h + b_j) with w_j
    normal of variance 1 / s^2, s the `bandwidth`, and b_j uniform in 0 ... 2 pi has
    E z(h) . z(h') = exp(-|h - h'|^2 / (2 s^2)). Source: Rahimi and Recht, *Random Features for
    Large-Scale Kernel Machines*, NeurIPS 2007, section 3.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(
        self, size: int, num_features: int, seed: int, bandwidth: float = BANDWIDTH
    ) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        drawn = generator.standard_normal((size, num_features), dtype=np.float32)
        phases = torch.from_numpy(generator.random(num_features, dtype=np.float32))
        frequencies = torch.from_numpy(drawn) / bandwidth
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("phases", phases * (2 * math.pi), persistent=False)

    @property
    def bound(self) -> float:
        """Largest magnitude of a feature."""
        return math.sqrt(2 / len(self.phases))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the cosines."""
        unit = normalize(inputs.float())
        with full_float32():
            angles = in_equal_parts(lambda part: part @ self.frequencies, unit)
        return (angles + self.phases).cos() * self.bound


class OverlapCodes(nn.Module):
    """h (n, d) -> Phi (n, p), float32: in each of E groups of bits, a 1 at the row they choose.

    Bit l of an input says whether it is above the l-th of its L limits, so that near values have
    most bits in common. A permutation by the seed mixes all d L bits. Each G (`group_size`) in turn
    are the digits of idx_j = sum_i g_ji 2^(i - 1), a row of a table W_j of V = 2^G rows. Scores are
    sum_j W_j[idx_j] = Phi W: a linear model with p = E V. If G does not divide d L, the last table
    is smaller. A NaN or infinite input makes its example's features NaN.

    Source: Bacellar et al., *Single-Round Scalable Analytic Federated Learning* (SAFLe), CVPR 2026,
    arXiv 2512.03336, as others report its equations. This package's reading: the bits of the
    paper's "binary overlap" are those of a thermometer code, and limits begin as normal quantiles
    l / (L + 1), for features of mean 0 and variance 1.
    """

    limits: Tensor  # float32 (d, L), increasing, in the state dict
    order: Tensor  # permutation of bits, int64 (d L,)

    def __init__(self, size: int, num_limits: int, group_size: int, seed: int) -> None:
        super().__init__()
        if num_limits < 1 or not 1 <= group_size <= LARGEST_GROUP:
            raise ValueError(
                f"overlap codes: expected at least 1 limit of an input and 1 ... {LARGEST_GROUP} "
                f"bits in a group, got {num_limits} and {group_size}"
            )
        self.group_size = group_size
        groups, rest = divmod(size * num_limits, group_size)
        self.num_features = (groups << group_size) + ((1 << rest) if rest else 0)
        generator = np.random.default_rng([seed, *b"overlap codes"])
        order = torch.from_numpy(generator.permutation(size * num_limits))
        self.register_buffer("limits", _quantiles(num_limits).float().repeat(size, 1))
        self.register_buffer("order", order, persistent=False)

    @classmethod
    def find(cls, network: nn.Module) -> tuple[str, Self] | None:
        """Return name and module of those in a network; None if it has none."""
        codes = [(name, m) for name, m in network.named_modules() if isinstance(m, cls)]
        if len(codes) > 1:
            raise ValueError(f"network: expected one OverlapCodes at most, got {len(codes)}")
        return codes[0] if codes else None

    @property
    def bound(self) -> float:
        """Largest magnitude of a feature."""
        return 1.0

    def limits_at(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return limits (d, L), float32, at the normal quantiles of this mean and deviation."""
        quantiles = _quantiles(self.limits.shape[1])
        return (mean.double()[:, None] + std.double()[:, None] * quantiles).float()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sparse features, as a dense tensor."""
        inputs, size = inputs.float(), self.group_size
        bits = (inputs.unsqueeze(2) > self.limits).flatten(1)[:, self.order].long()
        digits = pad(bits, (0, -bits.shape[1] % size)).unflatten(1, (-1, size))
        tables = torch.arange(digits.shape[1], device=bits.device) << size
        rows = (digits << torch.arange(size, device=bits.device)).sum(2) + tables
        one = 1 + (0 * inputs).sum(1, keepdim=True)
        codes = inputs.new_zeros(len(bits), self.num_features)
        return codes.scatter_(1, rows, one.expand_as(rows))


def _quantiles(num_limits: int) -> Tensor:
    """Return the normal quantiles l / (L + 1), l = 1 ... L, float64."""
    shares = torch.arange(1, num_limits + 1).double() / (num_limits + 1)
    quantiles: Tensor = torch.special.ndtri(shares)
    return quantiles


class ResidualFeatures(nn.Module):
    """Phi_0 (n, p) -> Phi_T (n, p), float32, by T blocks of m random features each.

    Phi_{t+1} = Phi_t + sigma(Phi_t B_t) Omega_{t+1} with the GELU sigma. The state dict holds the
    Omegas (m, p), which begin as 0. Source: Tang et al., *DeepAFL: Deep Analytic Federated
    Learning*, ICLR 2026, arXiv 2603.00579. This package's reading: B_t is standard normal, and
    Phi_t is scaled to length 1 before it is multiplied. Theirs has a bias.
    """

    directions: Tensor

    def __init__(self, size: int, num_layers: int, width: int, seed: int) -> None:
        super().__init__()
        generator = np.random.default_rng([seed, *b"residual features"])
        drawn = generator.standard_normal((num_layers, size, width), dtype=np.float32)
        self.register_buffer("directions", torch.from_numpy(drawn), persistent=False)
        self.omegas = nn.ParameterList(torch.zeros(width, size) for _ in range(num_layers))

    @classmethod
    def find(cls, network: nn.Module, size: int) -> tuple[str, Self]:
        """Return name and module of the one in a network, of `size` features."""
        blocks = [(name, m) for name, m in network.named_modules() if isinstance(m, cls)]
        if len(blocks) != 1 or blocks[0][1].directions.shape[1] != size:
            raise ValueError(
                f"network: expected one ResidualFeatures of {size} features, got {len(blocks)}; "
                "make the network with fedntk.ntk.with_residual_features"
            )
        return blocks[0]

    def hidden(self, inputs: Tensor, layer: int) -> Tensor:
        """Return sigma(Phi_t B_t), shape (n, m)."""
        with full_float32():
            return gelu(normalize(inputs) @ self.directions[layer])

    def beside(self, inputs: Tensor, layer: int) -> Tensor:
        """Return Phi_t (n, p) with a layer's random features beside it, (n, p + m), on the CPU."""
        phi = inputs.to(self.directions.device)
        return torch.cat([phi, self.hidden(phi, layer)], 1).detach().cpu()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return Phi_T."""
        phi = inputs.float()
        for layer, omega in enumerate(self.omegas):
            phi = phi + self.hidden(phi, layer) @ omega
        return phi


def in_equal_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), a row for each of x (n, d), from calls with the same number of rows.

    So an example's bits do not depend on those beside it.
    """
    rows = _rows.get()
    padded = pad(x, (0, 0, 0, -len(x) % rows))
    return torch.cat([function(part) for part in padded.split(rows)])[: len(x)]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Have :func:`in_equal_parts` take one row at a time, and pad none."""
    before = _rows.set(1)
    try:
        yield
    finally:
        _rows.reset(before)
