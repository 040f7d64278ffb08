"""Weighted FedAvg against its equations, its limits, and clients that come, go and attack."""

from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from torch import nn

from fedntk.clients import PersonalisedClient, SGDClient, WeightedFedAvgClient
from fedntk.ntk import FeatureMap
from fedntk.ntk.payloads import Prototypes
from fedntk.ntk.similarity import cosine_similarities, similarity_weights
from fedntk.strategies import FedBN, LocalTraining, SeededFedAvg, WeightedFedAvg

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    damaged,
    kept_by,
    network,
    run_as_if_lost,
    start,
    with_arrays,
)

LOCAL = {"learning_rate": 0.1, "batch_size": 4}
CLIENTS = app(WeightedFedAvgClient, **LOCAL)
ALL: dict[str, Any] = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
HALF: dict[str, Any] = ALL | {"fraction_train": 0.5, "min_train_nodes": 3, "seed": 1}


def weighted(**options: Any) -> WeightedFedAvg:
    return WeightedFedAvg(network=network(), **options)


CONTRACT = {
    "WeightedFedAvg": Contract(weighted, CLIENTS, personal=True),
    "WeightedFedAvg, over all, entk, personal BatchNorm": Contract(
        lambda **o: weighted(
            over="all", similarity="entk", temperature=0.1, personal_batch_norm=True, **o
        ),
        CLIENTS,
        personal=True,
    ),
}


def travelled(grid: Grid, way: str) -> list[dict[int, dict[str, dict[str, np.ndarray]]]]:
    """Each round's records of arrays, sent "down" or "up" in training, by partition."""
    train = [(w, m) for w, m in grid.seen if m.metadata.message_type == "train" and m.has_content()]
    found = []
    for own, group in groupby(train, itemgetter(0)):
        if own == way:
            of_round = {}
            for _, m in group:
                node = m.metadata.dst_node_id if way == "down" else m.metadata.src_node_id
                partition = int(grid.contexts[node].node_config["partition-id"])
                records = m.content.array_records.items()
                of_round[partition] = {name: arrays_of(record) for name, record in records}
            found.append(of_round)
    return found


def mixed(replies: dict[int, Any], weights: np.ndarray) -> dict[str, np.ndarray]:
    """The sum of some clients' weights, by loops in float64."""
    models = [reply["arrays"] for reply in replies.values()]
    total = {
        name: sum(w * own[name].astype(np.float64) for w, own in zip(weights, models, strict=True))
        for name in models[0]
    }
    return total | {"1.num_batches_tracked": np.rint(total["1.num_batches_tracked"])}


def weights_of(replies: dict[int, Any], *, absent: str = "zero", sizes: Any = None) -> np.ndarray:
    """s_kk' at a temperature of 0.2, clients in the order of the replies."""
    own = [
        Prototypes.from_arrays(reply["prototypes"], num_classes=3, width=8, max_examples=100)
        for reply in replies.values()
    ]
    similarities = cosine_similarities(own, absent=absent)
    return similarity_weights(similarities, temperature=0.2, examples=sizes)


def assert_same(found: Any, expected: Any, tolerance: float = 0) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("absent", "by_examples"), [("zero", False), ("common", True)])
def test_over_the_round_a_client_is_sent_the_mixture_of_its_last_round(absent, by_examples):
    strategy = weighted(temperature=0.2, absent=absent, by_examples=by_examples, **HALF)
    grid = Grid(CLIENTS)
    start(strategy, grid, rounds=4)
    last: dict[int, dict[str, np.ndarray]] = {}
    skipped = 0
    down, up = travelled(grid, "down"), travelled(grid, "up")
    for number, came in enumerate(up):
        came = dict(sorted(came.items()))
        sizes = [5 + k for k in came] if by_examples else None
        for k in came.keys() & last.keys():
            assert_same(down[number][k]["arrays"], last[k], 1e-6)
            skipped += k not in up[number - 1]
        for k, row in zip(came, weights_of(came, absent=absent, sizes=sizes), strict=True):
            last[k] = mixed(came, row)
    assert skipped > 0
    assert len({own["0.weight"].tobytes() for own in last.values()}) == len(last)


def test_over_all_a_client_is_mixed_from_what_everyone_last_sent():
    """Of clients not heard of nothing is known: they get the global model."""
    strategy, models = weighted(temperature=0.2, over="all", **HALF), {}

    def note(_: Any) -> None:
        models[strategy.server_round] = arrays_of(strategy.global_arrays)

    grid = Grid(CLIENTS, on_send=note)
    start(strategy, grid, rounds=4)
    known: dict[int, Any] = {}
    new = 0
    down, up = travelled(grid, "down"), travelled(grid, "up")
    for sent, came, model in zip(down, up, models.values(), strict=True):
        rows = dict(zip(known, weights_of(known), strict=True)) if known else {}
        for k, own in sent.items():
            new += bool(known) and k not in known
            assert_same(own["arrays"], mixed(known, rows[k]) if k in known else model, 1e-6)
        known = dict(sorted((known | came).items()))
    assert new > 0


@pytest.mark.parametrize("similarity", ["prototypes", "entk"])
def test_clients_with_the_same_classes_are_mixed_most(similarity):
    """Clients k and k + 3 have the same two classes: by both similarities, and in every pair."""
    strategy = weighted(similarity=similarity, temperature=0.1, num_features=20, **ALL)
    start(strategy, Grid(CLIENTS), rounds=2)
    assert strategy.mixing is not None
    weights = strategy.mixing.weights - np.eye(6)
    assert [int(np.argmax(row)) for row in weights] == [3, 4, 5, 0, 1, 2]
    strategy.prepare_config(config := ConfigRecord(), 1)
    expected = FeatureMap("last-layer") if similarity == "prototypes" else FeatureMap("entk", 20)
    assert FeatureMap.from_config(config) == expected


def test_equal_weights_of_equal_examples_are_fedavg():
    """At an infinite temperature, weighted by examples: each client's W_k is FedAvg's model.

    The result is FedAvg's mean of what came: bit for bit in the first round, where all begin alike.
    """
    fedavg, plain = Grid(app(SGDClient, **LOCAL)), SeededFedAvg(**ALL)
    expected = start(plain, fedavg, rounds=3)
    strategy, grid = weighted(temperature=np.inf, by_examples=True, **ALL), Grid(CLIENTS)
    found = start(strategy, grid, rounds=3)
    assert_same(found, expected, 1e-5)  # means in float64 and in float32, over three rounds
    for k in range(6):
        sent, other = (travelled(each, "down")[2][k]["arrays"] for each in (grid, fedavg))
        assert_same(sent, other, 1e-5)
    metrics = strategy.train_metrics[1]
    share = np.arange(5, 11) / 45  # each row of weights: the clients' shares of the examples
    assert metrics["own-weight-mean"] == pytest.approx(share.mean())
    assert metrics["effective-clients"] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    off = strategy.mixing.similarities[~np.eye(6, dtype=bool)]
    assert strategy.train_metrics[3]["similarity-mean"] == pytest.approx(off.mean())
    assert bits(start(weighted(**ALL), Grid(CLIENTS))) == bits(start(plain, fedavg))


def test_at_temperature_zero_each_client_trains_alone():
    """Its weight is exp(-(1 - cos) / tau) at most elsewhere, which is 0 in float64."""
    grid = Grid(CLIENTS)
    start(weighted(temperature=1e-6, **ALL), grid, rounds=3)
    alone = LocalTraining(**ALL)
    start(alone, Grid(app(PersonalisedClient, **LOCAL)), rounds=2)
    for k, own in travelled(grid, "down")[2].items():
        assert_same(own["arrays"], kept_by(alone, k, 2))


@pytest.mark.parametrize("over", ["round", "all"])
def test_a_state_has_all_that_models_are_mixed_from_but_for_placeholders(over):
    """Those of the examples, too, by which clients are weighted; nodes with no partition end."""
    options = {"over": over, "by_examples": True, "temperature": 0.2, **ALL}
    grid = Grid(CLIENTS, node_ids=[1, 2, 3, 4, 5, 9])
    grid.contexts[9].node_config["partition-id"] = 2
    strategy, again = weighted(**options), weighted(**options)
    start(strategy, grid, rounds=2)
    assert strategy.model_of(-10) is not None
    state = strategy.state_dict()
    assert not [name for name in state if "-10" in name]
    again.load_state_dict(state)
    assert again.model_of(-10) is None
    if over == "all":  # without the placeholder, which was mixed, too
        for own in (strategy._means, strategy._counts, strategy._models):
            del own[-10]
        strategy._mixed.clear()
    for client in range(5):
        assert bits(dict(again.model_of(client))) == bits(dict(strategy.model_of(client)))


def test_personal_batch_norm_leaves_batch_norm_at_home():
    """At an infinite temperature and weighted by examples it is FedBN."""
    fedbn = start(FedBN(network=network(), **ALL), Grid(app(PersonalisedClient, **LOCAL)), rounds=3)
    strategy = weighted(temperature=np.inf, by_examples=True, personal_batch_norm=True, **ALL)
    grid = Grid(CLIENTS)
    assert_same(start(strategy, grid, rounds=3), fedbn, 1e-5)
    shared = ["0.weight", "0.bias", "3.weight", "3.bias"]
    for way in ("down", "up"):
        assert all(records["arrays"] == shared for records in grid.records(way))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(0, lambda a: np.full_like(a, np.nan), "prototypes"), "non-finite"),
        (damaged(0, lambda a: a[:, :-1], "prototypes"), "shape"),
        (damaged(1, lambda a: a - 100, "prototypes"), "range"),
        (with_arrays(lambda a: {"means": a["means"]}, "prototypes"), "arrays"),
        (damaged(0, lambda a: a + 1e4), "scale"),
    ],
)
def test_a_bad_upload_is_dropped_and_changes_nothing_for_the_others(change, reason):
    attacked, silent = run_as_if_lost(lambda: weighted(**ALL), CLIENTS, change, reason)
    assert attacked.mixing.clients == silent.mixing.clients == (0, 1, 3, 4, 5)
    np.testing.assert_array_equal(attacked.mixing.weights, silent.mixing.weights)
    assert attacked.model_of(2) is None


def test_a_reply_is_an_outlier_by_its_distance_from_what_its_client_was_sent():
    """Client 0's own model has 40 more in each logit, which changes no probability.

    So its reply is as near to what it was sent as the others' are, and far from the global model.
    """
    strategy, again = (weighted(outlier_factor=20, **ALL) for _ in range(2))
    start(strategy, Grid(CLIENTS))
    own = dict(strategy.model_of(0))
    again.load_state_dict(
        strategy.state_dict() | {"_models.0.3.bias": own["3.bias"] + np.float32(40)}
    )
    grid = Grid(CLIENTS)
    again.start(grid, as_record(own), num_rounds=2)
    assert again.train_metrics[2]["replies-accepted"] == 6
    came_from_0, came_from_1 = (travelled(grid, "up")[0][k]["arrays"]["3.bias"] for k in (0, 1))
    assert (came_from_0 - came_from_1).min() > 39


def test_a_network_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="head: expected the name of"):
        weighted(head="1")
    with pytest.raises(ValueError, match="personal_batch_norm: the network has no BatchNorm"):
        WeightedFedAvg(network=nn.Sequential(nn.Linear(2, 2)), personal_batch_norm=True)
