"""FedNova against algorithm 1 on least squares, FedAvg where all take as many steps, and lies."""

from functools import partial

import numpy as np
import pytest
from torch import nn

from fedntk.clients import FedNovaClient, LocalSGD, SGDClient
from fedntk.strategies import FedNova, Screening, SeededFedAvg

from .federation import (
    SIZES,
    SLOPES,
    Contract,
    Grid,
    app,
    bits,
    damaged,
    descend,
    network,
    run_as_if_lost,
    scalar,
    start,
    with_metrics,
)

ALL = {"fraction_evaluate": 0.0}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS = app(FedNovaClient, **SGD)
STEPS = "effective-steps"
make = partial(FedNova, network=network())
CONTRACT = {"FedNova": Contract(make, CLIENTS)}


def test_with_equal_steps_it_is_fedavg_bit_for_bit():
    """Whole batches: each client takes an epoch's one step, with momentum three times."""
    sgd = LocalSGD(epochs=3, learning_rate=0.1, batch_size=20, momentum=0.5)
    ours = start(make(**ALL), Grid(app(FedNovaClient, sgd=sgd)), rounds=2)
    assert bits(ours) == bits(start(SeededFedAvg(**ALL), Grid(app(SGDClient, sgd=sgd)), rounds=2))


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_algorithm_1_by_hand(momentum):
    """Clients of 2, 2 and 6 examples take 3, 3 and 9 steps; d_i is the weighted mean gradient."""
    rate, x = 0.05, 0.3
    sgd = LocalSGD(epochs=3, batch_size=2, learning_rate=rate, momentum=momentum)
    strategy = FedNova(network=nn.Linear(1, 1, bias=False), **ALL)
    weight = descend(strategy, scalar(FedNovaClient, sgd=sgd), 4, first=x)
    shares = np.array(SIZES) / sum(SIZES)
    for _ in range(4):
        norms, directions = [], []
        for slope, count in zip(SLOPES, SIZES, strict=True):
            steps, y, velocity, gradients = 3 * count // 2, x, 0.0, []
            for _ in range(steps):
                gradients.append(slope * (slope * y - 1))
                velocity = momentum * velocity + gradients[-1]
                y -= rate * velocity
            a = [sum(momentum**k for k in range(steps - j)) for j in range(steps)]
            norms.append(sum(a))
            directions.append(np.dot(a, gradients) / sum(a))
        effective = shares @ norms
        x -= effective * rate * (shares @ directions)
    assert weight == pytest.approx(x, rel=1e-12)
    assert strategy.train_metrics[4]["effective-steps"] == pytest.approx(effective, rel=1e-12)


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (None, "effective-steps"),
        (0.5, "effective-steps"),
        ([3.0], "effective-steps"),
        (1e40, "effective-steps"),
        (1e6, "scale"),
    ],
)
def test_a_reply_with_a_bad_number_of_steps_is_as_if_it_were_lost(claim, reason):
    """One that claims many steps would have all others' changes multiplied."""
    change = with_metrics(effective_steps=claim)
    run_as_if_lost(lambda: make(**ALL), CLIENTS, change, reason, rounds=2)


@pytest.mark.parametrize("rule", ["none", "median"])
def test_the_steps_of_a_reply_whose_weights_are_dropped_do_not_count(rule):
    """Clients of 5 ... 10 examples take two or three steps."""
    far = damaged(0, lambda a: a + 1e4)
    screening = Screening(rule)
    run_as_if_lost(lambda: make(screening=screening, **ALL), CLIENTS, far, "scale", rounds=2)


def test_under_a_rule_a_claim_within_the_factor_moves_no_ones_step():
    """tau_eff is then the median of 1, 2, 2, 2, 2 and the claim of 150."""
    strategy = make(screening=Screening("median"), **ALL)
    start(strategy, Grid(CLIENTS, changes={5: with_metrics(effective_steps=150.0)}))
    assert strategy.train_metrics[1]["effective-steps"] == 2
    assert strategy.train_metrics[1]["replies-accepted"] == 6
