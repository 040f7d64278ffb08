"""Any of Flower's strategies with the sampling, the checks and the state of those here."""

from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from fedntk.clients import SGDClient
from fedntk.strategies import SCAFFOLD, CheckedStrategy, SeededFedAvg

from .federation import Contract, Grid, app, bits, start

CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)
CONTRACT = {
    "CheckedStrategy": Contract(
        lambda **o: CheckedStrategy(FedAvgM(server_momentum=0.5), **o), CLIENTS
    )
}
OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0}


def test_flowers_fedavg_checked_is_ours():
    """The same sums of the same replies, so the same bits; half of the clients a round."""
    half = OPTIONS | {"fraction_train": 0.5, "min_train_nodes": 3, "seed": 3}
    checked = start(CheckedStrategy(FedAvg(), **half), Grid(CLIENTS), rounds=3)
    floating = [name for name, array in checked.items() if array.dtype == np.float32]
    ours = start(SeededFedAvg(**half), Grid(CLIENTS), rounds=3)
    assert bits({n: checked[n] for n in floating}) == bits({n: ours[n] for n in floating})


def test_what_a_strategy_of_flowers_keeps_is_saved_and_given_back():
    """Also to one that has gone on meanwhile: what it was without is gone again."""
    expected = start(CheckedStrategy(FedAdam(), **OPTIONS), Grid(CLIENTS), rounds=2)
    used = CheckedStrategy(FedAdam(), **OPTIONS)
    fresh = used.state_dict()
    start(used, Grid(CLIENTS), rounds=1)
    used.load_state_dict(fresh)
    assert bits(start(used, Grid(CLIENTS), rounds=2)) == bits(expected)


def test_one_whose_replies_are_more_than_weights_is_refused():
    with pytest.raises(ValueError, match="strategy: expected a strategy whose replies are one set"):
        CheckedStrategy(SCAFFOLD())
