"""Bucket features: a linear model of them is a sum of rows of tables."""

import pytest
import torch
from torch import nn

from fedntk.ntk import FeatureMap, Normaliser, with_bucket_features
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.buckets import BucketFeatures
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics


def inputs(n: int, size: int) -> torch.Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("buckets", "group", "num_features"), [(2, 2, 40), (3, 2, 54), (4, 1, 12)])
def test_the_closed_form_is_a_sum_of_table_rows(buckets, group, num_features):
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


def test_bits_of_an_example_do_not_depend_on_those_beside_it():
    h, module = inputs(300, 50), BucketFeatures(50, 400, 1)
    for size in (1, 7, 128, 299):
        assert torch.equal(torch.cat([module(part) for part in h.split(size)]), module(h))


def test_a_network_whose_last_layer_takes_them():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = inputs(5, 4)
    changed = with_bucket_features(network, 24, 7, buckets=2, group=3)
    actual = FeatureMap("last-layer").extractor(changed)(x)
    assert torch.equal(actual, BucketFeatures(8, 24, 7, 2, 3)(network[:2](x)))
    assert changed(x).shape == (5, 3)


@pytest.mark.parametrize("options", [{"num_features": 30}, {"buckets": 1}, {"group": 0}])
def test_tables_that_do_not_fit_are_refused(options):
    with pytest.raises(ValueError, match="expected a multiple of"):
        BucketFeatures(**{"size": 5, "num_features": 32, "seed": 0, **options})
