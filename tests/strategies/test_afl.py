"""AFL: sums give what the paper's pairwise aggregation gives, and the joint solution."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedntk.clients import ClosedFormClient
from fedntk.ntk import FeatureMap, one_hot
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.strategies import AFL

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    bits,
    damaged,
    examples,
    failed,
    in_rounds,
    initial_bits,
    network,
    run_as_if_lost,
    start,
)

CLIENTS = app(ClosedFormClient)
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
CONTRACT = {
    "AFL with a ridge": Contract(
        partial(AFL, network=network(), ridge=0.1, head="3"), CLIENTS, once=True
    )
}
WEIGHT, BIAS = "3.weight", "3.bias"


strategy = partial(AFL, network=network(), **OPTIONS)


def pooled():
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    z = FeatureMap("last-layer").extractor(network())(x)
    return z.double(), one_hot(y, 3).double()


def sums_of(z, y):
    return FeatureStatistics.of([z], y.argmax(1), y.shape[1])


def aggregated(parts, gamma):
    """The paper's way: local solutions, aggregated two at a time, then without K gamma.

    W = (I - R_1 C_2 (I - (C_1 + C_2)^{-1} C_2)) W_1 + the same with 1 and 2 exchanged, R = C^{-1}.
    """
    one = torch.eye(parts[0][0].shape[1]).double()

    def part(own, other, solution):
        inner = one - torch.linalg.solve(own + other, other)
        return solution - torch.linalg.solve(own, other @ inner @ solution)

    total = joint = torch.empty(0)
    for z, y in parts:
        matrix = z.T @ z + gamma * one
        local = torch.linalg.solve(matrix, z.T @ y)
        if not len(total):
            total, joint = matrix, local
            continue
        joint = part(total, matrix, joint) + part(matrix, total, local)
        total = total + matrix
    return torch.linalg.solve(total - len(parts) * gamma * one, total @ joint)


@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_sums_give_what_the_papers_aggregation_gives(gamma):
    """Three clients have fewer examples than features.

    Condition numbers are below 1e4, so that 1e-9 is above 100 times float64's rounding.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(len(x), 8, generator=generator).double(), one_hot(y, 3).double())
        for x, y in map(examples, range(6))
    ]
    weight, bias = strategy().last_layer([sums_of(*part) for part in parts])
    np.testing.assert_allclose(weight.T, aggregated(parts, gamma), rtol=1e-9, atol=1e-9)
    assert not bias.any()


@pytest.mark.parametrize("ridge", [0, 0.1])
def test_the_federated_run_gives_the_joint_solution(ridge):
    """The ridge is over the mean squared norm; weights are rounded to float32."""
    z, y = pooled()
    rho = ridge * z.square().sum(1).mean()
    rows = torch.cat([z, rho.sqrt() * torch.eye(8).double()])
    expected = torch.linalg.pinv(rows) @ torch.cat([y, torch.zeros(8, 3).double()])
    after = start(strategy(ridge=ridge), Grid(CLIENTS))
    np.testing.assert_allclose(after[WEIGHT].T, expected, rtol=1e-6, atol=1e-7)
    assert not after[BIAS].any()
    before = arrays_of(ArrayRecord(network().state_dict()))
    assert bits(after | {n: before[n] for n in (WEIGHT, BIAS)}) == initial_bits()


def test_all_clients_are_asked_once_and_again_if_too_few_replied():
    own = strategy(min_completed=6, fraction_train=0.5)
    grid = Grid(CLIENTS, changes={2: in_rounds(own, [1], failed)})
    after = start(own, grid, rounds=3)
    assert sorted(grid.trained) == sorted([*range(6)] * 2)
    assert [own.train_metrics[n]["replies-accepted"] for n in (1, 2)] == [5, 6]
    assert bits(after) == bits(start(strategy(), Grid(CLIENTS)))


def test_another_network_is_refused():
    with pytest.raises(ValueError, match=r"initial_arrays: expected 3.weight of shape \(3, 8\)"):
        strategy().start(Grid(CLIENTS), ArrayRecord(nn.Linear(4, 3).state_dict()), num_rounds=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [  # the mean square of features 1,000 times as large; sums too large beside it
        (damaged(0, lambda gram: gram * 1e6), "scale"),
        (damaged(1, lambda sums: sums * 100), "range"),
    ],
)
def test_features_of_another_size_and_false_sums_are_dropped(change, reason):
    run_as_if_lost(strategy, CLIENTS, change, reason)
