"""The two-patch data set and its network by name, and FedAvg on them by the real strategy."""

import copy
import math

import numpy as np
import pytest
import torch

from fedntk.clients import LocalSGD, SGDClient
from fedntk.ntk.feature_learning import (
    Coefficients,
    TwoPatchDistribution,
    coefficient_step,
    mixing_matrix,
)
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.data.two_patch import TwoPatchOptions
from fedntk.simulations.models import TwoPatchCNN, build_model
from fedntk.strategies import SeededFedAvg

from ..strategies.federation import Grid, app, start
from .outcomes import refused

DATASET = "two-patch:groups=1-3,dimension=60,examples=6,test=25,signal=1.5,noise=0.7,seed=3"
DISTRIBUTION = TwoPatchDistribution((1, 3), 60, signal_norm=1.5, noise_std=0.7, seed=3)


def config(**changes) -> Config:
    options = {
        "dataset": DATASET, "partition": "natural", "num_clients": 4, "clients_per_round": 4,
        "clients_per_evaluation": 0, "method": "fedavg", "model": "two-patch-cnn", "width": 5,
    }  # fmt: skip
    return Config(**options | changes)


def test_clients_have_the_examples_of_the_distribution_as_they_are():
    """Test examples stand in turn, one of each client, then the next."""
    data, split = load_data(config()), load_split(config())
    train = DISTRIBUTION.draw(6, part="train", dtype=torch.float32)
    test = DISTRIBUTION.draw(25, part="test", dtype=torch.float32)
    for k, indices in enumerate(split.clients):
        assert set(data.natural_ids[indices].tolist()) == {k}
        tested = np.flatnonzero(data.natural_ids_test == k)
        for (x, y), drawn in ((data.train(np.sort(indices)), train), (data.test(tested), test)):
            assert torch.equal(x, drawn.patches()[k])
            assert torch.equal(y, drawn.classes()[k])
    assert data.natural_ids_test[:8].tolist() == [0, 1, 2, 3] * 2


def test_defaults_and_first_weights_are_those_of_the_paper():
    """Weights have a tenth of the theorem's bound. 100,000 draws: four and a half standard errors
    of the standard deviation are 1.01 %."""
    sizes = "groups=20,dimension=1000,examples=100,test=2000,signal=2"
    assert TwoPatchOptions.read("") == TwoPatchOptions.read(sizes)
    for wrong, message in (
        ("group=3", "expected options groups=.*, got 'group=3'; did you mean"),
        ("groups=1-1,dimension=2", "expected more than the 2 signals"),
    ):
        refused(message, load_data, Config(dataset=f"two-patch:{wrong}"))
    model = build_model(config(width=50), (2, 1000), 2)
    assert float(model.weight.detach().std()) == pytest.approx(0.1 / math.sqrt(1000), rel=0.0101)


def test_the_strategys_weights_are_those_of_the_update_rules():
    """Full batches: SeededFedAvg and SGDClient are eq. (4) and (5). In float64, sums in another
    order, so to 1e-10 of weights near 0.1."""
    examples, rounds, steps = DISTRIBUTION.draw(6), 3, 2
    model = TwoPatchCNN((2, 60), 2, width=5).double()
    initial = model.weight.detach().clone()
    x, y = examples.patches(), examples.classes()

    def client(*_: object, seed: tuple[int, int], **options: float) -> SGDClient:
        sgd = LocalSGD(epochs=steps, batch_size=6, learning_rate=0.8)
        return SGDClient(copy.deepcopy(model), x[seed[1]], y[seed[1]], sgd=sgd)

    strategy = SeededFedAvg(fraction_evaluate=0.0, min_available_nodes=4)
    grid = Grid(app(client), num_clients=4)
    learned = torch.from_numpy(start(strategy, grid, rounds, model)["weight"])
    exact = Coefficients.zeros(examples, 5)
    for _ in range(rounds):
        for _ in range(steps):
            exact = coefficient_step(exact, initial, examples, learning_rate=0.8)
        exact = exact.mixed(mixing_matrix(torch.zeros(4)))
    assert learned.dtype == torch.float64
    torch.testing.assert_close(learned, exact.weights(initial, examples)[0], rtol=0, atol=1e-10)
    assert float((learned - initial).abs().max()) > 0.01
