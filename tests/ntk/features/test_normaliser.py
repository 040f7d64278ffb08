"""Moments in any grouping against the pooled data, and what normalising by them does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedntk.ntk import BadReply, Moments, Normaliser

from ..arithmetic import normal


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=8).map(sorted),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**16),
)
def test_joined_moments_are_those_of_the_pooled_data(cuts, order, seed):
    """Order and grouping move them by 1e-12, where means are of the size of the spread.

    For means of 1e6 deviations, means are right to 1e-16 of 1e6, so to 1e-10 of the spread, and
    squares to about twice that. Sums of squares less squares of sums would lose twelve digits.
    """
    z = normal(40, 6, seed=seed) * torch.tensor([1, 1e-8, 1e8, 3, 0, 1])
    z += torch.tensor([0, 0, 0, 2, 7, 1e6])
    groups = [part for part in torch.tensor_split(z, cuts) if len(part)]
    parts = [Moments.join(Moments.of(chunk) for chunk in part.split(4)) for part in groups]
    order.shuffle(parts)
    moments = Moments.join(parts)
    assert moments.count == 40
    assert moments.size == pytest.approx(float(z.square().sum(1).mean().sqrt()))
    mean, sum_sq_dev = z.numpy().mean(0), 40 * z.numpy().var(0)
    np.testing.assert_allclose(moments.mean[-1], mean[-1], rtol=1e-15)
    np.testing.assert_allclose(moments.sum_sq_dev[-1], sum_sq_dev[-1], rtol=5e-9)
    bound = 1e-12 * (z.numpy().std(0) + np.abs(mean))
    assert (np.abs(moments.mean - mean) <= bound)[:-1].all()
    assert (np.abs(moments.sum_sq_dev - sum_sq_dev) <= 1e-12 * sum_sq_dev + 1e-27)[:-1].all()


def clients():
    """float32 features of three clients that differ: heavy tails, scales from 1e-7 to 1e4."""
    scales, shift = torch.logspace(-7, 4, 12, dtype=torch.float64), normal(12, seed=0)
    parts = [normal(n, 12, seed=n) ** 3 + k * shift for k, n in enumerate((7, 30, 120))]
    return [(part * scales).float() for part in parts]


def test_normalised_features_have_mean_0_and_variance_1_over_all_clients():
    """In float32: a mean within 1e-6, a variance within 1e-5; no client's own mean is 0."""
    groups, before = clients(), clients()
    normalise = Normaliser.of(Moments.join(Moments.of(z) for z in groups))
    parts = [normalise(z) for z in groups]
    assert all(map(torch.equal, groups, before))
    assert {part.dtype for part in parts} == {torch.float32}
    pooled = torch.cat(parts).double()
    variance = pooled.var(0, correction=0)
    torch.testing.assert_close(pooled.mean(0), torch.zeros_like(variance), rtol=0, atol=1e-6)
    torch.testing.assert_close(variance, torch.ones_like(variance), rtol=0, atol=1e-5)
    assert all(float(part.mean(0).abs().min()) > 1e-4 for part in parts)
    assert torch.equal(Normaliser.identity(12)(before[0]), before[0])


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e-30, 3e38])
def test_a_constant_feature_has_scale_0_whatever_it_is_later(value):
    """In groups of other sizes their mean may differ in its last bit: that is no variance."""
    z = torch.full((21, 2), value)
    z[:, 1] = torch.arange(21)
    normaliser = Normaliser.of(Moments.join(Moments.of(part) for part in z.split([1, 3, 17])))
    assert normaliser.inv_std[0] == 0
    assert normaliser.inv_std[1] == pytest.approx(1 / np.arange(21).std(), rel=1e-6)
    later = normaliser(torch.tensor([[5.0, 10.0]]))
    assert later.tolist() == [[0.0, 0.0]]


def test_small_features_are_not_constant():
    """A spread of 1e-20 around 0 is normalised; one of 1e-8 around 1 is float32's rounding."""
    z = torch.tensor([[1e-20, 1.0], [-1e-20, 1 + 2e-8]], dtype=torch.float64)
    normaliser = Normaliser.of(Moments.of(z))
    assert normaliser.inv_std.tolist() == [pytest.approx(1e20), 0.0]
    assert normaliser.inv_std.dtype == normaliser.mean.dtype == np.float32


def at_5(value):
    return lambda a: np.where(np.arange(12) == 5, value, a)


@pytest.mark.parametrize("name", ["mean", "sum-sq-dev"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda a: a[:-1], "shape"),
        (lambda a: a.astype(np.float32), "dtype"),
        (lambda a: a.astype(">f8"), "dtype"),
        (at_5(np.nan), "non-finite"),
        (at_5(np.inf), "non-finite"),
        (at_5(1e300), "range"),
        (at_5(-1e300), "range"),
    ],
)
def test_damaged_moments_are_refused_with_the_reason(name, damage, reason):
    arrays = Moments.of(clients()[1]).to_arrays()
    with pytest.raises(BadReply, match=f"^{reason}: "):
        Moments.from_arrays(arrays | {name: damage(arrays[name])}, 30, 12)


def test_other_damage_is_refused_and_the_limits_are_taken():
    """The largest float32 is 3.4e38: a mean of it, and n times its square, could be features'."""
    sent = Moments.of(clients()[1]).to_arrays()
    back = Moments.from_arrays(sent, 30, 12)
    assert back.count == 30
    assert back.mean is sent["mean"]
    assert back.sum_sq_dev is sent["sum-sq-dev"]
    for arrays in ({}, {"mean": sent["mean"]}, sent | {"more": sent["mean"]}):
        with pytest.raises(BadReply, match=r"^arrays: expected mean, sum-sq-dev, got"):
            Moments.from_arrays(arrays, 30, 12)
    largest = np.full(12, np.finfo(np.float32).max, np.float64)
    moments = Moments.from_arrays({"mean": -largest, "sum-sq-dev": 30 * largest**2}, 30, 12)
    normaliser = Normaliser.of(Moments.join([moments, moments]))
    assert np.isfinite(normaliser.mean).all()
    assert (normaliser.inv_std > 0).all()
    for more in (
        {"mean": 1.01 * largest},
        {"sum-sq-dev": 31 * largest**2},
        {"sum-sq-dev": at_5(-1e-9)(sent["sum-sq-dev"])},
    ):
        with pytest.raises(BadReply, match=r"(mean|sum_sq_dev): expected .* \.\.\. "):
            Moments.from_arrays(sent | more, 30, 12)
