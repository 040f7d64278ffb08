"""Weighted FedAvg against its equations, its limits, and clients that come, go and attack."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedntk.clients import PersonalisedClient, SGDClient, WeightedFedAvgClient
from fedntk.ntk import FeatureMap
from fedntk.ntk.averages import mixtures
from fedntk.ntk.payloads import Prototypes
from fedntk.ntk.similarity import cosine_similarities, similarity_weights
from fedntk.strategies import FedBN, LocalTraining, SeededFedAvg, WeightedFedAvg

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    bits,
    damaged,
    examples,
    failed,
    kept_by,
    network,
    start,
    with_arrays,
)

LOCAL = {"learning_rate": 0.1, "batch_size": 4}
CLIENTS = app(WeightedFedAvgClient, **LOCAL)
ALL = {"min_available_nodes": 6, "fraction_evaluate": 0.0}


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


class Uploads(Grid):
    """Notes what clients were sent and what they replied in each round, by partition."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[dict[int, dict[str, np.ndarray]]] = []
        self.came: list[dict[int, dict[str, dict[str, np.ndarray]]]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if messages and messages[0].metadata.message_type == "train":
            self.sent.append(
                {
                    self.partition(m.metadata.dst_node_id): arrays_of(m.content["arrays"])
                    for m in messages
                }
            )
            self.came.append(
                {
                    self.partition(r.metadata.src_node_id): {
                        name: arrays_of(own) for name, own in r.content.array_records.items()
                    }
                    for r in replies
                    if r.has_content()
                }
            )
        return replies

    def partition(self, node: int) -> int:
        return int(self.contexts[node].node_config["partition-id"])


def prototypes(reply: dict[str, dict[str, np.ndarray]], width: int) -> Prototypes:
    return Prototypes.from_arrays(reply["prototypes"], num_classes=3, width=width, max_examples=100)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("absent", ["zero", "common"])
@pytest.mark.parametrize("by_examples", [False, True])
def test_each_client_gets_the_mixture_that_the_equations_say(absent, by_examples):
    """What is sent in round 2 follows from the replies of round 1, by loops in float64."""
    strategy, grid = weighted(temperature=0.2, absent=absent, by_examples=by_examples, **ALL), None
    grid = Uploads(CLIENTS)
    start(strategy, grid, rounds=2)
    came = grid.came[0]
    own = [prototypes(came[k], 8) for k in range(6)]
    counts = [5 + k for k in range(6)] if by_examples else None
    weights = similarity_weights(
        cosine_similarities(own, absent=absent), temperature=0.2, examples=counts
    )
    for k in range(6):
        for name, array in grid.sent[1][k].items():
            exact = sum(
                weights[k, i] * came[i]["arrays"][name].astype(np.float64) for i in range(6)
            )
            exact = np.rint(exact) if array.dtype.kind == "i" else exact
            np.testing.assert_allclose(array, exact, rtol=1e-6, atol=1e-7)
    assert len({grid.sent[1][k]["0.weight"].tobytes() for k in range(6)}) > 1


@pytest.mark.parametrize("similarity", ["prototypes", "entk"])
def test_prototypes_are_of_the_trained_network_and_the_clients_own_examples(similarity):
    strategy, grid = weighted(similarity=similarity, num_features=20, **ALL), Uploads(CLIENTS)
    start(strategy, grid)
    kind = "last-layer" if similarity == "prototypes" else "entk"
    feature_map = FeatureMap(kind, 20, 123)
    for k in range(6):
        trained = network()
        trained.load_state_dict(
            {name: torch.tensor(a) for name, a in grid.came[0][k]["arrays"].items()}
        )
        x, y = examples(k)
        expected = Prototypes.of(feature_map.extractor(trained), x, y, 3)
        found = prototypes(grid.came[0][k], 20 if similarity == "entk" else 8)
        np.testing.assert_array_equal(found.counts, expected.counts)
        np.testing.assert_allclose(found.means, expected.means, rtol=1e-5, atol=1e-6)


def test_equal_weights_of_equal_examples_are_fedavg():
    """At an infinite temperature, weighted by examples: each client's W_k is FedAvg's model."""
    fedavg = Uploads(app(SGDClient, **LOCAL))
    expected = start(SeededFedAvg(**ALL), fedavg, rounds=3)
    strategy, grid = weighted(temperature=np.inf, by_examples=True, **ALL), Uploads(CLIENTS)
    found = start(strategy, grid, rounds=3)
    assert_same(found, expected, 1e-5)  # means in float64 and in float32, over three rounds
    for k in range(6):
        assert_same(grid.sent[2][k], fedavg.sent[2][k], 1e-5)


def test_at_temperature_zero_each_client_trains_alone():
    """Its weight is exp(-(1 - cos) / tau) at most elsewhere, which is 0 in float64."""
    grid = Uploads(CLIENTS)
    start(weighted(temperature=1e-6, **ALL), grid, rounds=3)
    alone = LocalTraining(**ALL)
    start(alone, Grid(app(PersonalisedClient, **LOCAL)), rounds=2)
    for k in range(6):
        assert_same(grid.sent[2][k], kept_by(alone, k, 2))


def test_the_result_is_fedavgs_mean_of_what_came():
    grid = Uploads(CLIENTS)
    found = start(weighted(**ALL), grid)
    fedavg = start(SeededFedAvg(**ALL), Grid(app(SGDClient, **LOCAL)))
    assert bits(found) == bits(fedavg)  # the first round begins alike for all


def test_clients_with_the_same_classes_are_mixed_most():
    """Clients k and k + 3 have the same two classes: by both similarities, and in every pair."""
    for similarity in ("prototypes", "entk"):
        strategy = weighted(similarity=similarity, temperature=0.1, **ALL)
        start(strategy, Grid(CLIENTS), rounds=3)
        assert strategy.mixing is not None
        weights = strategy.mixing.weights - np.eye(6)
        assert [int(np.argmax(row)) for row in weights] == [3, 4, 5, 0, 1, 2]


# ------------------------------------------------------------- partial participation

HALF = {
    "fraction_train": 0.5, "min_train_nodes": 3, "min_available_nodes": 6,
    "fraction_evaluate": 0.0, "seed": 1,
}  # fmt: skip


def test_over_the_round_a_client_keeps_the_model_of_its_last_round():
    strategy, grid = weighted(temperature=0.2, **HALF), Uploads(CLIENTS)
    start(strategy, grid, rounds=4)
    last: dict[int, dict[str, np.ndarray]] = {}
    skipped = 0
    for number in range(4):
        came = grid.came[number]
        clients = sorted(came)
        weights = similarity_weights(
            cosine_similarities([prototypes(came[k], 8) for k in clients]), temperature=0.2
        )
        for k in clients:
            if k in last:
                assert_same(grid.sent[number][k], last[k], 1e-6)
                skipped += k not in grid.came[number - 1]
        for row, k in zip(weights, clients, strict=True):
            last[k] = {
                name: np.asarray(
                    sum(
                        w * came[i]["arrays"][name].astype(np.float64)
                        for w, i in zip(row, clients, strict=True)
                    )
                )
                for name in came[clients[0]]["arrays"]
            }
            last[k]["1.num_batches_tracked"] = np.rint(last[k]["1.num_batches_tracked"])
    assert skipped > 0


def test_over_all_a_client_is_mixed_from_what_everyone_last_sent():
    """Of clients not heard of nothing is known: they get the global model."""
    strategy, grid = weighted(temperature=0.2, over="all", **HALF), Uploads(CLIENTS)
    globals_: list[dict[str, np.ndarray]] = []
    rounds = 4
    for number in range(1, rounds + 1):  # the global model after each number of rounds
        globals_.append(start(weighted(temperature=0.2, over="all", **HALF), Grid(CLIENTS), number))
    start(strategy, grid, rounds=rounds)
    known: dict[int, Any] = {}
    new = 0
    for number in range(rounds):
        everyone = sorted(known)
        for k in sorted(grid.sent[number]):
            if k not in known:
                new += number > 0
                if number:
                    assert_same(grid.sent[number][k], globals_[number - 1])
                continue
            own = [prototypes(known[i], 8) for i in everyone]
            row = similarity_weights(cosine_similarities(own), temperature=0.2)[everyone.index(k)]
            exact = sum(
                w * known[i]["arrays"]["0.weight"].astype(np.float64)
                for w, i in zip(row, everyone, strict=True)
            )
            np.testing.assert_allclose(
                grid.sent[number][k]["0.weight"], exact, rtol=1e-6, atol=1e-7
            )
        known |= grid.came[number]
    assert new > 0


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
        expected, found = strategy.model_of(client), again.model_of(client)
        assert expected is not None
        assert found is not None
        assert bits(dict(found)) == bits(dict(expected))


def test_a_client_with_no_feature_is_like_itself_alone():
    """Cosine 0 with the two others and 1 with itself: it keeps e / (e + 2) of its own weights."""

    def dead(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays | {"means": np.zeros_like(arrays["means"])}

    strategy = weighted(over="all", min_available_nodes=3, fraction_evaluate=0.0)
    grid = Uploads(CLIENTS, num_clients=3, changes={2: with_arrays(dead, "prototypes")})
    start(strategy, grid)
    mixed, came = strategy.model_of(2), grid.came[0]
    assert mixed is not None
    weights = np.array([1, 1, np.e]) / (2 + np.e)
    expected = sum(w * came[k]["arrays"]["0.weight"] for k, w in enumerate(weights))
    np.testing.assert_allclose(mixed["0.weight"], expected, rtol=1e-5, atol=1e-6)


def test_over_all_each_mixture_is_formed_once_a_round(monkeypatch):
    """Three of six train, and six evaluate what the next round begins with."""
    formed: list[int] = []

    def counted(weights: np.ndarray, models: list[Any]) -> Any:
        formed.append(len(weights))
        return mixtures(weights, models)

    monkeypatch.setattr("fedntk.strategies.personal.weighted_fedavg.mixtures", counted)
    options = HALF | {"fraction_evaluate": 1.0, "min_evaluate_nodes": 6}
    strategy = weighted(over="all", **options)
    grid = Uploads(CLIENTS)
    start(strategy, grid, rounds=3)
    heard: set[int] = set()
    expected = 0
    for came in grid.came:
        heard |= came.keys()
        expected += len(heard)
    assert len(formed) == expected


@pytest.mark.parametrize("over", ["round", "all"])
def test_models_on_disk_make_no_difference(over):
    results = []
    for budget in (np.inf, 0):
        strategy, grid = weighted(over=over, memory_budget=budget, **HALF), Uploads(CLIENTS)
        start(strategy, grid, rounds=4)
        results.append([{k: bits(own) for k, own in sent.items()} for sent in grid.sent])
    assert results[0] == results[1]


# --------------------------------------------------------------------- personal BatchNorm


def test_personal_batch_norm_leaves_batch_norm_at_home():
    """At an infinite temperature and weighted by examples it is FedBN."""
    fedbn = start(FedBN(network=network(), **ALL), Grid(app(PersonalisedClient, **LOCAL)), rounds=3)
    strategy = weighted(temperature=np.inf, by_examples=True, personal_batch_norm=True, **ALL)
    grid = Uploads(CLIENTS)
    assert_same(start(strategy, grid, rounds=3), fedbn, 1e-5)
    shared = ["0.weight", "0.bias", "3.weight", "3.bias"]
    for sent, came in zip(grid.sent, grid.came, strict=True):
        assert all(list(own) == shared for own in sent.values())
        assert all(list(own["arrays"]) == shared for own in came.values())


# -------------------------------------------------------------------------- bad replies


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
    strategy, grid = weighted(**ALL), Uploads(CLIENTS, changes={2: change})
    start(strategy, grid, rounds=1)
    assert strategy.train_metrics[1][f"rejected-{reason}"] == 1
    silent = weighted(**ALL)
    start(silent, Grid(CLIENTS, changes={2: failed}), rounds=1)
    assert strategy.mixing is not None
    assert silent.mixing is not None
    assert strategy.mixing.clients == silent.mixing.clients == (0, 1, 3, 4, 5)
    np.testing.assert_array_equal(strategy.mixing.weights, silent.mixing.weights)
    assert strategy.model_of(2) is None


def test_a_reply_is_an_outlier_by_its_distance_from_what_its_client_was_sent():
    """Client 0's own model has 40 more in each logit, which changes no probability.

    So its reply is as near to what it was sent as the others' are, and far from the global model.
    """
    strategy = weighted(outlier_factor=20, **ALL)
    grid = Grid(CLIENTS)
    start(strategy, grid, rounds=1)
    own = strategy.model_of(0)
    assert own is not None
    state = strategy.state_dict()
    state["_models.0.3.bias"] = own["3.bias"] + np.float32(40)
    again = weighted(outlier_factor=20, **ALL)
    again.load_state_dict(state)
    came = Uploads(CLIENTS)
    record = ArrayRecord({name: Array(np.asarray(a)) for name, a in own.items()})
    again.start(came, record, num_rounds=2)
    assert again.train_metrics[2]["replies-accepted"] == 6
    came_from_0, came_from_1 = (came.came[0][k]["arrays"]["3.bias"] for k in (0, 1))
    assert (came_from_0 - came_from_1).min() > 39


# ---------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "1"}, "head: expected the name of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        weighted(**options)
    plain = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="personal_batch_norm: the network has no BatchNorm"):
        WeightedFedAvg(network=plain, personal_batch_norm=True)


def test_metrics_of_the_mixing():
    strategy = weighted(temperature=np.inf, **ALL)
    start(strategy, Grid(CLIENTS))
    metrics = strategy.train_metrics[1]
    assert metrics["own-weight-mean"] == pytest.approx(1 / 6)
    assert metrics["effective-clients"] == pytest.approx(6)
    assert strategy.mixing is not None
    off = strategy.mixing.similarities[~np.eye(6, dtype=bool)]
    assert metrics["similarity-mean"] == pytest.approx(off.mean())
