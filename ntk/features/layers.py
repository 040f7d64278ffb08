"""Layers of random features that a seed draws, before a network's last layer.

None is trained, or in the state dict, but for the solved blocks of :class:`ResidualFeatures`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, normalize, pad

from ..support.precision import full_float32

# s, for inputs of length 1. Between 0.07 and 0.56 the accuracy on validation examples of
# Fashion-MNIST, from a SimpleCNN's last inputs with p = 2,000, was 86.5 to 87.1 %.
BANDWIDTH = 0.3
BUCKETS, GROUP = 2, 2
SPREAD = 0.3  # standard deviation of the limits; these three chosen on validation examples
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


class BucketFeatures(nn.Module):
    """h (n, d) -> z (n, p), float32: in each group 1 / sqrt(G) at its row, so z has norm 1.

    Each of G groups of `group` = g inputs, in `buckets` = b buckets each, chooses one of b^g rows
    of a table, and scores are sums of rows: a linear model with p = G b^g. An example's inputs are
    scaled to mean 0 and variance 1; limits of buckets are normal. Each input is in about as many
    groups as any other, and some in none with p below d b^g / g.

    Source: Bacellar et al., *Single-Round Scalable Analytic Federated Learning* (SAFLe), CVPR 2026,
    as others describe it (arXiv 2512.03336, read in summaries only).
    """

    chosen: Tensor  # the groups' inputs (G g,), int64
    limits: Tensor  # between buckets (G g, b - 1), increasing

    def __init__(
        self, size: int, num_features: int, seed: int, buckets: int = BUCKETS, group: int = GROUP
    ) -> None:
        super().__init__()
        rows = buckets**group
        if buckets < 2 or group < 1 or num_features < 1 or num_features % rows:
            raise ValueError(
                f"bucket features: expected a multiple of {buckets}^{group} features, with at "
                f"least 2 buckets and 1 input in a group, got {num_features}"
            )
        self.rows, self.buckets, self.group = rows, buckets, group
        inputs = num_features // rows * group
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(size) for _ in range(math.ceil(inputs / size))]
        limits = np.sort(SPREAD * generator.standard_normal((inputs, buckets - 1)), axis=1)
        self.register_buffer("chosen", torch.from_numpy(np.concatenate(orders)[:inputs]), False)
        self.register_buffer("limits", torch.from_numpy(limits).float(), False)

    @property
    def bound(self) -> float:
        """Largest magnitude of a feature."""
        return math.sqrt(self.group / len(self.chosen))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sparse features, as a dense tensor."""
        scaled = in_equal_parts(lambda part: layer_norm(part, part.shape[1:]), inputs.float())
        buckets = (scaled[:, self.chosen, None] > self.limits).sum(2)
        powers = self.buckets ** torch.arange(self.group, device=inputs.device)
        row = (buckets.unflatten(1, (-1, self.group)) * powers).sum(2)
        sums = scaled.new_zeros(*row.shape, self.rows)
        sums.scatter_(2, row.unsqueeze(2), self.bound)
        return sums.flatten(1)


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
