"""Local training: nothing is shared, and each client's network is what SGD alone makes of it."""

from fedntk.strategies import LocalTraining, SeededFedAvg

from .federation import Contract, Grid, bits, initial_bits, kept_by, start
from .test_personalised import ALONE, CLIENTS, PLAIN

CONTRACT = {"LocalTraining": Contract(LocalTraining, CLIENTS, personal=True, sends_arrays=False)}


def test_each_client_has_what_fedavg_of_it_alone_would_have():
    """FedAvg of one client averages nothing: three rounds of it are that client's SGD."""
    strategy = LocalTraining(**ALONE)
    after = start(strategy, Grid(CLIENTS, num_clients=2), rounds=3)
    assert bits(after) == initial_bits()
    alone = start(SeededFedAvg(**ALONE), Grid(PLAIN, num_clients=1), rounds=3)
    assert bits(kept_by(strategy, 0, 3)) == bits(alone)
