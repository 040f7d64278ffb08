"""Models for each client against weighted ridge regression on the examples themselves."""

from typing import Any

import numpy as np
import torch

from fedntk.ntk.convex.pooled_statistics import personal_model
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.split_statistics import SplitStatistics


def examples(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 5, generator=generator)
    return z, (z @ torch.randn(5, 3, generator=generator)).argmax(1)


def sums(z: torch.Tensor, y: torch.Tensor) -> FeatureStatistics:
    return FeatureStatistics.of([z], y, 3)


OTHERS, OWN, HELD = examples(60, 0), examples(30, 1), examples(10, 2)


def solved(parts: list[tuple[float, Any]], ridge: float) -> np.ndarray:
    """Solve with each example's weight, in float64; a bias, and labels minus 1/3."""
    weight = np.concatenate([np.full(len(y), w) for w, (_, y) in parts])
    z = np.concatenate([np.c_[group[0].numpy(), np.ones(len(group[0]))] for _, group in parts])
    y = np.concatenate([np.eye(3)[group[1]] - 1 / 3 for _, group in parts])
    rho = ridge * (weight @ np.square(z).sum(1)) / weight.sum()
    gram = (z.T * weight) @ z + rho * np.eye(6)
    return np.linalg.solve(gram, (z.T * weight) @ y)


def error(linear: np.ndarray) -> float:
    z = np.c_[HELD[0].numpy(), np.ones(10)]
    return float(np.square(z @ linear - np.eye(3)[HELD[1]] + 1 / 3).sum())


def split(others: FeatureStatistics, client: SplitStatistics) -> SplitStatistics:
    return SplitStatistics(others + client.fitting, client.held_out)


def test_it_is_the_weighted_problem_and_held_out_examples_choose_the_weight():
    client = SplitStatistics(sums(*OWN), sums(*HELD))
    weights = (0.0, 0.5, 2.0, 20.0)
    errors = [error(solved([(1, OTHERS), (1 + w, OWN)], 0.1)) for w in weights]
    best = weights[int(np.argmin(errors))]
    assert 0 < best < 20  # neither end is chosen
    total = split(sums(*OTHERS), client)
    linear, weight = personal_model(total, client, 0.1, bias=True, weights=weights)
    assert weight == best
    parts = [(1, OTHERS), (1 + best, OWN), (1 + best, HELD)]
    np.testing.assert_allclose(linear, solved(parts, 0.1), rtol=1e-9, atol=1e-11)


def test_limits_are_the_joint_model_and_the_clients_own():
    """With w = 1.5e7 the others are 60 / (40 w) = 1e-7 of the weight."""
    client = SplitStatistics(sums(*OWN), sums(*HELD))
    total = split(sums(*OTHERS), client)
    joint, _ = personal_model(total, client, 0.1, bias=True, weights=(0.0,))
    parts = [(1.0, OTHERS), (1.0, OWN), (1.0, HELD)]
    np.testing.assert_allclose(joint, solved(parts, 0.1), rtol=1e-9, atol=1e-11)
    own_only, _ = personal_model(total, client, 1e-9, bias=True, weights=(1.5e7,))
    np.testing.assert_allclose(own_only, solved(parts[1:], 1e-9), rtol=1e-4, atol=1e-6)


def test_without_held_out_examples_it_is_the_first_weight():
    client = SplitStatistics(sums(*OWN), sums(OWN[0][:0], OWN[1][:0]))
    assert personal_model(split(sums(*OTHERS), client), client, 0.1)[1] == 0
