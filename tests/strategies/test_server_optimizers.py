"""Optimizers on the server against Flower's, algorithm 2 in float64, and FedAvg."""

from functools import partial

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch

from fedntk.clients import LocalSGD, SGDClient
from fedntk.strategies import FedAdam, FedAvgM, FedYogi, FromFlower, SeededFedAvg

from .federation import (
    SIZES,
    SLOPES,
    Contract,
    Grid,
    app,
    assert_near,
    bits,
    descend,
    initial_bits,
    network,
    scalar,
    start,
)

ALL = {"fraction_evaluate": 0.0}
CLIENTS = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
CONTRACT = {
    kind.__name__: Contract(partial(kind, network=network()), CLIENTS)
    for kind in (FedAvgM, FedAdam, FedYogi)
}
TRAINED = [name for name, _ in network().named_parameters()]


def trained(arrays):
    return {name: arrays[name] for name in TRAINED}


def test_without_momentum_fedavgm_is_fedavg_bit_for_bit():
    """w + (mean - w) in float64 is the mean in float32: numbers here differ by less than 2^29."""
    plain, fedavg = FedAvgM(network=network(), server_momentum=0.0, **ALL), SeededFedAvg(**ALL)
    assert bits(start(plain, Grid(CLIENTS), 2)) == bits(start(fedavg, Grid(CLIENTS), 2))


@pytest.mark.parametrize(("momentum", "rate"), [(0.9, 1.0), (0.5, 0.3)])
def test_fedavgm_is_flowers(momentum, rate):
    """Three rounds; Flower's sums are in float32: some 2^-24 of the weights' size each."""
    options = {"server_momentum": momentum, "server_learning_rate": rate}
    ours = start(FedAvgM(network=network(), **options, **ALL), Grid(CLIENTS), 3)
    theirs = start(FromFlower(flower.FedAvgM(**options), **ALL), Grid(CLIENTS), 3)
    assert_near(trained(ours), trained(theirs), 1e-6, 1e-6)


def test_fed_yogi_is_flowers_with_the_papers_first_v_and_fed_adam_but_for_its_correction():
    """One round of Flower's FedAdam has eta sqrt(1 - beta_2^2) / (1 - beta_1^2).

    Where Delta is a rounding error below tau, so is the difference of the steps: 1e-2 * 1e-6 / tau.
    """
    square = {name: np.full(a.shape, 1e-6, np.float32) for name, a in arrays().items()}
    for kind, theirs, rounds in (
        (FedYogi, flower.FedYogi(eta=0.01), 2),
        (FedAdam, flower.FedAdam(eta=0.01 * (1 - 0.9**2) / np.sqrt(1 - 0.99**2)), 1),
    ):
        theirs.v_t = dict(square)
        ours = start(kind(network=network(), **ALL), Grid(CLIENTS), rounds)
        after = start(FromFlower(theirs, **ALL), Grid(CLIENTS), rounds)
        assert_near(trained(ours), trained(after), 1e-5, 1e-5)


def arrays():
    return {name: tensor.numpy() for name, tensor in network().state_dict().items()}


@pytest.mark.parametrize("kind", [FedAvgM, FedAdam, FedYogi])
def test_the_papers_equations_by_hand(kind):
    """Five rounds in float64 of clients that take a step each; options are not the defaults."""
    more = {} if kind is FedAvgM else {"beta_1": 0.6, "beta_2": 0.8, "tau": 0.02}
    more |= {"server_momentum": 0.6} if kind is FedAvgM else {}
    linear = torch.nn.Linear(1, 1, bias=False)
    strategy = kind(network=linear, server_learning_rate=0.3, **more, **ALL)
    clients = scalar(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=10))
    weight = descend(strategy, clients, 5, first=0.2)
    slopes, shares = np.array(SLOPES), np.array(SIZES) / sum(SIZES)
    x, m, v = 0.2, 0.0, 0.02**2
    for _ in range(5):
        delta = -0.1 * shares @ (slopes * (slopes * x - 1))
        m = 0.6 * m + (1 if kind is FedAvgM else 0.4) * delta
        if kind is FedYogi:
            v -= 0.2 * delta**2 * np.sign(v - delta**2)
        else:
            v = 0.8 * v + 0.2 * delta**2
        x += 0.3 * (m if kind is FedAvgM else m / (np.sqrt(v) + 0.02))
    assert weight == pytest.approx(x, rel=1e-12)


def test_a_step_out_of_range_leaves_the_model_and_the_moments():
    strategy = FedAvgM(network=network(), server_learning_rate=1e60, **ALL)
    assert bits(start(strategy, Grid(CLIENTS))) == initial_bits()
    assert not strategy.moments
