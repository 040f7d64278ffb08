"""Layers of random features: the kernel, tables or formula that each one stands for."""

from functools import partial

import pytest
import torch
from torch import nn

from fedntk.ntk import (
    FeatureMap,
    Normaliser,
    with_bucket_features,
    with_fourier_features,
    with_residual_features,
)
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.layers import BANDWIDTH, BucketFeatures, FourierFeatures, ResidualFeatures
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics

NETWORK = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bandwidth", [BANDWIDTH, 1.6])
def test_inner_products_estimate_the_gaussian_kernel(bandwidth):
    """Each of p products lies within 2 of 0: standard deviations are under 2 / sqrt(p)."""
    p, h = 20_000, inputs(6, 3)
    h = torch.cat([h, h + 0.1, 5 * h])  # near ones; and others of another length
    z = FourierFeatures(3, p, 1, bandwidth)(h).double()
    unit = h.double() / h.double().norm(dim=1, keepdim=True)
    kernel = torch.exp(-(torch.cdist(unit, unit) ** 2) / (2 * bandwidth**2))
    assert float((z @ z.T - kernel).abs().max()) < 5 * 2 / p**0.5
    torch.testing.assert_close(z[:6], z[12:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("buckets", "group", "num_features"), [(2, 2, 40), (3, 2, 54), (4, 1, 12)])
def test_the_closed_form_of_buckets_is_a_sum_of_table_rows(buckets, group, num_features):
    """Scores by the sums' solution equal those of a loop that looks up a row for each group."""
    h, rows = inputs(60, 7), buckets**group
    module = BucketFeatures(7, num_features, 1, buckets, group)
    sums = FeatureStatistics.of([module(h)], torch.arange(60) % 3, 3)
    identity = Normaliser.identity(num_features)
    linear = NormalEquations.of(sums, identity, centred=False).solve(0.01)
    num_groups = num_features // rows
    tables = linear.view(num_groups, rows, 3) / num_groups**0.5
    for example, scores in zip(h, module(h).double() @ linear, strict=True):
        scaled = (example - example.mean()) / example.std(correction=0)
        actual = torch.zeros(3, dtype=torch.float64)
        for i in range(num_groups):
            row = 0
            for k in reversed(range(group)):
                place = module.chosen[i * group + k], module.limits[i * group + k]
                row = row * buckets + int((scaled[place[0]] > place[1]).sum())
            actual += tables[i, row]
        torch.testing.assert_close(actual, scores, rtol=0, atol=1e-6)  # float32's 1 / sqrt(G)


def test_each_row_has_norm_1_and_each_input_as_many_groups():
    module = BucketFeatures(10, 4 * 25, 1)
    z = module(inputs(300, 10))
    torch.testing.assert_close(z.norm(dim=1), torch.ones(300))
    assert z.unique().tolist() == pytest.approx([0, 0.2])
    assert module.chosen.bincount().tolist() == [5] * 10
    assert torch.equal(z, BucketFeatures(10, 4 * 25, 1)(3 * inputs(300, 10) + 1))
    assert not torch.equal(z, BucketFeatures(10, 4 * 25, 2)(inputs(300, 10)))


@pytest.mark.parametrize("options", [{"num_features": 30}, {"buckets": 1}, {"group": 0}])
def test_tables_that_do_not_fit_are_refused(options):
    with pytest.raises(ValueError, match="expected a multiple of"):
        BucketFeatures(**{"size": 5, "num_features": 32, "seed": 0, **options})


def test_two_residual_blocks_are_the_formula_in_float64():
    """Float32's rounding in products of 6 and 7 numbers: 1e-5."""
    blocks = ResidualFeatures(6, 2, 7, 3)
    for omega in blocks.omegas:
        omega.data = inputs(7, 6)
    phi = inputs(5, 6).double()
    actual = blocks(phi).detach()
    for b, omega in zip(blocks.directions.double(), blocks.omegas, strict=True):
        a = phi / phi.norm(dim=1, keepdim=True) @ b
        phi = phi + a * (1 + torch.erf(a / 2**0.5)) / 2 @ omega.detach().double()
    torch.testing.assert_close(actual.double(), phi, rtol=1e-5, atol=1e-5)
    beside = blocks.beside(actual, 1)
    assert torch.equal(beside[:, :6], actual)
    assert torch.equal(beside[:, 6:], blocks.hidden(actual, 1))


@pytest.mark.parametrize("module", [FourierFeatures(50, 70, 1), BucketFeatures(50, 400, 1)])
def test_bits_of_an_example_do_not_depend_on_those_beside_it(module):
    """So whole numbers that come of them add up to the same bits for every split."""
    h = inputs(300, 50)
    for size in (1, 7, 128, 299):
        assert torch.equal(torch.cat([module(part) for part in h.split(size)]), module(h))


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        (partial(with_fourier_features, num_features=24), FourierFeatures(8, 24, 7)),
        (
            partial(with_bucket_features, num_features=24, buckets=2, group=3),
            BucketFeatures(8, 24, 7, 2, 3),
        ),
    ],
)
def test_a_network_whose_last_layer_takes_them(change, layer):
    """Its last layer's inputs are the features; names, drawn numbers and the rest as before."""
    x, state = inputs(5, 4), torch.random.get_rng_state()
    first, again = (change(NETWORK, seed=7) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    actual = FeatureMap("last-layer").extractor(first)(x)
    assert torch.equal(actual, layer(FeatureMap("last-layer").extractor(NETWORK)(x)))
    if isinstance(layer, FourierFeatures):
        assert torch.equal(actual, FeatureMap("fourier", 24, 7).extractor(NETWORK)(x))
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    arrays = first.state_dict()
    torch.testing.assert_close(first(x), actual @ arrays["2.1.weight"].T + arrays["2.1.bias"])
    assert torch.equal(arrays["0.weight"], NETWORK.state_dict()["0.weight"])
    assert len(NETWORK.state_dict()) == len(arrays) == 4


def test_a_network_with_new_residual_blocks_gives_the_same_bits():
    x = inputs(5, 4)
    first, again, other = (with_residual_features(NETWORK, 2, 9, seed) for seed in (0, 0, 1))
    assert torch.equal(first(x), NETWORK(x))
    assert torch.equal(first[2][0].directions, again[2][0].directions)
    assert not torch.equal(first[2][0].directions, other[2][0].directions)


def test_a_network_that_is_one_layer_can_take_them():
    one = nn.Linear(4, 3, bias=False)
    network = with_fourier_features(one, 30, 7)
    assert list(network.state_dict()) == ["1.weight"]
    assert network(torch.ones(2, 4)).shape == (2, 3)
    assert list(with_residual_features(one, 1, 5, 0).state_dict()) == ["0.omegas.0", "1.weight"]
