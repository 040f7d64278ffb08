"""Low frequencies of scattering coefficients: few features, chosen without any data.

Beyond Bruna and Mallat, IEEE TPAMI 2013. Coefficients vary smoothly with the position in the image
and with the wavelets' angles. So a cosine transform over rows and columns, and a Fourier transform
over each angle, gather their variance in few numbers, as the DCT does for images (Ahmed, Natarajan
and Rao, IEEE Transactions on Computers C-23, 1974). On MNIST the variance falls about like

    v = (1 + a)^-4 (1 + b)^-2,

with a and b the norms of the frequencies over angles and over positions. The p numbers of largest v
are kept, times v^-0.375: with noise in their sums, a model learns more from features of more equal
variance. These exponents were chosen on training images of MNIST.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..support.precision import full_float32
from .fourier import in_equal_parts
from .projection import cosines
from .scattering import Scattering

ANGLES, POSITIONS, EQUALISE = 4.0, 2.0, 0.375  # the exponents


class ScatteringFrequencies(nn.Module):
    """Functions of scattering coefficients (n, channels K h w) -> z (n, p), float32, of norm 1.

    Nothing is trained, drawn or in the state dict.

    Parameters
    ----------
    scattering : Scattering
        Module that makes the coefficients; what it gives may go through a function of each of them.
    size : int
        Numbers of an image, channels K h w.
    num_features : int
        p, at most `size`.

    Examples
    --------
    >>> scattering = Scattering((8, 8))
    >>> coefficients = scattering(torch.rand(5, 1, 8, 8)).flatten(1)
    >>> ScatteringFrequencies(scattering, 324, 50)(coefficients).norm(dim=1).round(decimals=4)
    tensor([1., 1., 1., 1., 1.])
    """

    angles: Tensor  # orthonormal, over the coefficients of a position (K, K)
    rows: Tensor  # orthonormal (h, h)
    columns: Tensor  # orthonormal (w, w)
    chosen: Tensor  # int64 (p,)
    weights: Tensor  # (p,)

    def __init__(self, scattering: Scattering, size: int, num_features: int) -> None:
        super().__init__()
        height, width = scattering.map_size
        self.shape = (-1, scattering.num_channels, height, width)
        channels, rest = divmod(size, scattering.num_channels * height * width)
        if rest or not 1 <= num_features <= size:
            raise ValueError(
                f"low frequencies: expected 1 ... {size} features of scattering coefficients, "
                f"{scattering.num_channels} x {height} x {width} for each of an image's channels, "
                f"got {num_features} of {size}"
            )
        basis, frequencies = fourier_basis(scattering.angles)
        both = torch.kron(basis, basis), torch.hypot(frequencies[:, None], frequencies).flatten()
        constant = torch.ones(1, 1).double(), torch.zeros(1).double()
        by_order = [constant, (basis, frequencies), both]
        after = [scattering.scales - 1 - j for j in range(scattering.scales)]
        orders = [0, *(order for count in after for order in [1] + [2] * count)]
        b = torch.hypot(torch.arange(1.0 * height)[:, None], torch.arange(1.0 * width))
        a = torch.cat([by_order[order][1] for order in orders])
        variance = (1 + a)[:, None] ** -ANGLES * (1 + b.flatten()) ** -POSITIONS
        variance = variance.flatten().repeat(channels)
        chosen = variance.argsort(descending=True, stable=True)[:num_features]
        made = {
            "angles": torch.block_diag(*(by_order[order][0] for order in orders)).float(),
            "rows": cosines(height, height).float(),
            "columns": cosines(width, width).float(),
            "chosen": chosen,
            "weights": variance[chosen].float() ** -EQUALISE,
        }
        for name, tensor in made.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the features."""
        with full_float32():
            return in_equal_parts(self._transform, inputs.float())

    def _transform(self, inputs: Tensor) -> Tensor:
        planes = inputs.unflatten(1, self.shape)
        planes = (self.angles @ planes.flatten(3)).unflatten(3, planes.shape[3:])
        coefficients = (self.rows @ planes @ self.columns.T).flatten(1)
        return normalize(coefficients[:, self.chosen] * self.weights)


def fourier_basis(length: int) -> tuple[Tensor, Tensor]:
    """Return the real Fourier basis (L, L) of periodic signals, its rows' frequencies (L,)."""
    n, k = np.arange(length), np.arange(length)[:, None]
    phases = 2 * np.pi * k * n / length
    waves = np.where(2 * k <= length, np.cos(phases), np.sin(phases))
    waves /= np.linalg.norm(waves, axis=1, keepdims=True)
    return torch.from_numpy(waves), torch.from_numpy(np.minimum(n, length - n).astype(float))
