"""What the models of an ensemble become: theorem 4.2 of Shi et al. 2021, at two widths.

The program in benchmarks has the same at four widths, with 100 models each.
"""

import importlib
from types import ModuleType

import numpy as np
import pytest

from ..conftest import ROOT


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("fed_ensemble_limit")


def test_models_come_near_their_own_limits_as_the_network_grows(limit):
    """Errors of linearisation and of the kernel go as 1 / sqrt(width): a fourth, here, of four
    models; a half leaves room for chance. All models fit their clients' points."""
    narrow, wide = (limit.distances(width, runs=1, rounds=300) for width in (64, 1024))
    for row in (narrow, wide):
        assert row["largest-residual"] < 0.1
    assert wide["own-limit"] < narrow["own-limit"] / 2
    assert wide["kernel"] < narrow["kernel"] / 2


def test_the_limits_are_samples_of_the_gaussian_process(limit):
    """Means of 40,000 draws are right to 4.5 standard deviations, these to 4.5 / sqrt(2 n)."""
    count, points = 40_000, np.concatenate([limit.X, limit.TEST])
    covariance = limit.limit_kernels(points, points)[0]
    generator = np.random.default_rng(0)
    start = generator.multivariate_normal(np.zeros(30), covariance, count, method="eigh")
    theta = limit.limit_kernels(points, limit.X)[1]
    weights = theta[6:] @ np.linalg.inv(theta[:6])
    ends = start[:, 6:] + (limit.Y - start[:, :6]) @ weights.T
    mean, std = limit.gaussian_process()
    assert np.abs((ends.mean(0) - mean) / std).max() < 4.5 / np.sqrt(count)
    assert np.abs(ends.std(0) / std - 1).max() < 4.5 / np.sqrt(2 * count)
