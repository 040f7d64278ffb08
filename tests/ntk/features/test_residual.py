"""Residual blocks of random features: the formula, and a network that is as before until solved."""

import torch
from torch import nn

from fedntk.ntk import with_residual_features
from fedntk.ntk.features.residual import ResidualFeatures


def test_two_blocks_are_the_formula_in_float64():
    """Float32's rounding in products of 6 and 7 numbers: 1e-5."""
    generator = torch.Generator().manual_seed(0)
    blocks = ResidualFeatures(6, 2, 7, 3)
    for omega in blocks.omegas:
        omega.data = torch.randn(7, 6, generator=generator)
    phi = torch.randn(5, 6, generator=generator).double()
    actual = blocks(phi).detach()
    for b, omega in zip(blocks.directions.double(), blocks.omegas, strict=True):
        a = phi / phi.norm(dim=1, keepdim=True) @ b
        phi = phi + a * (1 + torch.erf(a / 2**0.5)) / 2 @ omega.detach().double()
    torch.testing.assert_close(actual.double(), phi, rtol=1e-5, atol=1e-5)
    beside = blocks.beside(actual, 1)
    assert torch.equal(beside[:, :6], actual)
    assert torch.equal(beside[:, 6:], blocks.hidden(actual, 1))


def test_a_network_with_new_blocks_gives_the_same_bits():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    first, again, other = (with_residual_features(network, 2, 9, seed) for seed in (0, 0, 1))
    assert torch.equal(first(x), network(x))
    assert torch.equal(first[2][0].directions, again[2][0].directions)
    assert not torch.equal(first[2][0].directions, other[2][0].directions)
    assert list(with_residual_features(nn.Linear(4, 3, bias=False), 1, 5, 0).state_dict()) == [
        "0.omegas.0",
        "1.weight",
    ]
