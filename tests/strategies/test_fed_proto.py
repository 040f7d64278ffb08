"""FedProto: prototypes are means over the clients' examples, and draw the features to them."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import FedProtoClient, LocalSGD, PersonalisedClient
from fedntk.ntk.payloads.prototypes import GLOBAL_PROTOTYPES
from fedntk.strategies import FedProto, LocalTraining

from .federation import (
    Contract,
    Grid,
    app,
    bits,
    damaged,
    examples,
    in_rounds,
    initial_bits,
    kept_by,
    loaded,
    lost,
    network,
    run_as_if_lost,
    start,
    with_arrays,
)

OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
EVALUATED = {"min_available_nodes": 6, "fraction_evaluate": 1.0, "min_evaluate_nodes": 6}
SGD = {"sgd": LocalSGD(epochs=5, learning_rate=0.1, batch_size=4)}
CLIENTS = app(FedProtoClient, **SGD)
CONTRACT = {
    "FedProto": Contract(partial(FedProto, network=network()), CLIENTS, personal=True),
    "FedProto by the head": Contract(
        partial(FedProto, network=network(), head="3"),
        app(FedProtoClient, predict="head", **SGD),
        personal=True,
    ),
}
MEANS, COUNTS = GLOBAL_PROTOTYPES


strategy = partial(FedProto, network=network(), **OPTIONS)


def test_prototypes_are_means_over_all_examples_of_a_class_and_clients_evaluate_by_the_nearest():
    """Eq. (6) without 1 / |N_j|: in float64 over the pooled examples, rounded to float32: 1e-6."""
    own, grid = strategy(**EVALUATED), Grid(CLIENTS)
    after = start(own, grid)
    first = {name: array for name, array in after.items() if name not in GLOBAL_PROTOTYPES}
    assert bits(first) == initial_bits()
    sums, counts = np.zeros((3, 8)), np.zeros(3, int)
    for client in range(6):
        x, y = examples(client)
        z = loaded(kept_by(own, client, 1))[:3](x).detach()
        np.add.at(sums, y.numpy(), z.double().numpy())
        np.add.at(counts, y.numpy(), 1)
        distances = (z[:, None] - torch.from_numpy(after[MEANS])).square().sum(2)
        evaluated = own.client_evaluations[client]
        accuracy = float((distances.argmin(1) == y).double().mean())
        assert evaluated["accuracy"] == pytest.approx(accuracy)
        expected = float(nn.functional.cross_entropy(-distances, y))
        assert evaluated["loss"] == pytest.approx(expected, rel=1e-5)
    assert after[COUNTS].tolist() == counts.tolist()
    np.testing.assert_allclose(after[MEANS], sums / counts[:, None], rtol=1e-6, atol=1e-6)
    prototypes = {"arrays": list(GLOBAL_PROTOTYPES)}
    first_ones = {"personal": list(network().state_dict())}  # weights travel once down, never up
    assert grid.records("down") == [prototypes | first_ones] * 6 + [prototypes] * 6
    assert grid.records("up") == [{"arrays": ["means", "counts"]}] * 6 + [{}] * 6


def test_a_class_that_no_client_of_the_round_has_keeps_its_prototype():
    """In round 2 only client 0 replies, which lacks class 2."""
    own, before = strategy(min_completed=1), start(strategy(), Grid(CLIENTS))
    silent = dict.fromkeys(range(1, 6), in_rounds(own, [2], lost))
    after = start(own, Grid(CLIENTS, changes=silent), rounds=2)
    assert after[MEANS][2].tobytes() == before[MEANS][2].tobytes()
    assert after[COUNTS].tolist() == [3, 2, before[COUNTS][2]]
    assert (after[MEANS][:2] != before[MEANS][:2]).any()


def test_without_a_pull_and_by_the_head_it_is_local_training_bit_for_bit():
    free, alone = strategy(**EVALUATED), LocalTraining(**EVALUATED)
    start(free, Grid(app(FedProtoClient, pull=0.0, predict="head", **SGD)), rounds=2)
    start(alone, Grid(app(PersonalisedClient, **SGD)), rounds=2)
    for client in range(6):
        assert bits(kept_by(free, client, 2)) == bits(kept_by(alone, client, 2))
    assert free.client_evaluations == alone.client_evaluations
    assert free.train_metrics[2]["train-loss"] == alone.train_metrics[2]["train-loss"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_arrays(lambda a: a | {"counts": a["counts"] * 1000}), "num-examples"),  # more weight
        (damaged(0, lambda a: a * 1e4), "scale"),
    ],
)
def test_false_counts_and_prototypes_far_larger_than_others_are_dropped(change, reason):
    run_as_if_lost(strategy, CLIENTS, change, reason)
