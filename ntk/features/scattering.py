"""Scattering: features of images that need no training and no data.

Source: Bruna and Mallat, *Invariant Scattering Convolution Networks*, IEEE TPAMI 2013. With Morlet
wavelets psi of J scales and L angles, and a Gaussian low-pass phi, an image x (h, w) gives

    S x = (x * phi,  |x * psi_1| * phi,  ||x * psi_1| * psi_2| * phi),

the last for each psi_2 of a coarser scale than psi_1's, at every 2^J-th pixel of rows and columns:
1 + J L + L^2 J (J - 1) / 2 channels. At scale j the wavelets' envelope has a standard deviation of
0.8 * 2^j pixels, 4 / L as much along the angle, and the frequency is 3 pi / 2^(j + 2).
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from ..support.precision import full_float32
from .layers import in_equal_parts
from .projection import cosines

PLANES_AT_ONCE = 16  # images times their channels, on a CPU
ALIASES = 2  # periods of the frequencies on either side, beyond which a Gaussian vanishes
ANGLES, POSITIONS, EQUALISE = 4.0, 2.0, 0.375  # exponents, chosen on training images of MNIST


class Scattering(nn.Module):
    """Images (n, channels, h, w) -> scattering coefficients (n, channels, K, h / 2^J, w / 2^J).

    There are J `scales` and L `angles`; `size` is height and width, at least 2^(J + 1). Borders are
    reflected. Convolutions are products of Fourier transforms, at the resolution of each scale:
    products of matrices have other bits beside other images. Nothing is trained or in the state
    dict.
    """

    wavelets: Tensor  # Fourier transforms, float32 (J, L, rows, columns)
    low_pass: Tensor  # (rows, columns)

    def __init__(self, size: Sequence[int], *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        if scales < 1 or angles < 1 or min(size) < 2 ** (scales + 1):
            raise ValueError(
                f"scattering: expected scales J and angles L of at least 1, and images of at least "
                f"2^(J + 1) pixels a side, got J = {scales}, L = {angles} and {tuple(size)}"
            )
        self.scales, self.angles, self.step = scales, angles, 2**scales
        self.map_size = [side // self.step for side in size]
        padded = [(-(-side // self.step) + 2) * self.step for side in size]
        rows, columns = (whole - side - self.step for whole, side in zip(padded, size, strict=True))
        self._margins = (self.step, columns, self.step, rows)
        wavelets = [
            torch.stack([morlet(padded, j, math.pi * k / angles, angles) for k in range(angles)])
            for j in range(scales)
        ]
        low_pass = gaussian(padded, 0.8 * 2 ** (scales - 1))
        self.register_buffer("wavelets", torch.stack(wavelets).float(), persistent=False)
        self.register_buffer("low_pass", low_pass.float(), persistent=False)

    @property
    def num_channels(self) -> int:
        """Coefficients K of each position, for each of the image's channels."""
        paths, angles = self.scales * (self.scales - 1) // 2, self.angles
        return 1 + self.scales * angles + paths * angles**2

    def forward(self, x: Tensor) -> Tensor:
        """Return the image's coefficients, then each finer scale's, with its coarser ones."""
        at_once = PLANES_AT_ONCE // x.shape[1] if x.device.type == "cpu" else len(x)
        kernels = self._kernels()
        parts = x.split(max(1, at_once))  # so that what is computed stays in caches
        return torch.cat([self._coefficients(part, kernels) for part in parts])

    def _kernels(self) -> dict[tuple[int, int], Tensor]:
        """Map (scale, at) to factors of every 2^at-th pixel's spectrum; of scale J the low-pass."""
        return {
            (scale, at): _to_multiply(periodise(kernel.float(), at) * 4**at, scale - at)
            for scale, kernel in enumerate([*self.wavelets, self.low_pass])
            for at in range(max(1, scale))
        }

    def _coefficients(self, x: Tensor, kernels: Mapping[tuple[int, int], Tensor]) -> Tensor:
        spectrum = torch.fft.fft2(pad(x.float(), self._margins, mode="reflect")).unsqueeze(2)
        smooth = [kernels[self.scales, at] for at in range(self.scales)]
        coefficients = [self._smooth(spectrum, smooth[0]).real]
        for j in range(self.scales):
            first = _modulus(_convolve(spectrum, kernels[j, 0]))
            if j + 1 == self.scales:
                coefficients.append(self._smooth_pairs(first, smooth[j]))
                break
            spectra = torch.fft.fft2(first)
            coefficients.append(self._smooth(spectra, smooth[j]).real)
            for coarser in range(j + 1, self.scales):
                second = _modulus(_convolve(spectra.unsqueeze(3), kernels[coarser, j]))
                coefficients.append(self._smooth_pairs(second.flatten(2, 3), smooth[coarser]))
        return torch.cat(coefficients, 2)

    def _smooth_pairs(self, signals: Tensor, low_pass: Tensor) -> Tensor:
        """Smooth signals (n, channels, m, h, w), two at once as the parts of a complex one."""
        half = -(-signals.shape[2] // 2)
        pairs = torch.complex(signals[:, :, :half], signals[:, :, -half:])
        smooth = self._smooth(torch.fft.fft2(pairs), low_pass)
        return torch.cat([smooth.real[:, :, : signals.shape[2] - half], smooth.imag], 2)

    def _smooth(self, spectra: Tensor, low_pass: Tensor) -> Tensor:
        rows, columns = self.map_size
        return _convolve(spectra, low_pass)[..., 1 : 1 + rows, 1 : 1 + columns]


def _to_multiply(spectrum: Tensor, scale: int) -> Tensor:
    """Return a real spectrum's folds (4^scale, ...), each number twice: for both of a complex."""
    return torch.stack(_folds(spectrum / 4**scale, 2**scale)).repeat_interleave(2, -1)


def _convolve(spectra: Tensor, kernels: Tensor) -> Tensor:
    """Return convolutions (complex), at every 2^scale-th pixel, from the transforms."""
    folds = _folds(spectra, math.isqrt(len(kernels)))
    parts = [torch.view_as_real(part.contiguous()).flatten(-2) for part in folds]
    products = parts[0] * kernels[0]
    for part, kernel in zip(parts[1:], kernels[1:], strict=True):
        products.addcmul_(part, kernel)
    convolved: Tensor = torch.fft.ifft2(torch.view_as_complex(products.unflatten(-1, (-1, 2))))
    return convolved


def _modulus(signals: Tensor) -> Tensor:
    """Return absolute values, in a quarter of the time of ``abs`` on a CPU; writes over them."""
    squares = torch.view_as_real(signals).square_()
    return (squares[..., 0] + squares[..., 1]).sqrt_()


def periodise(spectrum: Tensor, scale: int) -> Tensor:
    """Return the transform of a signal (..., h, w) from which every 2^scale-th pixel is kept."""
    folded: Tensor = functools.reduce(operator.add, _folds(spectrum, 2**scale)) / 4**scale
    return folded


def _folds(spectrum: Tensor, step: int) -> list[Tensor]:
    """Return the parts of a spectrum (..., h, w) that are one if only every step-th pixel stays."""
    return [part for rows in spectrum.chunk(step, -2) for part in rows.chunk(step, -1)]


def gaussian(
    size: Sequence[int],
    std: float,
    *,
    angle: float = 0.0,
    frequency: float = 0.0,
    slant: float = 1.0,
) -> Tensor:
    """Return the transform, real float64 (h, w), of a periodic Gaussian of sum 1 times a wave.

    Standard deviations are `std` pixels along the angle and `std` / `slant` across it; the wave's
    `frequency` is in radians a pixel.
    """
    periods = 2 * math.pi * torch.arange(-ALIASES, ALIASES + 1)
    rows, columns = (
        (2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64)) + periods[:, None]
        for side in size
    )
    y, x = rows[:, None, :, None], columns[None, :, None, :]
    along = math.cos(angle) * y + math.sin(angle) * x - frequency
    across = math.cos(angle) * x - math.sin(angle) * y
    return torch.exp(-0.5 * std**2 * (along**2 + (across / slant) ** 2)).sum((0, 1))


def morlet(size: Sequence[int], scale: int, angle: float, angles: int) -> Tensor:
    """Return the Fourier transform, real (h, w), of a Morlet wavelet, which is 0 at frequency 0."""
    std, slant = 0.8 * 2**scale, 4 / angles
    frequency = 0.75 * math.pi / 2**scale
    wave = gaussian(size, std, angle=angle, frequency=frequency, slant=slant)
    envelope = gaussian(size, std, angle=angle, slant=slant)
    return wave - wave[0, 0] / envelope[0, 0] * envelope


class LogStandardise(nn.Module):
    """Coefficients (n, ...) -> features (n, p): logarithms of mean 0 and variance 1 in an example.

    The logarithm of c is sign(c) log(1 + |c| / m), with m the mean of all |c| of the example: the
    units of its values do not matter, and nothing comes from other examples.
    """

    def forward(self, coefficients: Tensor) -> Tensor:
        """Return the features."""
        flat = coefficients.flatten(1)
        logs = flat.abs()
        mean = logs.mean(1, keepdim=True).clamp(min=1e-30)  # of an example that is 0
        logs = logs.div_(mean).log1p_().copysign_(flat)
        logs -= logs.mean(1, keepdim=True)
        return logs.div_(logs.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6))


class ScatteringFrequencies(nn.Module):
    """Low frequencies of scattering coefficients (n, channels K h w) -> (n, p), float32, of norm 1.

    A cosine transform over rows and columns, and a Fourier transform over each angle, gather the
    coefficients' variance in few numbers, as the DCT does for images (Ahmed, Natarajan and Rao,
    IEEE Transactions on Computers C-23, 1974). On MNIST it falls about like
    v = (1 + a)^-4 (1 + b)^-2, with the norms a and b of frequencies over angles and positions. The
    p numbers of largest v are kept, times v^-0.375: with noise in their sums, a model learns more
    from features of more equal variance. Nothing is trained, drawn or in the state dict.

    `scattering` makes the coefficients, which may have gone through a function of each; `size` is
    channels K h w, and p = `num_features` at most that.
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
