"""FedDyn against algorithm 1 on least squares, its fixed point, and FedAvg of equal clients."""

from functools import partial

import numpy as np
import pytest
from torch import nn

from fedntk.clients import FedDynClient, LocalSGD, SGDClient
from fedntk.strategies import FedDyn, SeededFedAvg

from .federation import (
    SLOPES,
    Contract,
    Grid,
    app,
    bits,
    damaged,
    descend,
    in_rounds,
    lost,
    network,
    run_as_if_lost,
    scalar,
    start,
    with_metrics,
)

ALL = {"fraction_evaluate": 0.0}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS = app(FedDynClient, **SGD)
make = partial(FedDyn, network=network())
CONTRACT = {"FedDyn": Contract(make, CLIENTS)}
linear = partial(FedDyn, network=nn.Linear(1, 1, bias=False), **ALL)


def test_without_a_pull_it_is_fedavg_of_clients_that_count_alike():
    alike = dict.fromkeys(range(6), with_metrics(num_examples=1))
    ours = start(strategy := make(pull=0.0, **ALL), grid := Grid(CLIENTS), rounds=2)
    fedavg = start(SeededFedAvg(**ALL), Grid(app(SGDClient, **SGD), changes=alike), rounds=2)
    assert bits(ours) == bits(fedavg)
    assert not strategy.duals
    assert grid.records("down") == [{"arrays": list(ours)}] * 12


def test_algorithm_1_by_hand():
    """In rounds 2 and 4 the reply of the second client is lost; six steps a round."""
    alpha, rate, x = 0.4, 0.1, 0.3
    g, h = np.zeros(3), 0.0
    strategy = linear(pull=alpha)
    clients = scalar(FedDynClient, sgd=LocalSGD(learning_rate=rate, epochs=6, batch_size=10))
    changes = {1: in_rounds(strategy, [2, 4], lost)}
    weight = descend(strategy, clients, 5, first=x, changes=changes)
    for number in range(1, 6):
        chosen, moved = [0, 2] if number in (2, 4) else [0, 1, 2], []
        for k in chosen:
            y, slope = x, SLOPES[k]
            for _ in range(6):
                y -= rate * (slope * (slope * y - 1) - g[k] + alpha * (y - x))
            g[k] -= alpha * (y - x)
            moved.append(y - x)
        h -= alpha / 3 * sum(moved)
        x += np.mean(moved) - h / alpha
    numbers = [weight, *(float(alpha * strategy.duals[k][0]) for k in range(3))]
    assert numbers == pytest.approx([x, *g], rel=1e-12)


def test_it_ends_in_the_optimum_of_clients_that_count_alike():
    """The sum of the F_k has its minimum at (1 + 2 + 1.5) / (1 + 4 + 2.25)."""
    clients = scalar(FedDynClient, sgd=LocalSGD(learning_rate=0.1, epochs=20, batch_size=10))
    assert descend(linear(pull=2.0), clients, 80) == pytest.approx(4.5 / 7.25, rel=1e-9)


def test_a_bad_reply_changes_no_dual():
    far = damaged(0, lambda a: a + 1e4)
    attacked, without = run_as_if_lost(lambda: make(**ALL), CLIENTS, far, "scale", rounds=2)
    assert sorted(attacked.duals) == [0, 1, 3, 4, 5]
    assert all((dual == without.duals[k]).all() for k, dual in attacked.duals.items())
