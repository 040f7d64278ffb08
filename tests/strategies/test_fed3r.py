"""Fed3R: ridge regression with a bias on all examples, each class's weights of norm 1."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedntk.clients import ClosedFormClient
from fedntk.ntk import FeatureMap, one_hot
from fedntk.ntk.payloads import FeatureStatistics
from fedntk.strategies import AFL, Fed3R

from .federation import Contract, Grid, app, examples, network, start

CLIENTS = app(ClosedFormClient)
OPTIONS: dict[str, Any] = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
CONTRACT = {
    "Fed3R": Contract(lambda **o: Fed3R(network=network(), **o), CLIENTS, once=True),
}
WEIGHT, BIAS = "3.weight", "3.bias"


def strategy(**options: Any) -> Fed3R:
    return Fed3R(network=network(), **OPTIONS | options)


def features(partition: int) -> tuple[Tensor, Tensor]:
    x, y = examples(partition)
    return FeatureMap("last-layer").extractor(network())(x).double(), one_hot(y, 3).double()


def with_one(z: Tensor) -> Tensor:
    return torch.cat([z, torch.ones(len(z), 1).double()], 1)


@pytest.mark.parametrize("ridge", [1e-4, 0.01, 1.0])
def test_it_is_the_papers_recursion_over_clients_with_lambda_once(ridge):
    """A and b, added to client by client in float64 from A = lambda I; the columns normalised."""
    parts = [(with_one(z), y) for z, y in map(features, range(6))]
    rho = ridge * torch.cat([z for z, _ in parts]).square().sum(1).mean()
    a, b = rho * torch.eye(9).double(), torch.zeros(9, 3).double()
    for z, y in reversed(parts):
        a, b = a + z.T @ z, b + z.T @ y
    linear = torch.linalg.solve(a, b)
    norm = linear[:-1].norm(dim=0)
    after = start(strategy(ridge=ridge), Grid(CLIENTS))
    np.testing.assert_allclose(after[WEIGHT].T, linear[:-1] / norm, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[BIAS], linear[-1] / norm, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(after[WEIGHT], axis=1), 1, rtol=1e-6)


def test_without_a_bias_it_is_afl_with_the_same_ridge_and_normalised_classes():
    def net() -> nn.Module:
        model = network()
        model[3] = nn.Linear(8, 3, bias=False)
        return model

    z, y = (torch.cat(parts) for parts in zip(*map(features, range(6)), strict=True))
    sums = [FeatureStatistics.of([z], y.argmax(1), 3)]
    expected, _ = AFL(network=net(), ridge=0.1).last_layer(sums)
    found, bias = Fed3R(network=net(), ridge=0.1).last_layer(sums)
    norm = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected / norm, rtol=1e-10)
    assert not bias.any()


def test_a_class_of_nobodys_has_weights_of_zero():
    """Without a bias its column of b is 0, and so is the solution's; it is not divided by 0."""
    model = nn.Linear(8, 4, bias=False)
    z, y = features(0)
    found, _ = Fed3R(network=model).last_layer([FeatureStatistics.of([z], y.argmax(1), 4)])
    assert not found[2:].any()
    np.testing.assert_allclose(np.linalg.norm(found[:2], axis=1), 1)


def test_bad_ridges_are_refused():
    for ridge in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"ridge: expected (more than 0|a finite number)"):
            strategy(ridge=ridge)
