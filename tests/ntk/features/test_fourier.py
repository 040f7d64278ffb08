"""Random Fourier features against the kernel that they estimate."""

import pytest
import torch
from torch import nn

from fedntk.ntk import FeatureMap, with_fourier_features
from fedntk.ntk.features.fourier import BANDWIDTH, FourierFeatures


def kernel(h: torch.Tensor, bandwidth: float) -> torch.Tensor:
    """Of inputs scaled to length 1, float64."""
    unit = h.double() / h.double().norm(dim=1, keepdim=True)
    return torch.exp(-(torch.cdist(unit, unit) ** 2) / (2 * bandwidth**2))


@pytest.mark.parametrize("bandwidth", [BANDWIDTH, 1.6])
def test_inner_products_estimate_the_gaussian_kernel(bandwidth):
    """Each of p products lies within 2 of 0: standard deviations are under 2 / sqrt(p)."""
    p = 20_000
    h = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    h = torch.cat([h, h + 0.1, 5 * h])  # near ones; and others of another length
    z = FourierFeatures(3, p, 1, bandwidth)(h).double()
    assert float((z @ z.T - kernel(h, bandwidth)).abs().max()) < 5 * 2 / p**0.5
    torch.testing.assert_close(z[:6], z[12:], rtol=0, atol=1e-5)


def test_a_network_whose_last_layer_takes_them():
    """Its last layer's inputs are the features; names, drawn numbers and the rest as before."""
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    first, again = (with_fourier_features(network, 30, 7) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    actual = FeatureMap("last-layer").extractor(first)(x)
    assert torch.equal(actual, FeatureMap("fourier", 30, 7).extractor(network)(x))
    inputs = FeatureMap("last-layer").extractor(network)(x)
    assert torch.equal(actual, FourierFeatures(8, 30, 7)(inputs))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    last = first.state_dict()["2.1.weight"]
    torch.testing.assert_close(first(x), actual @ last.T + first.state_dict()["2.1.bias"])
    assert torch.equal(first.state_dict()["0.weight"], network.state_dict()["0.weight"])
    assert len(network.state_dict()) == len(first.state_dict()) == 4


def test_a_network_that_is_one_layer_can_take_them():
    network = with_fourier_features(nn.Linear(4, 3, bias=False), 30, 7)
    assert list(network.state_dict()) == ["1.weight"]
    assert network(torch.ones(2, 4)).shape == (2, 3)


def test_bits_of_an_example_do_not_depend_on_those_beside_it():
    """So whole numbers that come of them add up to the same bits for every split."""
    h = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    module = FourierFeatures(50, 70, 1)
    for size in (1, 7, 128, 299):
        assert torch.equal(torch.cat([module(part) for part in h.split(size)]), module(h))
