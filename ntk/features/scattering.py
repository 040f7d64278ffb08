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

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

PLANES_AT_ONCE = 16  # images times their channels, on a CPU
ALIASES = 2  # periods of the frequencies on either side, beyond which a Gaussian vanishes


class Scattering(nn.Module):
    """Images (n, channels, h, w) -> scattering coefficients (n, channels, K, h / 2^J, w / 2^J).

    Borders are reflected. Convolutions are products of Fourier transforms, computed at the
    resolution of each scale: products of matrices, though the low-pass is separable, have other
    bits beside other images. Nothing is trained or in the state dict.

    Parameters
    ----------
    size : (int, int)
        Height and width, at least 2^(J + 1).
    scales : int
        J.
    angles : int
        L.

    Examples
    --------
    >>> Scattering((28, 28))(torch.rand(5, 3, 28, 28)).shape
    torch.Size([5, 3, 81, 7, 7])
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
        """Return the coefficients of images (n, channels, h, w).

        First the image's, then each finer scale's, those of its coarser second scales after them.
        """
        at_once = PLANES_AT_ONCE // x.shape[1] if x.device.type == "cpu" else len(x)
        kernels = self._kernels()
        parts = x.split(max(1, at_once))  # so that what is computed stays in caches
        return torch.cat([self._coefficients(part, kernels) for part in parts])

    def _kernels(self) -> dict[tuple[int, int], Tensor]:
        """Return, for (scale, at), what a spectrum of every 2^at-th pixel is multiplied by.

        By wavelets of that scale; by the low-pass, if it is J.
        """
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
        """Smooth, and keep every 2^J-th pixel of the image, without margins."""
        rows, columns = self.map_size
        return _convolve(spectra, low_pass)[..., 1 : 1 + rows, 1 : 1 + columns]


def _to_multiply(spectrum: Tensor, scale: int) -> Tensor:
    """Return the folds (4^scale, ...) of a real spectrum, for :func:`_convolve`.

    Each number stands there twice, for the real and the imaginary part of another's.
    """
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
    """Return the Fourier transform, real (h, w), of a periodic Gaussian times a plane wave.

    Float64, with a sum over the Gaussian of 1. Standard deviations are `std` pixels along the angle
    and `std` / `slant` across it, and the wave's frequency is in radians a pixel.
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
