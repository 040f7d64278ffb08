"""Noise in sums: its sensitivity by brute force, its epsilon against exact privacy profiles."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from opacus.accountants.analysis import gdp, rdp
from scipy.special import ive, logsumexp
from scipy.stats import chi2

from fedntk.ntk.convex.private_sums import (
    LARGEST_MEAN,
    MOST_DRAWS,
    ORDERS,
    SumNoise,
    bound_rows,
    solve_noisy,
)
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, packed_diagonal

from ...conftest import refused

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus' imports
DELTA, PART = 1e-5, 0.6


def noise_of(radius, width, num_classes=2, multiplier=1.0, **options):
    options |= {"width": width, "num_classes": num_classes, "noise_multiplier": multiplier}
    return SumNoise(radius=radius, **options)


def sums(rows, num_classes=2):
    rows, labels = torch.Tensor(np.array(rows)), torch.zeros(len(rows), dtype=torch.int64)
    fixed = FixedPoint(np.ones(rows.shape[1], np.float32), 8)
    return FeatureStatistics.of([rows], labels, num_classes, fixed_point=fixed)


def numbers(total):
    return np.concatenate([total.gram, total.class_sums.ravel()])


def variance_of_each(noise, survivors=None):
    (v, s), p, classes = noise.variances(survivors), noise.width, noise.num_classes
    gram = [v if i == j else v / 2 for i in range(p) for j in range(i, p)]
    return np.array([*gram, *[s] * classes * p])


@pytest.mark.parametrize(("width", "radius"), [(1000, 60), (50, 127), (3, 2), (2, 10**5)])
def test_rows_are_whole_within_the_radius_and_close_to_what_they_were(width, radius):
    """Rounding moves a row by sqrt(p) / 2 at most; before it, shrinking does by no more."""
    z = torch.randn(40, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z[0], z[1], z[2, 0], z[3, 0], z[4], z[4, 1] = 1.0, 0, torch.inf, torch.nan, 0, 1e-100
    actual = bound_rows(z, radius).double()
    assert torch.equal(actual, actual.round())
    assert (actual.square().sum(1) <= radius**2).all()
    assert not actual[1:4].any()
    assert actual[4, 1] == radius
    assert torch.equal(torch.cat([bound_rows(row[None], radius) for row in z]).double(), actual)
    off = (actual[5:] - radius * torch.nn.functional.normalize(z[5:])).norm(dim=1)
    assert (off <= width**0.5).all()


@pytest.mark.parametrize(("width", "radius", "examples"), [(1, 3, 1), (3, 3, 1), (2, 3, 4)])
def test_nobody_moves_the_sums_beyond_the_sensitivity_and_some_attain_it(width, radius, examples):
    """Every whole row within the radius, repeated or with others; also in theorem 3.5's sum."""
    noise = noise_of(radius, width, 2, 0.7, gram_part=PART, examples=examples, fewest=1)
    every = itertools.product(range(-radius, radius + 1), repeat=width)
    rows = [row for row in every if sum(z * z for z in row) <= radius**2]
    v, a, moved, rng = variance_of_each(noise), ORDERS[:, None], [], np.random.default_rng(0)
    for row in rows:
        for group in ([row] * examples, [row, *rng.choice(rows, examples - 1)]):
            change = np.abs(numbers(sums(group))).astype(float)
            moved.append((change**2 / v).sum())
            more = ((2 * a - 1) * change**2 + 6 * change) / (4 * v**2)
            exact = (a * change**2 / (2 * v) + np.minimum(more, 1.5 * change / v)).sum(1)
            assert (exact <= noise.renyi() * (1 + 1e-12)).all()
    assert max(moved) == pytest.approx(1 / 0.7**2, rel=1e-12)


def skellam(variance, reach):
    """exp(-v) I_x(v) for x = -reach ... reach: of two Poisson numbers of mean v / 2."""
    return ive(np.abs(np.arange(-reach, reach + 1)), variance)


def pair(noise, row, survivors, dimension):
    """Probabilities of noisy sums of one feature and class, with and without a row."""
    law, other = np.ones(1), np.ones(1)
    for variance, moved in zip(noise.variances(survivors), (row**2, row)[:dimension], strict=False):
        one = np.pad(skellam(variance, int(11 * math.sqrt(variance) + 40)), moved)
        other = np.multiply.outer(other, one).ravel()
        law = np.multiply.outer(law, np.roll(one, moved)).ravel()
    return law, other


def exact_delta(pairs, epsilon):
    """Privacy profile of adding and of removing a row, the largest of several."""
    bound = math.exp(epsilon)
    return max(np.maximum(p - bound * q, 0).sum() for pq in pairs for p, q in (pq, pq[::-1]))


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize(("radius", "factor"), [(2, 1.45), (6, 1.13)])
@pytest.mark.parametrize("multiplier", [0.8, 1.5, 3.0])
def test_epsilon_holds_for_the_exact_privacy_profile(dimension, radius, factor, multiplier):
    """All probabilities are summed, and epsilon / factor is too low. Conversion costs a tenth."""
    part = {1: 1 - 1e-9, 2: 0.5}[dimension]  # 1: no class sums
    noise = noise_of(radius, 1, 1, multiplier, gram_part=part, fewest=5)
    for survivors in (5, 7):
        claimed = noise.epsilon(DELTA, survivors)
        pairs = [pair(noise, row, survivors, dimension) for row in range(1, radius + 1)]
        assert exact_delta(pairs, claimed) <= DELTA < exact_delta(pairs, claimed / factor)
        seen = np.minimum(*pairs[-1]) > 0
        log_p, log_q = (np.log(law[seen]) for law in pairs[-1])
        for a, bound in zip(ORDERS[:8], noise.renyi(survivors), strict=False):
            assert logsumexp(a * log_p + (1.0 - a) * log_q) / (a - 1) <= bound * (1 + 1e-12)


@pytest.mark.parametrize("multiplier", [0.6, 1.5, 4.0, 30.0])
def test_large_numbers_make_it_the_gaussian_mechanism_of_another_accountant(multiplier):
    """At R = 1,000 the bound's second term is below 1e-5 of the first."""
    whole, shares = (noise_of(1000, 50, 10, multiplier, fewest=fewest) for fewest in (0, 3))
    accountant = rdp.compute_rdp(q=1.0, noise_multiplier=multiplier, steps=1, orders=[*ORDERS])
    np.testing.assert_allclose(shares.renyi(), accountant, rtol=1e-5)
    epsilon, _ = rdp.get_privacy_spent(orders=[*ORDERS], rdp=accountant, delta=DELTA)
    assert shares.epsilon(DELTA) == pytest.approx(epsilon, rel=1e-5)
    exact = gdp.eps_from_mu(mu=1 / multiplier, delta=DELTA)
    assert whole.epsilon(DELTA) == pytest.approx(exact, rel=1e-6)
    assert exact <= shares.epsilon(DELTA) <= 1.15 * exact


@pytest.mark.parametrize("fewest", [0, 4])
def test_more_noise_and_more_survivors_mean_less_epsilon(fewest):
    noise = noise_of(20, 9, gram_part=PART, fewest=fewest)
    for epsilon in (0.1, 1.0, 3.0, 50.0):
        assert 1 - 1e-6 <= noise.calibrated(epsilon, DELTA).epsilon(DELTA) / epsilon <= 1
    of_sigma = [replace(noise, noise_multiplier=s).epsilon(DELTA) for s in (0.5, 1, 2, 9, 50)]
    assert of_sigma == sorted(set(of_sigma), reverse=True)
    costs = [noise.epsilon(DELTA, survivors) for survivors in (1, 2, 4, 5, 100) if fewest]
    assert costs == sorted(set(costs), reverse=True)
    assert not fewest or costs[2] == noise.epsilon(DELTA)


@pytest.mark.parametrize("mean", [7.0, 2.0**32, 2.0**34.3, MOST_DRAWS * LARGEST_MEAN])
def test_a_share_of_noise_has_all_low_bits_and_the_shape_of_its_law(mean):
    """Up to the largest mean that is not refused; of 36,000 numbers, 6 standard errors allowed.

    Noise of multiples of 16 would leave the exact sums modulo 16 in sight.
    """
    width, fewest = 250, 3
    multiplier = math.sqrt(mean * 2 * fewest * 0.5 / 100**4)
    noise = noise_of(100, width, 18, multiplier, fewest=fewest)
    zeros = sums(np.zeros((1, width)), 18)
    drawn = noise.add(zeros, np.random.default_rng(7)).gram
    count, variance = len(drawn), mean  # off the diagonal, half of the diagonal's 2 mean
    for modulus in (2, 16, 1024)[: 3 if mean > 1e6 else 1]:
        expected = count / modulus
        squares = (np.bincount(drawn % modulus, minlength=modulus) - expected) ** 2 / expected
        assert abs(squares.sum() - modulus + 1) <= 6 * math.sqrt(2 * modulus)
    of_diagonal = packed_diagonal(width)
    others = np.delete(drawn, of_diagonal).astype(float)
    assert others.var() == pytest.approx(variance, rel=6 * math.sqrt(2 / count))
    fourth = (others**4).mean() / others.var() ** 2
    assert fourth == pytest.approx(3 + 1 / variance, abs=6 * math.sqrt(96 / count))


@pytest.mark.parametrize("survivors", [3, 5])
def test_shares_add_up_to_the_noise_of_those_who_survive(survivors):
    """Chi-square of each number against its Skellam law, at a level of 0.1 % (a fixed seed)."""
    noise = noise_of(1, 2, 1, 0.9, gram_part=PART, fewest=3)
    rng, client, count = np.random.default_rng(3), sums([[1, 0]], num_classes=1), 4000
    draws = [sum(numbers(noise.add(client, rng)) for _ in range(survivors)) for _ in range(count)]
    draws = np.array(draws) - survivors * numbers(client)
    for values, variance in zip(draws.T, variance_of_each(noise, survivors), strict=True):
        expected = count * skellam(variance, 60)
        seen, enough = np.bincount(values + 60, minlength=121), expected >= 5
        expected = np.append(expected[enough], count - expected[enough].sum())
        seen = np.append(seen[enough], count - seen[enough].sum())
        assert ((seen - expected) ** 2 / expected).sum() < chi2.ppf(0.999, enough.sum())
    assert np.abs(np.corrcoef(draws.T) - np.eye(draws.shape[1])).max() < 4 / math.sqrt(count)


@pytest.mark.parametrize("fewest", [0, 2])
def test_noise_off_the_diagonal_has_half_the_variance_and_counts_are_zero(fewest):
    """Means are within 5 standard errors, and variances within 5 sqrt(2 / n) of accountant."""
    noise = noise_of(127, 120, 40, fewest=fewest)
    exact = sums(bound_rows(torch.eye(120), 127), 40)
    noisy, (v, s) = noise.add(exact, np.random.default_rng(0)), noise.variances()
    assert not noisy.counts.any()
    change, off = noisy.matrix() - exact.matrix(), np.triu_indices(120, 1)
    laws = (np.diag(change), v), (change[off], v / 2), (noisy.class_sums - exact.class_sums, s)
    for values, of_all in laws:
        variance = of_all / max(fewest, 1)  # of one client's share
        assert abs(values.mean()) <= 5 * math.sqrt(variance / values.size)
        assert abs(values.var() / variance - 1) <= 5 * math.sqrt(2 / values.size)


def test_the_solution_is_regularised_by_the_noise():
    """The largest eigenvalue of noise of variance 1 is near sqrt(2 p), within 2 p^(-2/3)."""
    normal = np.random.default_rng(0).standard_normal((300, 300))
    noise = np.triu(normal, 1) / math.sqrt(2)
    largest = np.linalg.eigvalsh(noise + noise.T + np.diag(np.diag(normal)))[-1]
    assert largest == pytest.approx(math.sqrt(600), rel=2 * 300 ** (-2 / 3))
    z, y = torch.from_numpy(normal[:40, :10]).split([8, 2], 1)
    ridge = 0.3 * math.sqrt(2 * 8 * 0.5)
    expected = torch.linalg.solve(z.T @ z + ridge * torch.eye(8), z.T @ y)
    torch.testing.assert_close(solve_noisy(z.T @ z, z.T @ y, 0.5, 0.3), expected)
    torch.testing.assert_close(solve_noisy(-z.T @ z, z.T @ y, 0.5, 0.3), z.T @ y / ridge)


def test_what_would_break_the_promise_is_refused():
    noise, shares = noise_of(3, 2), noise_of(3, 2, fewest=3)
    parts = [{"gram_part": part} for part in (0.0, 1.0, -0.2)]
    for wrong in ({"radius": 0}, {"fewest": -1}, {"noise_multiplier": math.nan}, *parts):
        refused("numbers above 0 and a gram_part below 1", replace, noise, **wrong)
    refused("integers", noise.add, FeatureStatistics.of([torch.eye(2)], torch.arange(2), 2), None)
    refused("integers", noise.add, sums([[1, 1]], 3), None)
    refused("rows of norm 3", noise.add, sums([[3, 1]]), None)
    refused("at most 4 examples", replace(shares, examples=4).add, sums([[1, 1]] * 5), None)
    for mechanism, radius in ((noise, 10**7), (shares, 10**4)):
        refused("smaller radius", replace(mechanism, radius=radius).add, sums([[1, 1]]), None)
    for mechanism, survivors in ((noise, 3), (shares, 0)):
        refused("clients with shares", mechanism.epsilon, DELTA, survivors)
    refused("between 0 and 1", noise.epsilon, 0.0)
    refused("no noise", shares.calibrated, 1e-4, DELTA)
    refused("radius", bound_rows, torch.ones(1, 2), 0)
    refused("above 0", solve_noisy, torch.eye(2), torch.eye(2), 0.0)
