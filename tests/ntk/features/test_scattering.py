"""Scattering, against the wavelets' closed form and convolutions that are written out."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from fedntk.ntk import with_scattering_frequencies
from fedntk.ntk.features.scattering import (
    LogStandardise,
    Scattering,
    ScatteringFrequencies,
    fourier_basis,
    gaussian,
    morlet,
)

from ...conftest import refused

SIZE = (16, 20)
SCATTERING = Scattering((16, 24))
WIDTH = SCATTERING.num_channels * 4 * 6


def wave_in_space(std, slant, angle, frequency):
    """A Gaussian times a plane wave at each pixel: the formula, summed over the periods."""
    rows, columns = (np.arange(-4 * side, 5 * side) for side in SIZE)
    y, x = rows[:, None], columns[None]
    along = math.cos(angle) * y + math.sin(angle) * x
    across = math.cos(angle) * x - math.sin(angle) * y
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * std**2))
    wave = envelope * np.exp(1j * frequency * along) * slant / (2 * math.pi * std**2)
    return wave.reshape(9, SIZE[0], 9, SIZE[1]).sum((0, 2))


@pytest.mark.parametrize("angle", [0.0, 0.7, math.pi / 2])
def test_a_gaussian_is_that_of_the_formula_in_space(angle):
    # narrow in frequency, so that no alias is cut off
    actual = gaussian(SIZE, 2.4, angle=angle, frequency=0.6, slant=0.5)
    expected = np.fft.fft2(wave_in_space(2.4, 0.5, angle, 0.6))
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-9)


def test_wavelets_have_no_mean_and_the_low_pass_keeps_it():
    for scale in (0, 1):
        assert abs(float(morlet(SIZE, scale, 0.3, 8)[0, 0])) < 1e-12
    assert float(gaussian(SIZE, 1.6)[0, 0]) == pytest.approx(1.0, abs=1e-9)


def convolve(signal, kernel):
    """Circular convolution, as a sum over shifts."""
    actual = np.zeros(signal.shape, complex)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            actual += weight * np.roll(signal, (i, j), (0, 1))
    return actual


def scatter_slowly(image, scales, angles):
    """The cascade in space, float64: each convolution written out, pixels dropped after it."""
    step, (h, w) = 2**scales, image.shape
    size = [(-(-side // step) + 2) * step for side in (h, w)]
    margins = [(step, whole - side - step) for side, whole in zip((h, w), size, strict=True)]
    padded = np.pad(image, margins, mode="reflect")

    def kernel(spectrum, scale):  # a wider kernel's pixels, where only every 2^scale-th is there
        return np.fft.ifft2(spectrum.numpy())[:: 2**scale, :: 2**scale] * 4**scale

    def smooth(signal, scale):
        low = convolve(signal, kernel(gaussian(size, 0.8 * 2 ** (scales - 1)), scale)).real
        low = low[:: 2 ** (scales - scale), :: 2 ** (scales - scale)]
        return low[1 : 1 + h // step, 1 : 1 + w // step]

    def waves(signal, scale, at):
        for k in range(angles):
            spectrum = morlet(size, scale, math.pi * k / angles, angles)
            results = np.abs(convolve(signal, kernel(spectrum, at)))
            yield results[:: 2 ** (scale - at), :: 2 ** (scale - at)]

    results = [smooth(padded, 0)]
    for j in range(scales):
        first = list(waves(padded, j, 0))
        results += [smooth(wave, j) for wave in first]
        for coarser in range(j + 1, scales):
            results += [
                smooth(wave2, coarser) for wave in first for wave2 in waves(wave, coarser, j)
            ]
    return np.stack(results)


@pytest.mark.parametrize(("size", "scales", "angles"), [((8, 11), 2, 3), ((17, 16), 3, 2)])
def test_coefficients_are_those_of_the_cascade_in_space(size, scales, angles):
    generator = np.random.default_rng(0)
    images = generator.random((2, 2, *size))
    scattering = Scattering(size, scales=scales, angles=angles)
    actual = scattering(torch.from_numpy(images)).numpy()
    assert actual.shape[2] == scattering.num_channels
    for image, coefficients in zip(
        images.reshape(4, *size), actual.reshape(4, *actual.shape[2:]), strict=True
    ):
        expected = scatter_slowly(image, scales, angles)
        np.testing.assert_allclose(coefficients, expected, atol=2e-6 * np.abs(expected).max())


def test_coefficients_have_the_same_bits_whatever_images_are_beside_them():
    generator = torch.Generator().manual_seed(0)
    images, scattering = torch.rand(300, 1, 28, 28, generator=generator), Scattering((28, 28))
    expected = scattering(images)
    for sizes in ([300], [7, 150, 143], [1] * 20 + [33, 247]):
        order = torch.randperm(300, generator=generator)
        actual = torch.cat([scattering(images[batch]) for batch in order.split(sizes)])
        assert torch.equal(actual, expected[order])


def test_features_do_not_depend_on_other_images_or_on_units():
    coefficients = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    features = LogStandardise()(coefficients)
    torch.testing.assert_close(features[1:2], LogStandardise()(coefficients[1:2]))
    torch.testing.assert_close(features, LogStandardise()(7 * coefficients))
    torch.testing.assert_close(features.mean(1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.square().mean(1), torch.ones(3))
    assert not LogStandardise()(torch.zeros(2, 5)).any()


def test_too_small_images_are_refused():
    refused(r"at least 2\^\(J \+ 1\) pixels", Scattering, (28, 7))


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_the_fourier_basis_is_orthonormal_and_turning_keeps_each_frequency(length):
    """A shift of the signal changes no energy at a frequency; 1e-12 is of float64."""
    basis, frequencies = fourier_basis(length)
    torch.testing.assert_close(basis @ basis.T, torch.eye(length).double(), rtol=0, atol=1e-12)
    signal = torch.randn(length, generator=torch.Generator().manual_seed(0)).double()
    for frequency in range(length // 2 + 1):
        block = basis[frequencies == frequency]
        energies = [(block @ turned).square().sum() for turned in (signal, signal.roll(1))]
        torch.testing.assert_close(*energies)


@pytest.mark.parametrize(("scales", "angles", "channels"), [(2, 8, 1), (3, 4, 3), (1, 5, 1)])
def test_all_frequencies_without_weights_keep_inner_products(scales, angles, channels):
    """float32: 1e-5. The weights are v^-0.375, smallest for the mean."""
    module = Scattering((16, 24), scales=scales, angles=angles)
    size = channels * module.num_channels * math.prod(module.map_size)
    actual = ScatteringFrequencies(module, size, size)
    assert actual.weights[0] == actual.weights.min() == 1
    assert (actual.weights.diff() >= 0).all()
    actual.weights.fill_(1.0)
    h = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    z, h = actual(h), normalize(h)
    torch.testing.assert_close(z @ z.T, h @ h.T, rtol=0, atol=1e-5)


def test_a_constant_is_the_lowest_frequency_and_a_batch_changes_no_bits():
    actual = ScatteringFrequencies(SCATTERING, WIDTH, 40)
    constant = torch.zeros(1, *actual.shape[1:])
    constant[:, 0] = 3.0  # the smoothed image's
    torch.testing.assert_close(actual(constant.flatten(1)), torch.eye(40)[:1])
    h = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat([actual(row[None]) for row in h[:7]]), actual(h)[:7])


def test_a_network_with_scattering_gets_them_and_another_is_refused():
    network = nn.Sequential(SCATTERING, nn.Flatten(), nn.Linear(WIDTH, 3))
    wide = with_scattering_frequencies(network, 50, 0)
    assert sorted(wide.state_dict()) == ["2.1.bias", "2.1.weight"]
    assert wide(torch.rand(2, 1, 16, 24)).shape == (2, 3)
    refused("features of scattering", with_scattering_frequencies, network, WIDTH + 1, 0)
    refused("with Scattering", with_scattering_frequencies, nn.Linear(4, 2), 2, 0)
