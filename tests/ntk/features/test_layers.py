"""Layers of random features: the kernel, tables or formula that each one stands for."""

from functools import partial

import pytest
import torch
from torch import nn

from fedntk.ntk import (
    FeatureMap,
    Normaliser,
    with_fourier_features,
    with_overlap_codes,
    with_residual_features,
)
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.layers import BANDWIDTH, FourierFeatures, OverlapCodes, ResidualFeatures
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


def rows_of(h, codes):
    """Each table's row for examples h (n, d), by the definition: bit after bit."""
    chosen = []
    for example in h.tolist():
        bits = [
            float(x > t) for x, row in zip(example, codes.limits.tolist(), strict=True) for t in row
        ]
        mixed = [bits[k] for k in codes.order.tolist()]
        groups = [mixed[i : i + codes.group_size] for i in range(0, len(mixed), codes.group_size)]
        chosen.append([int(sum(bit * 2**i for i, bit in enumerate(group))) for group in groups])
    return chosen


CODES = [
    (2, 5),
    (3, 4),
    (1, 1),
]  # L and G, for 7 inputs: the last table of the first two is smaller


@pytest.mark.parametrize(("num_limits", "group_size"), CODES)
def test_the_closed_form_of_overlap_codes_is_a_sum_of_table_rows(num_limits, group_size):
    """Scores by the sums' solution equal those of a loop that looks up a row of each table."""
    h, codes = inputs(60, 7), OverlapCodes(7, num_limits, group_size, 1)
    bits = 7 * num_limits
    sizes = [2 ** min(group_size, bits - i) for i in range(0, bits, group_size)]
    assert codes.num_features == sum(sizes)
    sums = FeatureStatistics.of([codes(h)], torch.arange(60) % 3, 3)
    linear = NormalEquations.of(sums, Normaliser.identity(sum(sizes)), centred=False).solve(0.01)
    tables = linear.split(sizes)
    expected = torch.stack(
        [sum(t[i] for t, i in zip(tables, rows, strict=True)) for rows in rows_of(h, codes)]
    )
    torch.testing.assert_close(codes(h).double() @ linear, expected, rtol=1e-12, atol=1e-12)


def test_near_values_share_most_bits_and_limits_follow_mean_and_deviation():
    """Two values differ in as many bits as limits lie between them; 3 limits are quartiles."""
    codes = OverlapCodes(1, 3, 1, 0)
    quartile = 0.6744897501960817
    torch.testing.assert_close(codes.limits, torch.tensor([[-quartile, 0, quartile]]))
    z = codes(torch.tensor([[-2.0], [-0.1], [0.1], [2.0]]))
    away = (z[:, None] != z).sum(2) // 2  # each other bit is another row
    assert away.tolist() == [[0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1], [3, 2, 1, 0]]
    h = 5 + 2 * inputs(20, 1)
    fitted = OverlapCodes(1, 3, 1, 0)
    fitted.limits.copy_(codes.limits_at(torch.tensor([5.0]), torch.tensor([2.0])))
    assert torch.equal(fitted(h), codes((h - 5) / 2))


def test_features_are_0_and_1_and_an_input_that_is_not_finite_makes_them_nan():
    codes = OverlapCodes(10, 2, 5, 1)
    z = codes(inputs(300, 10))
    assert z.unique().tolist() == [0, 1]
    assert torch.equal(z.sum(1), torch.full((300,), 4.0))
    assert not torch.equal(z, OverlapCodes(10, 2, 5, 2)(inputs(300, 10)))
    bad = inputs(3, 10)
    bad[1, 4], bad[2, 0], bad[0, 3] = torch.nan, torch.inf, 3e38
    finite = torch.isfinite(codes(bad)).all(1)
    assert finite.tolist() == [True, False, False]


@pytest.mark.parametrize("options", [{"num_limits": 0}, {"group_size": 0}, {"group_size": 13}])
def test_codes_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="overlap codes: expected at least 1 limit"):
        OverlapCodes(**{"size": 5, "num_limits": 1, "group_size": 5, "seed": 0, **options})
    twice = nn.Sequential(OverlapCodes(2, 1, 1, 0), OverlapCodes(4, 1, 1, 0))
    with pytest.raises(ValueError, match="expected one OverlapCodes at most, got 2"):
        OverlapCodes.find(twice)


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


@pytest.mark.parametrize("module", [FourierFeatures(50, 70, 1), OverlapCodes(50, 2, 5, 1)])
def test_bits_of_an_example_do_not_depend_on_those_beside_it(module):
    """So whole numbers that come of them add up to the same bits for every split."""
    h = inputs(300, 50)
    for size in (1, 7, 128, 299):
        assert torch.equal(torch.cat([module(part) for part in h.split(size)]), module(h))


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        (partial(with_fourier_features, num_features=24), FourierFeatures(8, 24, 7)),
        (partial(with_overlap_codes, num_limits=2, group_size=3), OverlapCodes(8, 2, 3, 7)),
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
    assert len(arrays) == 4 + isinstance(layer, OverlapCodes)


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
