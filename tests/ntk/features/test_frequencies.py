"""Low frequencies of scattering coefficients: an orthonormal basis and a choice, without data."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from fedntk.ntk import with_scattering_frequencies
from fedntk.ntk.features.frequencies import ScatteringFrequencies, fourier_basis
from fedntk.ntk.features.scattering import Scattering

from ...conftest import refused


def scattering(scales=2, angles=8):
    return Scattering((16, 24), scales=scales, angles=angles)


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
    module = scattering()
    size = module.num_channels * math.prod(module.map_size)
    actual = ScatteringFrequencies(module, size, 40)
    constant = torch.zeros(1, *actual.shape[1:])
    constant[:, 0] = 3.0  # the smoothed image's
    torch.testing.assert_close(actual(constant.flatten(1)), torch.eye(40)[:1])
    h = torch.randn(200, size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat([actual(row[None]) for row in h[:7]]), actual(h)[:7])


def test_a_network_with_scattering_gets_them_and_another_is_refused():
    module = scattering()
    size = module.num_channels * math.prod(module.map_size)
    network = nn.Sequential(module, nn.Flatten(), nn.Linear(size, 3))
    wide = with_scattering_frequencies(network, 50, 0)
    assert sorted(wide.state_dict()) == ["2.1.bias", "2.1.weight"]
    assert wide(torch.rand(2, 1, 16, 24)).shape == (2, 3)
    refused("features of scattering", with_scattering_frequencies, network, size + 1, 0)
    refused("with Scattering", with_scattering_frequencies, nn.Linear(4, 2), 2, 0)
