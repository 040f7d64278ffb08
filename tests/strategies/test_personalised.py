"""Partial personalisation: what stays with clients, what travels, and what a loss of it costs."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from fedntk.clients import (
    DittoClient,
    FedEnsembleClient,
    FedProtoClient,
    LocalSGD,
    PersonalisedClient,
    SGDClient,
    WeightedFedAvgClient,
    cache_dir,
)
from fedntk.strategies import (
    NTKDFL,
    DFedAvg,
    Ditto,
    FedEnsemble,
    FedProto,
    LocalTraining,
    PersonalisedStrategy,
    SeededFedAvg,
    WeightedFedAvg,
)

from .federation import (
    Contract,
    Grid,
    app,
    bits,
    damaged,
    failed,
    in_rounds,
    kept_by,
    network,
    start,
    with_metrics,
)

NORM = tuple(name for name in network().state_dict() if name.startswith("1."))
CLIENTS = app(PersonalisedClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
PLAIN = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
EVALUATED = {"min_available_nodes": 6, "min_evaluate_nodes": 6, "fraction_evaluate": 1.0}
ALONE = {"min_available_nodes": 1, "min_train_nodes": 1, "fraction_evaluate": 0.0}


def personal(**options):
    return PersonalisedStrategy(**{"personal": NORM, **OPTIONS, **options})


CONTRACT = {"PersonalisedStrategy": Contract(personal, CLIENTS, personal=True)}


def folders(strategy):
    return sorted((cache_dir() / "personal").glob(f"client-*/run-{strategy.trained.run_key}*"))


def test_with_nothing_personal_it_is_fedavg_and_personal_arrays_travel_once_down_and_never_up():
    expected = start(SeededFedAvg(**OPTIONS), Grid(PLAIN), rounds=2)
    assert bits(start(personal(personal=()), Grid(CLIENTS), rounds=2)) == bits(expected)
    shared = {"arrays": [name for name in network().state_dict() if name not in NORM]}
    start(personal(), grid := Grid(CLIENTS), rounds=2)
    assert grid.records("down") == [shared | {"personal": list(NORM)}] * 6 + [shared] * 6
    assert grid.records("up") == [shared] * 12


def test_a_clients_own_arrays_are_those_it_trained_and_the_result_holds_the_first_ones():
    """Client 0 alone: two rounds are two visits of SGD on the whole network, one after another."""
    strategy, first = personal(**ALONE), network().state_dict()
    after = start(strategy, Grid(CLIENTS, num_clients=1), rounds=2)
    plain = start(SeededFedAvg(**ALONE), Grid(PLAIN, num_clients=1), rounds=2)
    own = kept_by(strategy, 0, 2)
    assert bits(own) == bits({name: plain[name] for name in NORM})
    expected = plain | {name: first[name].numpy() for name in NORM}
    assert bits(after) == bits(expected)


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_client_that_lost_its_own_arrays_starts_from_the_first_ones_in_the_same_round(stage):
    strategy, lost = personal(**EVALUATED), list[Path]()

    def lose(messages):
        kinds = {message.metadata.message_type for message in messages}
        if kinds == {stage} and strategy.server_round == 3 and not lost:
            lost.extend(folders(strategy))
            for folder in lost:
                shutil.rmtree(folder)

    grid = Grid(CLIENTS, on_send=lose)
    start(strategy, grid, rounds=3)
    assert strategy.train_metrics[3]["replies-accepted"] == 6
    assert strategy.evaluate_metrics[3]["replies-accepted"] == 6
    assert sum("personal" in found for found in grid.records("down")) == 12
    assert grid.exchanges[-2:] == [(stage, 6), ("evaluate", 6)]


def test_replies_that_are_not_used_claim_no_partition():
    """Node 3 says with node 6's partition that it lost its arrays, node 2 with node 1's it is far
    out; node 4 lost something that it is sent again, so that a second exchange comes between.
    """

    def says_lost(said, partition):
        told = {"lost-state": said, "num-examples": 1, "partition-id": partition}
        content = RecordDict({"metrics": MetricRecord(told)})
        seen = []

        def change(reply):
            if not seen:
                reply.content = content
            seen.append(reply)
            return reply

        return change

    far, claim = damaged(0, lambda a: a + np.float32(1e6)), with_metrics(partition_id=0)
    strategy = personal()
    odd = {1: lambda reply: far(claim(reply)), 2: says_lost(1, 5), 3: says_lost(0, 3)}
    grid = Grid(CLIENTS, changes={k: in_rounds(strategy, [1], own) for k, own in odd.items()})
    start(strategy, grid, rounds=2)
    assert [strategy.train_metrics[k]["replies-accepted"] for k in (1, 2)] == [4, 6]
    assert strategy.channel.registry.clients() == set(range(6))


@pytest.mark.parametrize(
    ("make", "clients"),
    [
        (personal, CLIENTS),
        (Ditto, app(DittoClient)),
        (partial(FedProto, network=network()), app(FedProtoClient)),
    ],
)
def test_a_reply_that_is_lost_leaves_both_parts_of_the_client_as_they_were(make, clients):
    """Client 2's reply of round 2 is lost: in round 3 its own arrays are those of round 1."""
    strategy = make(**OPTIONS)
    grid = Grid(clients, changes={2: in_rounds(strategy, [2], failed)})
    start(strategy, grid, rounds=3)
    asked = [m.content["config"].get("personal-round") for way, m in grid.seen if way == "down"]
    assert asked == [None] * 6 + [1] * 6 + [2, 2, 1, 2, 2, 2]
    assert strategy.trained.last == dict.fromkeys(range(6), 3)


def test_a_client_whose_replies_are_refused_for_long_goes_on_from_the_last_one_taken(monkeypatch):
    """Its files are too large for more than two rounds, and four replies in a row are lost."""
    monkeypatch.setattr("fedntk.clients.core.disk_store.KEPT_BYTES", 0)
    strategy = personal()
    grid = Grid(CLIENTS, changes={2: in_rounds(strategy, range(2, 6), failed)})
    start(strategy, grid, rounds=6)
    assert strategy.train_metrics[6]["replies-accepted"] == 6
    assert sum("personal" in found for found in grid.records("down")) == 6


def test_two_nodes_that_claim_one_partition_keep_what_is_theirs_apart():
    """Nodes 3 and 9 of one machine say 2. The second is client -10, which ends with its node."""
    grid = Grid(CLIENTS, num_clients=4, node_ids=[1, 2, 3, 9])
    grid.contexts[9].node_config["partition-id"] = 2
    strategy = LocalTraining(min_available_nodes=4, fraction_evaluate=0.0)
    start(strategy, grid, rounds=3)
    assert strategy.train_metrics[3]["replies-accepted"] == 4
    assert strategy.trained.last == {-10: 3, 0: 3, 1: 3, 2: 3}
    assert strategy.state_dict()["trained.last"] == {"0": 3, "1": 3, "2": 3}
    names = [path.relative_to(cache_dir() / "personal") for path in folders(strategy)]
    runs = [f"client-{own}/run-{strategy.trained.run_key}" for own in (0, 1, 2, 2)]
    assert [str(name) for name in names] == [*runs[:3], f"{runs[3]}-9"]


@pytest.mark.parametrize(
    ("make", "clients"),
    [
        (partial(WeightedFedAvg, network=network()), app(WeightedFedAvgClient)),
        (FedEnsemble, app(lambda *given, **own: FedEnsembleClient(SGDClient(*given, **own)))),
    ],
)
def test_names_of_records_are_the_strategys_choice(make, clients):
    expected = start(plain := make(**EVALUATED), Grid(clients), rounds=2)
    strategy = make(arrayrecord_key="weights", configrecord_key="settings", **EVALUATED)
    assert bits(start(strategy, Grid(clients), rounds=2)) == bits(expected)
    assert strategy.evaluate_metrics[2]["replies-accepted"] == 6
    assert dict(strategy.evaluate_metrics[2]) == dict(plain.evaluate_metrics[2])


def test_names_that_the_network_lacks_are_refused_before_the_first_round():
    with pytest.raises(ValueError, match=r"personal: the network has no arrays named \['nowhere"):
        start(personal(personal=["3.weight", "nowhere.bias"]), Grid(CLIENTS))


@pytest.mark.parametrize("kind", [PersonalisedStrategy, DFedAvg, NTKDFL])
def test_an_ensemble_of_what_clients_keep_to_themselves_is_refused(kind):
    """The server's models are first weights, wholly or in part, or a mean of the clients'."""
    with pytest.raises(ValueError, match=rf"{kind.__name__} cannot work within a FedEnsemble"):
        FedEnsemble(inner=kind, num_models=2)
