"""Methods whose clients keep arrays to themselves: what stays, what travels, what a loss costs."""

import shutil
from functools import partial
from logging import WARNING
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from torch import nn

from fedntk.clients import (
    DittoClient,
    FedBABUClient,
    FedEnsembleClient,
    FedProtoClient,
    FedRepClient,
    LocalSGD,
    NamedArrays,
    PersonalisedClient,
    SGDClient,
    WeightedFedAvgClient,
    cache_dir,
)
from fedntk.ntk.parts import batch_norm_arrays, head_arrays
from fedntk.ntk.payloads.prototypes import GLOBAL_PROTOTYPES
from fedntk.strategies import (
    NTKDFL,
    DFedAvg,
    Ditto,
    FedBABU,
    FedBN,
    FedEnsemble,
    FedPer,
    FedProto,
    FedRep,
    LocalTraining,
    PersonalisedStrategy,
    SeededFedAvg,
    WeightedFedAvg,
)

from ..conftest import refused
from .federation import (
    Contract,
    Grid,
    app,
    bits,
    damaged,
    examples,
    failed,
    forgetting,
    in_rounds,
    initial_bits,
    kept_by,
    loaded,
    lost,
    network,
    run_as_if_lost,
    start,
    told,
    with_arrays,
    with_metrics,
)

NORM = tuple(name for name in network().state_dict() if name.startswith("1."))
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS, PLAIN, DITTOS = (app(kind, **SGD) for kind in (PersonalisedClient, SGDClient, DittoClient))
LONGER = {"sgd": LocalSGD(epochs=5, learning_rate=0.1, batch_size=4)}
PROTOS = app(FedProtoClient, **LONGER)
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
EVALUATED = {"min_available_nodes": 6, "min_evaluate_nodes": 6, "fraction_evaluate": 1.0}
ALONE = {"min_available_nodes": 1, "min_train_nodes": 1, "fraction_evaluate": 0.0}
MEANS, COUNTS = GLOBAL_PROTOTYPES


def personal(**options):
    return PersonalisedStrategy(**{"personal": NORM, **OPTIONS, **options})


def fed_proto(**options):
    return FedProto(network=network(), **OPTIONS | options)


contract = partial(Contract, personal=True)
CONTRACT = {
    "PersonalisedStrategy": contract(personal, CLIENTS),
    "FedBN": contract(partial(FedBN, network=network()), CLIENTS),
    "FedRep": contract(partial(FedRep, network=network()), app(FedRepClient, **SGD)),
    "FedBABU": contract(FedBABU, app(FedBABUClient, **SGD)),
    "FedPer": contract(partial(FedPer, network=network()), CLIENTS),
    "LocalTraining": contract(LocalTraining, CLIENTS, sends_arrays=False),
    "Ditto": contract(Ditto, DITTOS),
    "FedProto": contract(partial(FedProto, network=network()), PROTOS),
    "FedProto by the head": contract(
        partial(FedProto, network=network(), head="3"),
        app(FedProtoClient, predict="head", **LONGER),
    ),
}


def folders(strategy):
    return sorted((cache_dir() / "personal").glob(f"client-*/run-{strategy.trained.run_key}*"))


def fed_avgs(rounds, num_clients=6):
    """Weights of FedAvg, with one client those of its SGD."""
    options = OPTIONS if num_clients == 6 else ALONE
    return start(SeededFedAvg(**options), Grid(PLAIN, num_clients=num_clients), rounds)


# ------------------------------------------------------------------- which arrays are whose


def test_with_nothing_personal_it_is_fedavg_and_personal_arrays_travel_once_down_and_never_up():
    assert bits(start(personal(personal=()), Grid(CLIENTS), rounds=2)) == bits(fed_avgs(2))
    shared = {"arrays": [name for name in network().state_dict() if name not in NORM]}
    start(personal(), grid := Grid(CLIENTS), rounds=2)
    assert grid.records("down") == [shared | {"personal": list(NORM)}] * 6 + [shared] * 6
    assert grid.records("up") == [shared] * 12


def test_a_clients_own_arrays_are_those_it_trained_and_the_result_holds_the_first_ones():
    """Client 0 by itself: rounds are visits of SGD on the whole network, one after another."""
    strategy, everything = personal(**ALONE), LocalTraining(**ALONE)
    after = start(strategy, Grid(CLIENTS, num_clients=1), rounds=2)
    plain, first = fed_avgs(2, 1), network().state_dict()
    assert bits(kept_by(strategy, 0, 2)) == bits({name: plain[name] for name in NORM})
    assert bits(after) == bits(plain | {name: first[name].numpy() for name in NORM})
    assert bits(start(everything, Grid(CLIENTS, num_clients=2), rounds=3)) == initial_bits()
    assert bits(kept_by(everything, 0, 3)) == bits(fed_avgs(3, 1))


def test_batch_norm_is_what_stays_in_fed_bn_whatever_its_name_and_depth():
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    whole = nn.ModuleDict({"body": inner, "norm": nn.BatchNorm1d(3, affine=False)})
    whole["group"] = nn.GroupNorm(1, 2)
    assert batch_norm_arrays(whole) == (
        "body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var",
        "body.1.num_batches_tracked", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked",
    )  # fmt: skip
    assert batch_norm_arrays(nn.BatchNorm1d(2))[:2] == ("weight", "bias")
    assert FedBN(network=network()).personal == NORM
    without = nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))
    refused("expected one with BatchNorm layers", FedBN, network=without)


def test_the_head_of_fed_per_is_the_last_linear_layer_or_the_one_that_is_named():
    assert head_arrays(nn.Linear(2, 3, bias=False)) == ("weight",)
    assert FedPer(network=network()).personal == ("3.weight", "3.bias")
    assert FedPer(network=network(), head="0").personal == ("0.weight", "0.bias")
    refused(r"head: expected the name of .*, got '1'", FedPer, network=network(), head="1")


def test_names_that_the_network_lacks_are_refused_before_the_first_round():
    strategy = personal(personal=["3.weight", "nowhere.bias"])
    said = r"personal: the network has no arrays named \['nowhere"
    refused(said, start, strategy, Grid(CLIENTS))


@pytest.mark.parametrize("kind", [PersonalisedStrategy, DFedAvg, NTKDFL])
def test_an_ensemble_of_what_clients_keep_to_themselves_is_refused(kind):
    """The server's models are first weights, wholly or in part, or a mean of the clients'."""
    said = rf"{kind.__name__} cannot work within a FedEnsemble"
    refused(said, FedEnsemble, inner=kind, num_models=2)


@pytest.mark.parametrize(
    ("make", "clients"),
    [
        (partial(WeightedFedAvg, network=network()), app(WeightedFedAvgClient)),
        (FedEnsemble, app(lambda *data, **more: FedEnsembleClient(SGDClient(*data, **more)))),
    ],
)
def test_names_of_records_are_the_strategys_choice(make, clients):
    expected = start(plain := make(**EVALUATED), Grid(clients), rounds=2)
    strategy = make(arrayrecord_key="weights", configrecord_key="settings", **EVALUATED)
    assert bits(start(strategy, Grid(clients), rounds=2)) == bits(expected)
    assert strategy.evaluate_metrics[2]["replies-accepted"] == 6
    assert dict(strategy.evaluate_metrics[2]) == dict(plain.evaluate_metrics[2])


# --------------------------------------------------------------------- what gets lost


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_client_that_lost_its_own_arrays_starts_from_the_first_ones_in_the_same_round(stage):
    strategy, gone = personal(**EVALUATED), list[Path]()

    def lose(messages):
        kinds = {message.metadata.message_type for message in messages}
        if kinds == {stage} and strategy.server_round == 3 and not gone:
            gone.extend(folders(strategy))
            for folder in gone:
                shutil.rmtree(folder)

    start(strategy, grid := Grid(CLIENTS, on_send=lose), rounds=3)
    assert told(strategy) == [6] * 3
    assert strategy.evaluate_metrics[3]["replies-accepted"] == 6
    assert sum("personal" in records for records in grid.records("down")) == 12
    assert grid.exchanges[-2:] == [(stage, 6), ("evaluate", 6)]


def test_replies_that_are_not_used_claim_no_partition():
    """Node 3 says with node 6's partition that it lost its arrays, node 2 with node 1's it is far
    out; node 4 lost something that it is sent again, so that a second exchange comes between.
    """

    def says_lost(said, partition):
        metrics = {"lost-state": said, "num-examples": 1, "partition-id": partition}
        contents = [RecordDict({"metrics": MetricRecord(metrics)})]

        def change(reply):
            if contents:
                reply.content = contents.pop()
            return reply

        return change

    far, claim = damaged(0, lambda a: a + np.float32(1e6)), with_metrics(partition_id=0)
    strategy, grid = personal(), Grid(CLIENTS)
    changes = {1: lambda reply: far(claim(reply)), 2: says_lost(1, 5), 3: says_lost(0, 3)}
    grid.changes = {k: in_rounds(strategy, [1], change) for k, change in changes.items()}
    start(strategy, grid, rounds=2)
    assert told(strategy) == [4, 6]
    assert strategy.channel.registry.clients() == set(range(6))


@pytest.mark.parametrize(
    ("make", "clients"), [(personal, CLIENTS), (Ditto, DITTOS), (fed_proto, PROTOS)]
)
def test_a_reply_that_is_lost_leaves_both_parts_of_the_client_as_they_were(make, clients):
    """Client 2's reply of round 2 is lost: in round 3 its own arrays are those of round 1."""
    strategy, grid = make(**OPTIONS), Grid(clients)
    grid.changes = {2: in_rounds(strategy, [2], failed)}
    start(strategy, grid, rounds=3)
    asked = [m.content["config"].get("personal-round") for way, m in grid.seen if way == "down"]
    assert asked == [None] * 6 + [1] * 6 + [2, 2, 1, 2, 2, 2]
    assert strategy.trained.last == dict.fromkeys(range(6), 3)


def test_a_client_whose_replies_are_refused_for_long_goes_on_from_the_last_one_taken(monkeypatch):
    """Its files are too large for more than two rounds, and four replies in a row are lost."""
    monkeypatch.setattr("fedntk.clients.core.disk_store.KEPT_BYTES", 0)
    strategy, grid = personal(), Grid(CLIENTS)
    grid.changes = {2: in_rounds(strategy, range(2, 6), failed)}
    start(strategy, grid, rounds=6)
    assert told(strategy)[-1] == 6
    assert sum("personal" in records for records in grid.records("down")) == 6


def test_two_nodes_that_claim_one_partition_keep_what_is_theirs_apart():
    """Nodes 3 and 9 of one machine say 2. The second is client -10, which ends with its node."""
    grid = Grid(CLIENTS, num_clients=4, node_ids=[1, 2, 3, 9])
    grid.contexts[9].node_config["partition-id"] = 2
    strategy = LocalTraining(min_available_nodes=4, fraction_evaluate=0.0)
    start(strategy, grid, rounds=3)
    assert told(strategy)[-1] == 4
    assert strategy.trained.last == {-10: 3, 0: 3, 1: 3, 2: 3}
    assert strategy.state_dict()["trained.last"] == {"0": 3, "1": 3, "2": 3}
    names = [str(path.relative_to(cache_dir() / "personal")) for path in folders(strategy)]
    runs = [f"client-{client}/run-{strategy.trained.run_key}" for client in (0, 1, 2, 2)]
    assert names == [*runs[:3], f"{runs[3]}-9"]


# ---------------------------------------------------------------------- FedRep and FedBABU


def test_fed_babu_is_fedavg_of_a_network_with_a_frozen_head_and_fed_rep_if_heads_are_not_trained():
    """Bit for bit; FedRep's heads then stay the first ones, with each client."""

    def frozen(model, *data, **options):
        model[3].requires_grad_(False)
        return SGDClient(model, *data, **options)

    babu = start(FedBABU(**OPTIONS), Grid(app(FedBABUClient, **SGD)), rounds=2)
    assert bits(babu) == bits(start(SeededFedAvg(**OPTIONS), Grid(app(frozen, **SGD)), rounds=2))
    clients = app(FedRepClient, head_epochs=0, **SGD)
    assert bits(start(FedRep(network=network(), **OPTIONS), Grid(clients), 2)) == bits(babu)


# -------------------------------------------------------------------------------- Ditto


def test_dittos_global_model_is_fedavgs_and_the_own_one_without_a_pull_local_trainings():
    ditto, alone = Ditto(**OPTIONS), LocalTraining(**OPTIONS)
    after = start(ditto, Grid(app(DittoClient, pull=0.0, **SGD)), rounds=3)
    start(alone, Grid(CLIENTS), rounds=3)
    for client in range(6):
        assert bits(kept_by(ditto, client, 3)) == bits(kept_by(alone, client, 3))
    assert ditto.train_metrics[3]["restarted"] == 0
    assert bits(after) == bits(fed_avgs(3))


def test_one_that_lost_its_model_begins_again_with_the_global_one_and_says_so(caplog):
    """All lose it in each round: v is what one round makes of the weights, which are FedAvg's."""
    forgetful = Ditto(**OPTIONS)
    with caplog.at_level(WARNING, "flwr"):
        after = start(forgetful, Grid(DITTOS, changes={5: forgetting(forgetful, 3)}), rounds=3)
    said = "the personal model is lost: it begins again with the global weights"
    assert caplog.messages.count(said) == 12  # rounds 2 and 3
    assert forgetful.train_metrics[3]["restarted"] == 1
    two = fed_avgs(2)
    assert bits(after) == bits(fed_avgs(3))
    client = DittoClient(loaded(two), *examples(4), seed=(0, 4), **SGD)
    config = {"server-round": 3, "personal-run": "single", "client-id": "4"}
    client.fit(NamedArrays({"arrays": two}), config)
    model = client.load_personal(config | {"personal-round": 3})
    assert bits(model) == bits(kept_by(forgetful, 4, 3))


def test_clients_evaluate_their_own_model_and_the_global_one_before_they_have_one():
    strategy = Ditto(**EVALUATED, fraction_train=0.5, min_train_nodes=3)
    arrays = start(strategy, grid := Grid(DITTOS))
    assert len(grid.trained) == 3
    for client in range(6):
        x, y = examples(client)
        weights = kept_by(strategy, client, 1) if client in grid.trained else arrays
        loss = float(nn.functional.cross_entropy(loaded(weights)(x), y).detach())
        assert strategy.client_evaluations[client]["loss"] == pytest.approx(loss, rel=1e-5)


# ----------------------------------------------------------------------------- FedProto


def test_prototypes_are_means_over_all_examples_of_a_class_and_clients_evaluate_by_the_nearest():
    """Eq. (6) without 1 / |N_j|: in float64 over the pooled examples, rounded to float32: 1e-6."""
    strategy, grid = fed_proto(**EVALUATED), Grid(PROTOS)
    after = start(strategy, grid)
    first = {name: array for name, array in after.items() if name not in GLOBAL_PROTOTYPES}
    assert bits(first) == initial_bits()
    sums, counts = np.zeros((3, 8)), np.zeros(3, int)
    for client in range(6):
        x, y = examples(client)
        z = loaded(kept_by(strategy, client, 1))[:3](x).detach()
        np.add.at(sums, y.numpy(), z.double().numpy())
        np.add.at(counts, y.numpy(), 1)
        distances = (z[:, None] - torch.from_numpy(after[MEANS])).square().sum(2)
        evaluated = strategy.client_evaluations[client]
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
    strategy, before = fed_proto(min_completed=1), start(fed_proto(), Grid(PROTOS))
    silent = dict.fromkeys(range(1, 6), in_rounds(strategy, [2], lost))
    after = start(strategy, Grid(PROTOS, changes=silent), rounds=2)
    assert after[MEANS][2].tobytes() == before[MEANS][2].tobytes()
    assert after[COUNTS].tolist() == [3, 2, before[COUNTS][2]]
    assert (after[MEANS][:2] != before[MEANS][:2]).any()


def test_fed_proto_without_a_pull_and_by_the_head_is_local_training_bit_for_bit():
    free, alone = fed_proto(**EVALUATED), LocalTraining(**EVALUATED)
    start(free, Grid(app(FedProtoClient, pull=0.0, predict="head", **LONGER)), rounds=2)
    start(alone, Grid(app(PersonalisedClient, **LONGER)), rounds=2)
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
    run_as_if_lost(fed_proto, PROTOS, change, reason)
