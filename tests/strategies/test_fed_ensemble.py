"""Fed-ensemble: who trains which model, and that each is what its strategy alone would make."""

import tempfile
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedProx,
)
from torch import nn

from fedntk.clients import (
    FedEnsembleClient,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
    client_app,
)
from fedntk.ntk.payloads import EnsembleArrays
from fedntk.simulations import Config, run
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD, TCT, FedEnsemble, SeededFedAvg
from fedntk.strategies.ensembles.strata import Strata, permutations

from .federation import (
    Contract,
    Grid,
    InOrder,
    app,
    arrays_of,
    as_record,
    bits,
    damaged,
    examples,
    failed,
    initial_bits,
    lost,
    network,
    start,
    with_metrics,
)

OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0}
BALANCED: dict[str, Any] = OPTIONS | {"schedule": "balanced", "min_train_nodes": 6}
CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)
CACHE = tempfile.TemporaryDirectory()


def ensemble_app(make: Any = SGDClient, **options: Any) -> Any:
    def client_fn(context: Context) -> FedEnsembleClient:
        partition = int(context.node_config["partition-id"])
        x, y = examples(partition)
        return FedEnsembleClient(make(network(), x, y, seed=(0, partition), **options))

    return client_app(client_fn)


def tct(**options: Any) -> Any:
    return lambda: TCT(network=network(), **options)


def ntk_fl(steps: tuple[int, ...], **options: Any) -> Any:
    return lambda **others: NTKFL(learning_rate=0.5, steps=steps, **options | others)


CONTRACT = {
    "FedEnsemble": Contract(
        lambda **options: FedEnsemble(num_models=2, schedule="balanced", **options),
        ensemble_app(learning_rate=0.1),  # one step a round: two models have half of the rounds
    ),
    "FedEnsemble of NTKFL": Contract(
        lambda **options: FedEnsemble(
            inner=ntk_fl((0, 5), selection="linearised"), num_models=2, **options
        ),
        ensemble_app(NTKFLClient),
    ),
    "FedEnsemble of TCT": Contract(
        lambda **options: FedEnsemble(
            inner=tct(features="last-layer", normalise=False, learning_rate=0.05, local_steps=5),
            num_models=2,
            schedule="balanced",
            **options,
        ),
        ensemble_app(TCTClient, cache=CACHE.name),
    ),
}


def models(weights: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], ...]:
    return EnsembleArrays.from_arrays(weights).models


def first_models(strategy: FedEnsemble, net: nn.Module | None = None) -> list[Any]:
    """What a run begins with."""
    initial = ArrayRecord(dict((net or network()).state_dict()))
    return [arrays_of(own) for own in models(strategy.begin(initial, 1, 0))]


# ------------------------------------------------------------------------ strata


@pytest.mark.parametrize("schedule", ["independent", "balanced"])
@pytest.mark.parametrize(("q", "k"), [(1, 1), (3, 5), (7, 3)])
def test_in_an_age_each_model_visits_each_stratum_once(schedule, q, k):
    orders = [permutations(q, k, schedule, seed=1, age=age) for age in range(20)]
    for order in orders:
        assert order.shape == (q, k)
        assert (np.sort(order, axis=1) == np.arange(k)).all()
        for column in order.T if schedule == "balanced" else ():
            counts = np.bincount(column, minlength=k)
            assert counts.max() - counts.min() <= 1
    assert k == 1 or any((order != orders[0]).any() for order in orders)


@pytest.mark.parametrize("schedule", ["independent", "balanced"])
def test_each_model_is_as_likely_in_each_round(schedule):
    """Of 2,000 ages; a share of 1/4 has the standard deviation sqrt(3)/4 / sqrt(2,000) = 0.0097."""
    drawn = np.stack([permutations(2, 4, schedule, seed=3, age=age) for age in range(2000)])
    shares = np.stack([(drawn == k).mean(0) for k in range(4)])
    assert np.abs(shares - 0.25).max() < 4.5 * 0.0097


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


# ----------------------------------------------------------------- one model alone


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
    (own,) = models(start(one, Grid(CLIENTS), rounds=2))
    plain = make()
    plain.fraction_evaluate = 0.0
    expected = start(plain, InOrder(CLIENTS), rounds=2)
    assert list(own) == list(expected)
    for name, array in own.items():
        if array.dtype == np.float32:
            exact = expected[name].astype(np.float32)
            np.testing.assert_allclose(array, exact, rtol=bound, atol=bound)
    (again,) = models(start(one, Grid(CLIENTS), rounds=2))
    assert bits(again) == bits(own)  # without the moments of the first run


@pytest.mark.parametrize(
    ("make", "client", "own_options"),
    [
        (SeededFedAvg, SGDClient, {}),
        (SCAFFOLD, SCAFFOLDClient, {"held_out": [5]}),  # whose c is a mean over all others
        (ntk_fl((0, 5, 20)), NTKFLClient, {}),  # with its further exchange
    ],
)
def test_one_model_is_a_strategy_of_ours_itself(make, client, own_options):
    """Bit for bit, with half of the clients a round."""
    half = OPTIONS | {"fraction_train": 0.5, "min_train_nodes": 3, "seed": 3} | own_options
    alone, one = make(**half), FedEnsemble(inner=make, num_models=1, init=network, **half)
    grids = Grid(app(client)), Grid(app(client))
    (own,) = models(start(one, grids[0], rounds=2))
    assert bits(own) == bits(start(alone, grids[1], rounds=2))
    assert grids[0].exchanges == grids[1].exchanges
    assert one.train_metrics[2]["train-loss"] == alone.train_metrics[2]["train-loss"]


# ---------------------------------------------------------------------- the models


def test_each_model_is_what_its_own_clients_alone_would_make():
    """One round: model k is FedAvg over the clients that were sent it, from its own weights.

    A model whose clients all fail stays as it was.
    """
    three = {"num_models": 3, "schedule": "balanced", "seed": 1, **OPTIONS}
    start(probe := FedEnsemble(**three), Grid(CLIENTS))
    assigned = {node - 1: k for node, k in probe._model_of.items()}
    assert set(assigned) == set(range(6))
    strategy = FedEnsemble(**three)
    first = first_models(strategy)
    fails: Any = {client: failed for client, k in assigned.items() if k == 1}
    after = models(start(strategy, Grid(CLIENTS, changes=fails)))
    assert bits(after[1]) == bits(first[1])
    for k in (0, 2):
        others: Any = {client: lost for client, model in assigned.items() if model != k}
        grid, alone = Grid(CLIENTS, changes=others), SeededFedAvg(**OPTIONS)
        expected = alone.start(grid, as_record(first[k]), num_rounds=1)
        assert bits(after[k]) == bits(arrays_of(expected.arrays))
    metrics = strategy.train_metrics[1]
    assert (metrics["models-updated"], metrics["replies-accepted"]) == (2, 4)


@pytest.mark.parametrize(
    ("init", "conv", "linear"), [("he", 2 / 500, 2 / 200), ("xavier", 2 / (500 + 1000), 2 / 400)]
)
def test_first_weights_of_all_models_are_independent_and_of_the_stated_variance(init, conv, linear):
    """He: 2 / fan_in; Xavier: 2 / (fan_in + fan_out); biases are 0, other vectors as given.

    The variance of n numbers is right to sqrt(2 / n), here 0.7 %; correlations of two models are
    below 4.5 / sqrt(n).
    """
    net = nn.Sequential(
        nn.Conv2d(20, 40, 5), nn.Flatten(), nn.Linear(200, 200), nn.BatchNorm1d(200), nn.RNN(9, 7)
    )
    drawn = first_models(FedEnsemble(num_models=3, init=init, **OPTIONS), net)
    for name, variance in (("0.weight", conv), ("2.weight", linear)):
        arrays = np.stack([model[name].ravel() for model in drawn])
        assert arrays.dtype == np.float32
        n = arrays.shape[1]
        assert (np.abs(arrays.mean(1)) < 4.5 * np.sqrt(variance / n)).all()
        assert (np.abs(arrays.var(1) / variance - 1) < 4.5 * np.sqrt(2 / n)).all()
        assert np.abs(np.corrcoef(arrays)[np.triu_indices(3, 1)]).max() < 4.5 / np.sqrt(n)
    for name, given in net.state_dict().items():
        for model in drawn if given.ndim < 2 else ():
            np.testing.assert_array_equal(model[name], 0 * given if "bias" in name else given)


def test_first_weights_can_come_from_a_function_or_another_run():
    drawn = first_models(FedEnsemble(num_models=3, init=network, **OPTIONS))
    assert [bits(own) for own in drawn] == [initial_bits(network(k)) for k in range(3)]
    other = FedEnsemble(num_models=2, init=lambda k: nn.Linear(4, 3), **OPTIONS)
    with pytest.raises(ValueError, match="model 0 has other names or shapes than initial_arrays"):
        first_models(other)
    given = as_record(EnsembleArrays(tuple(drawn[:2])).to_arrays())
    assert bits(arrays_of(FedEnsemble(num_models=2).begin(given, 1, 0))) == bits(arrays_of(given))
    with pytest.raises(ValueError, match="expected one model or 3, got 2"):
        FedEnsemble(num_models=3).begin(given, 1, 0)


@pytest.mark.parametrize("num_models", [2, 6])
def test_one_hostile_reply_is_told_by_those_for_the_other_models(num_models):
    """Six clients: a model has three replies or one, too few by itself. And a list for a loss."""

    def ensemble() -> FedEnsemble:
        return FedEnsemble(num_models=num_models, seed=1, **BALANCED)

    attacked, without = ensemble(), ensemble()
    far, told = damaged(0, lambda a: a + 1e4), with_metrics(train_loss=[1.0, 2.0])
    after = start(attacked, Grid(CLIENTS, changes={2: far, 3: told}))
    metrics = attacked.train_metrics[1]
    assert (metrics["rejected-scale"], metrics["replies-accepted"]) == (1, 5)
    assert isinstance(metrics["train-loss"], float)
    assert bits(after) == bits(start(without, Grid(CLIENTS, changes={2: lost})))


def test_metrics_of_the_inner_strategies_are_combined_as_these_say():
    """Kernel products of two models add up; the step count is their mean."""
    inner = ntk_fl((0, 5, 10), selection="clients")
    strategy = FedEnsemble(inner=inner, num_models=2, **BALANCED)
    start(strategy, Grid(app(NTKFLClient)), rounds=1)
    whole, own = strategy.train_metrics[1], [m.train_metrics[1] for m in strategy.members]
    assert whole["losses-accepted"] == 6 == sum(each["losses-accepted"] for each in own)
    assert whole["kernel-products"] == sum(each["kernel-products"] for each in own) > 0
    assert whole["solver-error-estimate"] == max(each["solver-error-estimate"] for each in own)
    shares = np.average([each["t"] for each in own], weights=[e["num-examples"] for e in own])
    assert whole["t"] == pytest.approx(shares)


def test_clients_evaluate_the_mean_of_the_models_probabilities():
    """As the predictor does with all examples; records have names of the user's own."""
    names = {"arrayrecord_key": "weights", "configrecord_key": "settings"}
    strategy = FedEnsemble(num_models=3, min_evaluate_nodes=6, **names)
    after = start(strategy, Grid(ensemble_app(learning_rate=0.1)))
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    expected = strategy.predictor(after, network()).evaluate(x, y)
    found = strategy.evaluate_metrics[1]
    assert found["mutual-information"] > 0
    values = found["accuracy"], found["loss"]
    assert values == pytest.approx((expected.accuracy, expected.loss), rel=1e-5)


@pytest.mark.parametrize("inner", [FedAdam, SCAFFOLD])
def test_the_inner_strategies_keep_their_state_over_a_checkpoint(inner: Any, tmp_path):
    """Moments and controls, of each model its own."""
    clients = app(SCAFFOLDClient if inner is SCAFFOLD else SGDClient)

    def run(rounds: int, folder: Any, node_ids: Any = None) -> dict[str, bytes]:
        strategy = FedEnsemble(inner=inner, num_models=2, **OPTIONS)
        return bits(start(strategy, Grid(clients, node_ids=node_ids), rounds, checkpoint=folder))

    straight = run(3, tmp_path / "a")
    run(2, tmp_path / "b")
    assert run(3, tmp_path / "b", [90, 12, 55, 7, 31, 68]) == straight


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_strata": 7}, "6 clients for num_strata = 7"),
        ({"fraction_train": 0.5, "min_train_nodes": 2}, "3 clients sampled a round for num_strata"),
    ],
)
def test_too_few_clients_for_the_strata_are_refused_before_any_work(options, message):
    grid = Grid(CLIENTS)
    with pytest.raises(ValueError, match=message):
        start(FedEnsemble(num_models=5, **OPTIONS | options), grid)
    assert grid.trained == []


def noisy() -> CPNTKFL:
    noise = {"noise_multiplier": 1.0, "selection": "linearised", "steps": (5,)}
    return CPNTKFL(learning_rate=0.5, **noise)


@pytest.mark.filterwarnings("ignore")  # of Opacus' imports
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (noisy, "expected 0 within a FedEnsemble, got 1"),  # epsilon counts one model's uploads
        (tct(), "a round shows only some of the clients"),
        (tct(normalise=False, solve="server"), "a round shows only some of the clients"),
        (
            lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 6),
            "inner: expected a strategy that aggregates itself, got",
        ),
        (iter([FedAdam(), FedAdam(eta=0.5)]).__next__, "model 1's differs in inner"),
    ],
)
def test_strategies_that_cannot_be_of_one_of_two_models_are_refused(inner, message):
    with pytest.raises(ValueError, match=message):
        FedEnsemble(inner=inner, num_models=2)


def test_a_run_in_which_the_inner_strategy_always_fails_says_so():
    class Failing(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            raise KeyError("moments")

    with pytest.raises(RuntimeError, match=r"the model never changed: Failing failed: KeyError"):
        start(FedEnsemble(inner=Failing, num_models=2, **OPTIONS), Grid(CLIENTS), rounds=2)


# ------------------------------------------------------------------ what is shared


def test_clients_that_the_inner_strategy_holds_out_never_train():
    inner = ntk_fl((0, 5), selection="validation", validation_partitions=[5])
    strategy = FedEnsemble(inner=inner, num_models=2, **BALANCED | {"min_train_nodes": 2})
    start(strategy, grid := Grid(app(NTKFLClient)), rounds=2)
    assert set(grid.trained) == {0, 1, 2, 3, 4}
    assert strategy.train_metrics[1]["losses-accepted"] == 2  # of client 5, for each model


def test_all_models_use_the_seeds_sealed_for_a_client_once(tmp_path):
    """No reply is lost in training, further exchanges or evaluations."""
    result = run(
        Config(
            method="fed-ensemble", num_clients=4, clients_per_round=4, clients_per_evaluation=4,
            train_examples=40, projection=8, rounds=2, width=4, out=tmp_path / "run",
            fed_ensemble={"num_models": 2, "schedule": "balanced", "inner": "ntk-fl"},
        ),
        progress=False,
    )  # fmt: skip
    for name in ("replies-accepted", "client-replies-accepted"):
        assert set(result.curve(name).dropna()) == {4}


def test_a_network_whose_parts_are_called_models_is_one_network():
    assert not EnsembleArrays.are_in(["models.0.weight", "models.1.weight"])
    assert not EnsembleArrays.are_in(["model-0.weight", "weight"])
    assert EnsembleArrays.are_in(["model-0.weight", "model-1.a.weight"])


def test_clients_that_leave_later_end_no_run():
    class Shrinking(Grid):
        def get_node_ids(self):  # type: ignore[no-untyped-def]
            return list(super().get_node_ids())[4 if strategy.server_round >= 2 else 0 :]

    strategy = FedEnsemble(num_models=3, **OPTIONS)
    start(strategy, Shrinking(CLIENTS), rounds=4)
    assert strategy.train_metrics[4]["replies-accepted"] == 2
