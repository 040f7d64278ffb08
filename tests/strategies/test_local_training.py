"""Local training: nothing is shared, and each client's network is what SGD alone makes of it."""

from typing import Any

from fedntk.clients import PersonalisedClient, SGDClient
from fedntk.strategies import LocalTraining, SeededFedAvg

from .federation import (
    Contract,
    Grid,
    app,
    bits,
    initial_bits,
    kept_by,
    start,
)

CLIENTS = app(PersonalisedClient, learning_rate=0.1, batch_size=4)
CONTRACT = {"LocalTraining": Contract(LocalTraining, CLIENTS, personal=True, sends_arrays=False)}
OPTIONS: dict[str, Any] = {
    "min_available_nodes": 1, "min_train_nodes": 1, "fraction_evaluate": 0.0
}  # fmt: skip


def test_each_client_has_what_fedavg_of_it_alone_would_have():
    """FedAvg of one client averages nothing: three rounds of it are that client's SGD."""
    strategy = LocalTraining(**OPTIONS)
    after = start(strategy, Grid(CLIENTS, num_clients=2), rounds=3)
    assert bits(after) == initial_bits()
    alone = start(
        SeededFedAvg(**OPTIONS),
        Grid(app(SGDClient, learning_rate=0.1, batch_size=4), num_clients=1),
        rounds=3,
    )
    assert bits(kept_by(strategy, 0, 3)) == bits(alone)
