"""Residual blocks of random features: what layer after layer of least squares can be solved for.

Source: Tang et al., *DeepAFL: Deep Analytic Federated Learning*, ICLR 2026, arXiv 2603.00579.
Phi_{t+1} = Phi_t + sigma(Phi_t B_t) Omega_{t+1}, with B_t drawn once and sigma the GELU, as in the
authors' settings.

This package's reading: B_t is standard normal, and Phi_t is scaled to length 1 before it is
multiplied, so that sigma bends features of any scale alike. Theirs has a bias.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize

from ..support.precision import full_float32

RESIDUAL_LAYER = "residual-layer"  # key of a message: whose random features are asked for


class ResidualFeatures(nn.Module):
    """Phi_0 (n, p) -> Phi_T (n, p), float32, by T blocks of m random features each.

    The state dict holds the Omegas (m, p), which begin as 0, so that Phi_T is Phi_0. The seed gives
    the B_t.
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
