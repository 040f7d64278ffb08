"""Weighted FedAvg against its equations, its limits, and clients that come, go and attack."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedntk.clients import LocalSGD, PersonalisedClient, SGDClient, WeightedFedAvgClient
from fedntk.ntk import FeatureMap
from fedntk.ntk.averages import mixtures
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.similarity import cosine_similarities, similarity_weights
from fedntk.strategies import (
    FedBN,
    LocalTraining,
    Sampling,
    Screening,
    SeededFedAvg,
    WeightedFedAvg,
)
from fedntk.strategies.personal.client_models import ClientModels

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    assert_near,
    bits,
    damaged,
    kept_by,
    network,
    run_as_if_lost,
    start,
)

LOCAL = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS = app(WeightedFedAvgClient, **LOCAL)
ALL = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
HALF = ALL | {"fraction_train": 0.5, "min_train_nodes": 3, "sampling": Sampling(seed=1)}
weighted = partial(WeightedFedAvg, network=network())
OVER_ALL = {"over": "all", "similarity": "entk", "temperature": 0.1, "by_examples": True}
CONTRACT = {
    "WeightedFedAvg": Contract(weighted, CLIENTS, personal=True),
    "WeightedFedAvg, over all, entk, personal BatchNorm": Contract(
        partial(weighted, personal_batch_norm=True, **OVER_ALL), CLIENTS, personal=True
    ),
}


def travelled(grid, way):
    """Each round's records of arrays, sent "down" or "up" in training, by partition."""
    rounds, before = [], "up"
    for now, message in grid.seen:
        if message.metadata.message_type != "train":
            continue
        if (before, now) == ("up", "down"):
            rounds.append({})
        if now == way:
            meta, records = message.metadata, message.content.array_records.items()
            node = meta.dst_node_id if way == "down" else meta.src_node_id
            rounds[-1][node - 1] = {name: arrays_of(record) for name, record in records}
        before = now
    return rounds


def mixed(replies, weights):
    """The sum of some clients' weights, by loops in float64."""
    models = [reply["arrays"] for reply in replies.values()]
    pairs = list(zip(weights, models, strict=True))
    total = {n: sum(w * model[n].astype(np.float64) for w, model in pairs) for n in models[0]}
    return total | {"1.num_batches_tracked": np.rint(total["1.num_batches_tracked"])}


def weights_of(replies, absent, *, by_examples):
    """s_kk' at a temperature of 0.2, clients in the order of the replies."""
    form = {"num_classes": 3, "width": 8, "max_examples": 100}
    sent = [Prototypes.from_arrays(reply["prototypes"], **form) for reply in replies.values()]
    similarities = cosine_similarities(sent, absent=absent)
    sizes = [5 + k for k in replies] if by_examples else None
    return similarity_weights(similarities, temperature=0.2, examples=sizes)


@pytest.mark.parametrize("over", ["round", "all"])
@pytest.mark.parametrize(("absent", "by_examples"), [("zero", False), ("common", True)])
def test_a_client_is_sent_the_mixture_of_its_last_round_or_of_what_all_last_sent(
    over, absent, by_examples
):
    """Of clients not heard of nothing is known: they get the global model."""
    options = {"over": over, "absent": absent, "by_examples": by_examples, **HALF}
    strategy, models = weighted(temperature=0.2, **options), {}

    def note(_):
        models[strategy.server_round] = arrays_of(strategy.global_arrays)

    grid, last, pool, met = Grid(CLIENTS, on_send=note), {}, {}, set()
    start(strategy, grid, rounds=4)
    rounds = zip(travelled(grid, "down"), travelled(grid, "up"), models.values(), strict=True)
    for sent, came, model in rounds:
        for k, records in sent.items():
            assert_near(records["arrays"], last.get(k, model), 1e-6, 1e-6)
            met.add((bool(last), k in last, k in pool))
        pool = dict(sorted((pool | came if over == "all" else came).items()))
        rows = weights_of(pool, absent, by_examples=by_examples)
        last |= {k: mixed(pool, row) for k, row in zip(pool, rows, strict=True)}
    assert met >= {(True, False, False), (True, True, over == "all")}
    assert len({arrays["0.weight"].tobytes() for arrays in last.values()}) == len(last)


@pytest.mark.parametrize("over", ["round", "all"])
def test_a_client_that_never_trained_is_sent_a_mixture_by_its_prototypes(over):
    """The softmax of the cosines mixes all models; with a bad reply it gets the round's mean."""
    options = HALF | {"sampling": Sampling(seed=1, held_out=(2, 5)), "fraction_evaluate": 1.0}
    make = partial(weighted, over=over, first_model="prototypes", temperature=0.2, **options)
    strategy, restored = make(), make()

    def answer(message, context):
        reply = CLIENTS(message, context)
        if context.node_config["partition-id"] == 2 and "prototypes" in reply.content:
            reply.content["prototypes"] = as_record({"means": np.full((3, 8), np.nan)})
        return reply

    grid = Grid(answer)
    result = start(strategy, grid, rounds=3)
    form = {"num_classes": 3, "width": 8, "max_examples": 100}
    last: dict[int, Prototypes] = {}
    for way, message in grid.seen:
        if way == "up" and message.metadata.src_node_id != 3 and "prototypes" in message.content:
            arrays = arrays_of(message.content["prototypes"])
            last[message.metadata.src_node_id - 1] = Prototypes.from_arrays(arrays, **form)
    first = last.pop(5)
    cosines = np.array([cosine_similarities([first, p])[0, 1] for _, p in sorted(last.items())])
    weights = np.exp(cosines / 0.2) / np.exp(cosines / 0.2).sum()
    models = {k: {"arrays": strategy.models[k]} for k in sorted(last)}
    assert sorted(strategy.models) == sorted(last)
    assert_near(strategy.model_of(5), mixed(models, weights), 1e-6, 1e-6)
    assert strategy.model_of(2) is None
    sent = {
        message.metadata.dst_node_id - 1: arrays_of(message.content["arrays"])
        for way, message in grid.seen
        if way == "down" and message.metadata.message_type == "evaluate"
    }
    assert bits(sent[5]) == bits(strategy.model_of(5))
    assert bits(sent[2]) == bits(result)
    restored.load_state_dict(strategy.state_dict())
    assert bits(restored.model_of(5)) == bits(sent[5])


def test_clients_are_told_the_tangent_features_and_those_of_the_same_classes_mixed_most():
    """Clients k and k + 3 have the same two classes, and a third client at most one of them."""
    strategy = weighted(similarity="entk", temperature=0.1, num_features=20, **ALL)
    start(strategy, grid := Grid(CLIENTS))
    weights = strategy.mixing.weights - np.eye(6)
    assert [int(np.argmax(row)) for row in weights] == [3, 4, 5, 0, 1, 2]
    for _, message in [one for one in grid.seen if one[0] == "down"]:
        assert FeatureMap.from_config(message.content["config"]) == FeatureMap("entk", 20)


@pytest.mark.parametrize("personal", [False, True])
def test_equal_weights_of_equal_examples_are_fedavg_and_with_batch_norm_at_home_fedbn(personal):
    strategy = weighted(temperature=np.inf, by_examples=True, personal_batch_norm=personal, **ALL)
    after = start(strategy, grid := Grid(CLIENTS), rounds=3)
    like = FedBN(network=network(), **ALL) if personal else SeededFedAvg(**ALL)
    others = Grid(app(PersonalisedClient if personal else SGDClient, **LOCAL))
    expected = start(like, others, rounds=3)
    assert_near(after, expected, 1e-5, 1e-5)  # means in float64 and in float32, over three rounds
    for k in range(6):
        mine, theirs = (travelled(each, "down")[2][k]["arrays"] for each in (grid, others))
        assert_near(mine, theirs, 1e-5, 1e-5)
        assert ("1.weight" in travelled(grid, "up")[2][k]["arrays"]) != personal
    share = np.arange(5, 11) / 45  # each row of weights: the clients' shares of the examples
    metrics = strategy.train_metrics[1]
    assert metrics["own-weight-mean"] == pytest.approx(share.mean())
    assert metrics["effective-clients"] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    off = strategy.mixing.similarities[~np.eye(6, dtype=bool)]
    assert strategy.train_metrics[3]["similarity-mean"] == pytest.approx(off.mean())


def test_at_temperature_zero_each_client_trains_alone():
    """Its weight is exp(-(1 - cos) / tau) at most elsewhere, which is 0 in float64. All begin
    alike: the result of the first round is FedAvg's.
    """
    one_round = start(weighted(temperature=1e-6, **ALL), Grid(CLIENTS))
    assert bits(one_round) == bits(start(SeededFedAvg(**ALL), Grid(app(SGDClient, **LOCAL))))
    grid, alone = Grid(CLIENTS), LocalTraining(**ALL)
    start(weighted(temperature=1e-6, **ALL), grid, rounds=3)
    start(alone, Grid(app(PersonalisedClient, **LOCAL)), rounds=2)
    for k, records in travelled(grid, "down")[2].items():
        assert_near(records["arrays"], kept_by(alone, k, 2))


@pytest.mark.parametrize("over", ["round", "all"])
def test_a_state_leaves_out_placeholders(over):
    grid = Grid(CLIENTS, node_ids=[1, 2, 3, 4, 5, 9])
    grid.contexts[9].node_config["partition-id"] = 2
    strategy, again = (weighted(over=over, by_examples=True, **ALL) for _ in range(2))
    start(strategy, grid)
    again.load_state_dict(strategy.state_dict())
    assert strategy.model_of(-10) is not None
    assert again.model_of(-10) is None
    assert again.model_of(2) is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(0, lambda a: a[:, :-1], "prototypes"), "shape"),
        (damaged(1, lambda a: a - 100, "prototypes"), "range"),
        (damaged(0, lambda a: a + 1e4), "scale"),
    ],
)
def test_a_bad_upload_is_dropped_and_changes_nothing_for_the_others(change, reason):
    attacked, silent = run_as_if_lost(lambda: weighted(**ALL), CLIENTS, change, reason)
    assert attacked.mixing.clients == silent.mixing.clients == (0, 1, 3, 4, 5)
    np.testing.assert_array_equal(attacked.mixing.weights, silent.mixing.weights)
    assert attacked.model_of(2) is None


def test_a_reply_is_an_outlier_by_its_distance_from_what_its_client_was_sent():
    """Client 0's model has 40 more in each logit, which changes no probability or gradient."""
    strategy, again = (weighted(screening=Screening(outlier_factor=20), **ALL) for _ in range(2))
    start(strategy, Grid(CLIENTS))
    model = dict(strategy.model_of(0))
    moved = {"models.0.3.bias": model["3.bias"] + np.float32(40)}
    again.load_state_dict(strategy.state_dict() | moved)
    again.start(grid := Grid(CLIENTS), as_record(model), num_rounds=2)
    assert again.train_metrics[2]["replies-accepted"] == 6
    far, near = (travelled(grid, "up")[0][k]["arrays"]["3.bias"] for k in (0, 1))
    assert (far - near).min() > 39


# --------------------------------------------------- a model for each client, in memory or on disk


def model(seed):
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=7).astype(np.float16),
        "double": rng.normal(size=(2, 2)),
        "count": np.array(seed, np.int64),
        "none": np.zeros((0, 4), np.float32),
    }


SIZE = sum(array.nbytes for array in model(0).values())


@pytest.mark.parametrize("budget", [np.inf, 2.5 * SIZE, 0])
def test_what_is_set_comes_back_whatever_is_on_disk(budget, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    models = ClientModels(budget)
    for client, seed in ((3, 3), (9, 9), (1, 1), (9, 99), (5, 5), (1, 1), (3, 33)):
        models[client] = arrays = model(seed)
        old = models[client]
        arrays["weight"][:] = 0  # changes nothing that is kept
        models[client] = model(seed)
        assert bits(old) == bits(model(seed))  # also while it is replaced
    assert list(models) == [1, 3, 5, 9]
    assert models.bytes_in_memory == {np.inf: 4, 2.5 * SIZE: 2, 0: 0}[budget] * SIZE
    for client, seed in ((5, 5), (3, 33), (9, 99), (1, 1)):
        assert bits(models[client]) == bits(model(seed))
    assert list(tmp_path.iterdir()) == []  # what a killed process would leave
    models.limit_to(SIZE)
    assert models.bytes_in_memory == min(budget, SIZE)
    del models[5]
    assert list(models) == [1, 3, 9]


def test_a_full_disk_leaves_models_in_memory_and_says_so(monkeypatch, caplog):
    full = lambda **_: Path("/dev/full").open("wb+")  # noqa: E731, SIM115
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    models = ClientModels(0)
    for client in (1, 2):
        models[client] = model(client)
    assert models.bytes_in_memory == 2 * SIZE
    assert [bits(arrays) for arrays in models.values()] == [bits(model(1)), bits(model(2))]
    assert "No space left" in caplog.text


def test_mixtures_are_weighted_sums_in_the_models_dtypes(monkeypatch):
    """Against loops in float64; whole numbers are rounded. A chunk is two numbers of two sums."""
    monkeypatch.setattr("fedntk.ntk.averages.COLUMNS", 2)
    monkeypatch.setattr("fedntk.ntk.averages.ROWS", 2)
    weights = np.vstack([np.random.default_rng(0).dirichlet(np.ones(4), size=2), np.eye(4)[1]])
    models = [model(seed) for seed in range(4)]
    results = list(mixtures(weights, models))
    for row, mixture in zip(weights, results, strict=True):
        for name, first in models[0].items():
            each = np.stack([arrays[name].astype(np.float64) for arrays in models])
            exact = np.asarray(np.tensordot(row, each, 1))
            expected = (np.rint(exact) if name == "count" else exact).astype(first.dtype)
            assert (mixture[name].dtype, mixture[name].shape) == (first.dtype, first.shape)
            np.testing.assert_allclose(mixture[name], expected)
    assert bits(results[2]) == bits(models[1])
