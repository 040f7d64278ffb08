"""Fed-ensemble: who trains which model, and that each is what its strategy alone would make."""

import importlib
import tempfile
from collections import Counter
from functools import partial

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx
from torch import nn

from fedntk.clients import (
    FedEnsembleClient,
    LocalSGD,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
)
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.strategies import NTKFL, SCAFFOLD, TCT, FedEnsemble, Sampling, SeededFedAvg
from fedntk.strategies.core.strategy import metrics_of
from fedntk.strategies.ensembles.strata import Strata, permutations

from ..conftest import ROOT, refused
from .federation import (
    Contract,
    Grid,
    InOrder,
    app,
    arrays_of,
    as_record,
    bits,
    damaged,
    failed,
    initial_bits,
    lost,
    network,
    start,
    with_metrics,
)

OPTIONS = {"fraction_evaluate": 0.0}
BALANCED = OPTIONS | {"schedule": "balanced", "min_train_nodes": 6}
CLIENTS = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
CACHE = tempfile.TemporaryDirectory()
OF_TCT = {"network": network(), "learning_rate": 0.05, "local_steps": 5}


def ensemble_app(make=SGDClient, **options):
    return app(lambda *data, **more: FedEnsembleClient(make(*data, **options, **more)))


def ntk_fl(steps, **options):
    return lambda **others: NTKFL(learning_rate=0.5, steps=steps, **options | others)


def contract(clients, **options):
    return Contract(partial(FedEnsemble, num_models=2, **options), clients)


CONTRACT = {
    # one step a round: two models have half of the rounds. The momenta are part of the state
    "FedEnsemble": contract(
        ensemble_app(sgd=LocalSGD(learning_rate=0.1)),
        inner=lambda: FedAvgM(server_momentum=0.5),
        schedule="balanced",
    ),
    "FedEnsemble of NTKFL": contract(
        ensemble_app(NTKFLClient), inner=ntk_fl((0, 5), selection="linearised")
    ),
    "FedEnsemble of TCT": contract(
        ensemble_app(TCTClient, cache=CACHE.name),
        inner=partial(TCT, **OF_TCT, features="last-layer", normalise=False),
        schedule="balanced",
    ),
}


def first_models(strategy, net=None):
    """What a run begins with."""
    initial = ArrayRecord(dict((net or network()).state_dict()))
    return models(arrays_of(strategy.begin(initial, 1, 0)))


def models(weights):
    return list(EnsembleArrays.from_arrays(weights).models)


@pytest.mark.parametrize("schedule", ["independent", "balanced"])
@pytest.mark.parametrize(("q", "k"), [(2, 4), (7, 3)])
def test_in_an_age_each_model_visits_each_stratum_once_and_each_order_is_as_likely(schedule, q, k):
    """A share p of 2,000 ages has the standard deviation sqrt(p (1 - p) / 2,000)."""
    drawn = np.stack([permutations(q, k, schedule, seed=3, age=age) for age in range(2000)])
    assert (np.sort(drawn, axis=2) == np.broadcast_to(np.arange(k), (2000, q, k))).all()
    trained = np.stack([drawn == model for model in range(k)])
    assert np.abs(trained.mean(1) - 1 / k).max() < 4.5 * np.sqrt((k - 1) / k**2 / 2000)
    if schedule == "balanced":
        strata = trained.sum(2)  # that train a model, in each age and round
        assert (strata.max(0) - strata.min(0)).max() <= 1


def assigned(strategy, messages):
    """Return node -> number of the model that a message has."""
    sent = [bits(model) for model in models(arrays_of(strategy.global_arrays))]
    return {m.metadata.dst_node_id: sent.index(bits(arrays_of(m.content["arrays"])))
            for m in messages if "arrays" in m.content}  # fmt: skip


def test_a_run_goes_by_the_orders_of_each_age():
    strategy, seen = FedEnsemble(num_models=3, **BALANCED), []
    start(strategy, Grid(CLIENTS, on_send=lambda sent: seen.append(assigned(strategy, sent))), 6)
    orders = [permutations(3, 3, "balanced", 0, age) for age in (0, 1)]
    assert (orders[0] != orders[1]).any()
    for n, model_of in enumerate(filter(None, seen)):
        expected = {k: orders[n // 3][strategy.strata.of[k - 1], n % 3] for k in range(1, 7)}
        assert model_of == expected


def test_strata_are_random_even_and_sampled_in_equal_shares():
    divisions, extra = set(), Counter[int]()
    for seed in range(5):
        strata = Strata(3, seed)
        strata.update(range(14), 1, new_age=True)
        assert sorted(strata.sizes()) == [4, 5, 5]
        divisions.add(tuple(strata.of[client] for client in range(14)))
    assert len(divisions) == 5
    assert strata.sample(40, np.random.default_rng(0)) == list(range(14))
    for draw in range(200):
        chosen = strata.sample(7, np.random.default_rng(draw))
        counts = Counter(strata.of[client] for client in chosen)
        assert sorted(counts.values()) == [2, 2, 3]
        assert chosen == sorted(set(chosen))
        extra.update(q for q, count in counts.items() if count == 3)
    assert min(extra.values()) > 40  # of 200/3 each: chance has a standard deviation of 6.7


def test_clients_join_the_smallest_stratum_and_leave_their_own():
    """Sizes are evened out with a new age, and nobody else moves."""
    strata = Strata(3, seed=0)
    strata.update(range(9), 1, new_age=True)
    before = dict(strata.of)
    left = sorted({*range(9)} - {*strata.members(1)[:2]})
    strata.update([*left, 20], 2, new_age=False)
    assert strata.of == {k: before[k] for k in left} | {20: 1}
    left = [client for client in range(9) if before[client] != 2]
    strata.of = dict(before)
    strata.update(left, 3, new_age=False)
    assert strata.sizes() == [3, 3, 0]
    strata.update(left, 4, new_age=True)
    assert strata.sizes() == [2, 2, 2]
    assert sum(strata.of[client] != before[client] for client in left) == 2


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda: FedProx(proximal_mu=0.5), 0),
        (FedMedian, 0),
        (FedAdam, 1e-5),  # Flower sends float64 weights on, which are float32 here
    ],
)
def test_one_model_is_the_strategy_of_flowers_itself(make, bound):
    """In the order of the clients, in which replies are added up here; a second run, too."""
    one = FedEnsemble(inner=make, num_models=1, init=network, **OPTIONS)
    (after,) = models(start(one, Grid(CLIENTS), rounds=2))
    plain = make()
    plain.fraction_evaluate = 0.0
    expected = start(plain, InOrder(CLIENTS), rounds=2)
    assert list(after) == list(expected)
    for name, array in after.items():
        if array.dtype == np.float32:
            exact = expected[name].astype(np.float32)
            np.testing.assert_allclose(array, exact, rtol=bound, atol=bound)
    (again,) = models(start(one, Grid(CLIENTS), rounds=2))
    assert bits(again) == bits(after)  # without the moments of the first run


@pytest.mark.parametrize(
    ("make", "client"), [(SCAFFOLD, SCAFFOLDClient), (ntk_fl((0, 5, 20)), NTKFLClient)]
)
def test_one_model_is_a_strategy_of_ours_itself(make, client):
    """SCAFFOLD, whose c is a mean over all clients but those held out; NTK-FL with its queries."""
    sampling = Sampling(seed=3, held_out=[5])
    half = OPTIONS | {"fraction_train": 0.5, "min_train_nodes": 3, "sampling": sampling}
    alone, one = make(**half), FedEnsemble(inner=make, num_models=1, init=network, **half)
    grids = Grid(app(client)), Grid(app(client))
    (after,) = models(start(one, grids[0], rounds=2))
    assert bits(after) == bits(start(alone, grids[1], rounds=2))
    assert grids[0].exchanges == grids[1].exchanges
    assert one.train_metrics[2]["train-loss"] == alone.train_metrics[2]["train-loss"]


def test_each_model_is_what_its_own_clients_alone_would_make():
    """Of one round, and a model of which all clients fail stays as it was."""
    three = {"num_models": 3, "schedule": "balanced", "sampling": Sampling(seed=1), **OPTIONS}
    probe, sent = FedEnsemble(**three), {}
    start(probe, Grid(CLIENTS, on_send=lambda messages: sent.update(assigned(probe, messages))))
    model_of = {node - 1: k for node, k in sent.items()}
    assert set(model_of) == set(range(6))
    strategy = FedEnsemble(**three)
    first = first_models(strategy)
    fails = {client: failed for client, k in model_of.items() if k == 1}
    after = models(start(strategy, Grid(CLIENTS, changes=fails)))
    assert bits(after[1]) == bits(first[1])
    for k in (0, 2):
        others = {client: lost for client, model in model_of.items() if model != k}
        alone = SeededFedAvg(min_completed=1, **OPTIONS)
        expected = alone.start(Grid(CLIENTS, changes=others), as_record(first[k]), num_rounds=1)
        assert bits(after[k]) == bits(arrays_of(expected.arrays))
    metrics = strategy.train_metrics[1]
    assert (metrics["models-updated"], metrics["replies-accepted"]) == (2, 4)


def test_first_weights_of_the_models_are_independent_draws_of_the_rule_with_biases_of_zero():
    """Xavier's variance is 2 / (fan_in + fan_out); of n draws it is right to sqrt(2 / n), and
    correlations are below 4.5 / sqrt(n). Other vectors are as given."""
    net = nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.RNN(9, 7))
    drawn = first_models(FedEnsemble(num_models=3, init="xavier", **OPTIONS), net)
    arrays = np.stack([model["0.weight"].ravel() for model in drawn])
    n = arrays.shape[1]
    assert (np.abs(arrays.var(1) * 250 - 1) < 4.5 * np.sqrt(2 / n)).all()
    assert np.abs(np.corrcoef(arrays)[np.triu_indices(3, 1)]).max() < 4.5 / np.sqrt(n)
    for name, tensor in net.state_dict().items():
        for model in drawn if tensor.ndim < 2 else ():
            np.testing.assert_array_equal(model[name], 0 * tensor if "bias" in name else tensor)


def test_first_weights_can_come_from_a_function_or_another_run():
    drawn = first_models(FedEnsemble(num_models=3, init=network, **OPTIONS))
    assert [bits(model) for model in drawn] == [initial_bits(network(k)) for k in range(3)]
    other = FedEnsemble(num_models=2, init=lambda k: nn.Linear(4, 3), **OPTIONS)
    refused("model 0 has other names or shapes than initial_arrays", first_models, other)
    first = as_record(EnsembleArrays(tuple(drawn[:2])).to_arrays())
    assert bits(arrays_of(FedEnsemble(num_models=2).begin(first, 1, 0))) == bits(arrays_of(first))
    refused("expected one model or 3, got 2", FedEnsemble(num_models=3).begin, first, 1, 0)
    for names in (["models.0.weight", "models.1.weight"], ["model-0.weight", "weight"]):
        assert not EnsembleArrays.are_in(names)  # parts of one network may be called so


@pytest.mark.parametrize("num_models", [2, 6])
def test_one_hostile_reply_is_told_by_those_for_the_other_models(num_models):
    """Six clients: a model has three replies or one, too few by itself. And a list for a loss."""
    attacked, without = (
        FedEnsemble(num_models=num_models, sampling=Sampling(seed=1), **BALANCED) for _ in range(2)
    )
    far, told = damaged(0, lambda a: a + 1e4), with_metrics(train_loss=[1.0, 2.0])
    after = start(attacked, Grid(CLIENTS, changes={2: far, 3: told}))
    metrics = attacked.train_metrics[1]
    assert (metrics["rejected-scale"], metrics["replies-accepted"]) == (1, 5)
    assert isinstance(metrics["train-loss"], float)
    assert bits(after) == bits(start(without, Grid(CLIENTS, changes={2: lost})))


def test_metrics_of_the_inner_strategies_are_combined_as_these_say(monkeypatch):
    place = "fedntk.strategies.ensembles.fed_ensemble.metrics_of"
    parts = []
    monkeypatch.setattr(place, lambda *of: parts.append(metrics_of(*of)) or parts[-1])
    inner = ntk_fl((0, 5, 10), selection="clients")
    strategy = FedEnsemble(inner=inner, num_models=2, **BALANCED)
    seen = dict.fromkeys(range(6), with_metrics(num_examples_seen=10))
    start(strategy, Grid(app(NTKFLClient), changes=seen))
    whole = strategy.train_metrics[1]
    assert len(parts) == 2
    assert whole["num-examples-seen"] == pytest.approx(10)  # a client's own: a mean
    for name, combine in (
        ("losses-accepted", sum), ("kernel-products", sum), ("solver-error-estimate", max)
    ):  # fmt: skip
        assert whole[name] == combine(part[name] for part in parts)
    assert (whole["losses-accepted"], whole["kernel-products"] > 0) == (6, True)
    t = np.average([part["t"] for part in parts], weights=[p["num-examples"] for p in parts])
    assert whole["t"] == pytest.approx(t)


def test_clients_that_the_inner_strategy_holds_out_never_train():
    inner = ntk_fl((0, 5), selection="validation", validation_partitions=[5])
    strategy = FedEnsemble(inner=inner, num_models=2, **BALANCED | {"min_train_nodes": 2})
    start(strategy, grid := Grid(app(NTKFLClient)), rounds=2)
    assert set(grid.trained) == {0, 1, 2, 3, 4}
    assert strategy.train_metrics[1]["losses-accepted"] == 2  # of client 5, for each model


def test_too_few_clients_for_the_strata_are_refused_before_any_work_and_later_end_no_run():
    half, grid = {"fraction_train": 0.5, "min_train_nodes": 2}, Grid(CLIENTS)
    for options, said in (
        ({"num_strata": 7}, "6 clients for"),
        (half, "3 clients sampled a round"),
    ):
        strategy = FedEnsemble(num_models=5, **OPTIONS | options)
        refused(f"{said}.* num_strata = ", start, strategy, grid)
    assert grid.trained == []

    class Shrinking(Grid):
        def get_node_ids(self):
            return list(super().get_node_ids())[4 if strategy.server_round >= 2 else 0 :]

    strategy = FedEnsemble(num_models=3, **OPTIONS)
    start(strategy, Shrinking(CLIENTS), rounds=4)
    assert strategy.train_metrics[4]["replies-accepted"] == 2


def test_a_run_in_which_the_inner_strategy_always_fails_says_so():
    class Failing(FedAvg):
        def aggregate_train(self, server_round, replies):
            raise KeyError("moments")

    strategy, said = FedEnsemble(inner=Failing, num_models=2, **OPTIONS), "Failing failed: KeyError"
    refused(
        f"the model never changed: {said}", start, strategy, Grid(CLIENTS), 2, error=RuntimeError
    )


# ----------------------------------------------------------------- theorem 4.2 of Shi et al. 2021


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "tables")
    return importlib.import_module("limit")  # at four widths, of 100 models


def test_models_come_near_their_own_limits_as_the_network_grows(limit):
    """Errors of linearisation and of the kernel go as 1 / sqrt(width): a fourth, here, of four
    models; a half leaves room for chance. All models fit their clients' points, wide ones sooner.
    """
    cases = {"width": 64, "rounds": 250}, {"width": 1024, "rounds": 150}
    narrow, wide = (
        {
            name: value
            for name, _, value in limit.distances(case | {"runs": 1, "central-steps": 1}, 0)
        }
        for case in cases
    )
    assert max(row["residual"] for row in (narrow, wide)) < 0.1
    assert wide["own-limit"] < narrow["own-limit"] / 2
    assert wide["kernel"] < narrow["kernel"] / 2


def test_the_limits_are_samples_of_the_gaussian_process(limit):
    """Means of 40,000 draws are right to 4.5 standard deviations, these to 4.5 / sqrt(2 n)."""
    count, points = 40_000, np.concatenate([limit.X, limit.TEST])
    covariance = limit.limit_kernels(points, points)[0]
    generator = np.random.default_rng(0)
    start = generator.multivariate_normal(np.zeros(30), covariance, count, method="eigh")
    theta = limit.limit_kernels(points, limit.X)[1]
    weights = theta[6:] @ np.linalg.inv(theta[:6])
    ends = start[:, 6:] + (limit.Y - start[:, :6]) @ weights.T
    mean, std = limit.gaussian_process()
    assert np.abs((ends.mean(0) - mean) / std).max() < 4.5 / np.sqrt(count)
    assert np.abs(ends.std(0) / std - 1).max() < 4.5 / np.sqrt(2 * count)
