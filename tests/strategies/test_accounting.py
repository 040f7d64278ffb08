"""Epsilon against closed forms."""

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedntk.ntk import RowNoise
from fedntk.ntk.payloads.privacy import label_epsilon

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus' imports
DELTA = 1e-5


def exact(mu):
    """Epsilon of a Gaussian mechanism of sensitivity mu (Balle and Wang, ICML 2018, theorem 8)."""

    def excess(epsilon):
        upper = norm.cdf(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - DELTA

    return brentq(excess, 0, 100)


def spent(uploads, **options):
    noise = RowNoise(**{"clip": 1.0, "noise_multiplier": 4.0, **options})
    return noise.epsilon(DELTA, uploads, num_outputs=10)


@pytest.mark.parametrize(("sigma", "uploads"), [(2.0, 1), (4.0, 3), (10.0, 10)])
def test_rows_cost_what_the_gaussian_mechanism_costs(sigma, uploads):
    """k uploads are one of sensitivity 2 sqrt(k) / sigma; Renyi's bound is at most 15 % above."""
    bound = exact(2 * math.sqrt(uploads) / sigma)
    assert bound <= spent(uploads, noise_multiplier=sigma) <= 1.15 * bound


def test_labels_cost_at_most_their_pure_epsilon_more_each_time():
    """Labels that say nothing, of noise 1, cost nothing."""
    rows = spent(5)
    for label_noise in (0.1, 0.9, 1.0):
        pure = label_epsilon(label_noise, 10)
        both = spent(5, label_noise=label_noise)
        assert rows <= both <= rows + 5 * pure + 1e-9


def test_more_uploads_cost_more():
    costs = [spent(uploads) for uploads in (0, 1, 2, 4, 8)]
    assert costs[0] == 0
    assert costs == sorted(set(costs))
