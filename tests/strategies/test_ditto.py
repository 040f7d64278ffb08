"""Ditto: the global model is FedAvg's, and a client's own lies between local training and it."""

from logging import WARNING

import pytest
import torch
from torch import nn

from fedntk.clients import DittoClient, LocalSGD, NamedArrays, PersonalisedClient, SGDClient
from fedntk.strategies import Ditto, LocalTraining, SeededFedAvg

from .federation import Contract, Grid, app, bits, examples, forgetting, kept_by, loaded, start

OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
EVALUATED = {"min_available_nodes": 6, "fraction_evaluate": 1.0, "min_evaluate_nodes": 6}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS, PLAIN = app(DittoClient, **SGD), app(SGDClient, **SGD)
CONTRACT = {"Ditto": Contract(Ditto, CLIENTS, personal=True)}


def test_the_global_model_is_fedavgs_and_the_own_one_without_a_pull_local_trainings():
    ditto, alone = Ditto(**OPTIONS), LocalTraining(**OPTIONS)
    after = start(ditto, Grid(app(DittoClient, pull=0.0, **SGD)), rounds=3)
    start(alone, Grid(app(PersonalisedClient, **SGD)), rounds=3)
    for client in range(6):
        assert bits(kept_by(ditto, client, 3)) == bits(kept_by(alone, client, 3))
    assert ditto.train_metrics[3]["restarted"] == 0
    expected = start(SeededFedAvg(**OPTIONS), Grid(PLAIN), rounds=3)
    assert bits(after) == bits(expected)


def test_one_that_lost_its_model_begins_again_with_the_global_one_and_says_so(caplog):
    """All lose it in each round: v is what one round makes of the weights, which are FedAvg's."""
    forgetful = Ditto(**OPTIONS)
    with caplog.at_level(WARNING, "flwr"):
        after = start(forgetful, Grid(CLIENTS, changes={5: forgetting(forgetful, 3)}), rounds=3)
    said = "the personal model is lost: it begins again with the global weights"
    assert [record.getMessage() for record in caplog.records].count(said) == 12  # rounds 2 and 3
    assert forgetful.train_metrics[3]["restarted"] == 1
    two, three = (start(SeededFedAvg(**OPTIONS), Grid(PLAIN), rounds) for rounds in (2, 3))
    assert bits(after) == bits(three)
    own = DittoClient(loaded(two), *examples(4), seed=(0, 4), **SGD)
    config = {"server-round": 3, "personal-run": "single", "client-id": "4"}
    own.fit(NamedArrays({"arrays": two}), config)
    assert bits(own.load_personal(config | {"personal-round": 3})) == bits(kept_by(forgetful, 4, 3))


def test_clients_evaluate_their_own_model_and_the_global_one_before_they_have_one():
    strategy = Ditto(**EVALUATED, fraction_train=0.5, min_train_nodes=3)
    arrays = start(strategy, grid := Grid(CLIENTS))
    assert len(grid.trained) == 3
    for client in range(6):
        x, y = examples(client)
        weights = kept_by(strategy, client, 1) if client in grid.trained else arrays
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(loaded(weights)(x), y))
        assert strategy.client_evaluations[client]["loss"] == pytest.approx(loss, rel=1e-5)
