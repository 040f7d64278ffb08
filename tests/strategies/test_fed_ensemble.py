"""Fed-ensemble: who trains which model, and that each is what its strategy alone would make."""

import tempfile
from collections import Counter
from logging import WARNING
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
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
    NUM_CLIENTS,
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
    loaded,
    lost,
    network,
    size,
    start,
    with_metrics,
)

OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0}
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


CONTRACT = {
    "FedEnsemble": Contract(
        lambda **options: FedEnsemble(num_models=2, schedule="balanced", **options),
        ensemble_app(learning_rate=0.1),  # one step a round: two models have half of the rounds
    ),
    "FedEnsemble of NTKFL": Contract(
        lambda **options: FedEnsemble(
            inner=lambda: NTKFL(learning_rate=0.5, steps=(0, 5), selection="linearised"),
            num_models=2,
            **options,
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
    begun = strategy.begin(initial, 1, 0)
    return [arrays_of(own) for own in EnsembleArrays.from_arrays(begun).models]


# ------------------------------------------------------------------------ strata


@pytest.mark.parametrize("schedule", ["independent", "balanced"])
@pytest.mark.parametrize(("q", "k"), [(1, 1), (3, 5), (5, 5), (7, 3), (10, 5)])
def test_in_an_age_each_model_visits_each_stratum_once(schedule, q, k):
    orders = [permutations(q, k, schedule, seed=1, age=age) for age in range(20)]
    for order in orders:
        assert order.shape == (q, k)
        assert (np.sort(order, axis=1) == np.arange(k)).all()
        for column in order.T if schedule == "balanced" else ():
            counts = np.bincount(column, minlength=k)
            assert counts.max() - counts.min() <= 1
    if k > 1:
        assert any((order != orders[0]).any() for order in orders)


@pytest.mark.parametrize("schedule", ["independent", "balanced"])
def test_each_model_is_as_likely_in_each_round(schedule):
    """Of 2,000 ages; a share of 1/4 has the standard deviation sqrt(3)/4 / sqrt(2,000) = 0.0097."""
    drawn = np.stack([permutations(2, 4, schedule, seed=3, age=age) for age in range(2000)])
    shares = np.stack([(drawn == k).mean(0) for k in range(4)])
    assert np.abs(shares - 0.25).max() < 4.5 * 0.0097


def test_strata_are_random_and_of_sizes_that_differ_by_one_at_most():
    divisions = set()
    for seed in range(5):
        strata = Strata(4, seed)
        strata.update(range(14), 1, new_age=True)
        assert sorted(strata.sizes()) == [3, 3, 4, 4]
        assert strata.of.keys() == set(range(14))
        divisions.add(tuple(strata.of[client] for client in range(14)))
    assert len(divisions) == 5


def test_clients_join_the_smallest_stratum_and_leave_their_own():
    """Sizes are evened out with a new age, and nobody else moves."""
    strata = Strata(3, seed=0)
    strata.update(range(9), 1, new_age=True)
    before = dict(strata.of)
    gone = strata.members(1)[:2]
    left = sorted({*range(9)} - {*gone})
    strata.update([*left, 20], 2, new_age=False)
    assert strata.of == {k: before[k] for k in left} | {20: 1}
    left = [client for client in range(9) if before[client] != 2]
    strata.of = dict(before)
    strata.update(left, 3, new_age=False)
    assert strata.sizes() == [3, 3, 0]
    strata.update(left, 4, new_age=True)
    assert strata.sizes() == [2, 2, 2]
    assert sum(strata.of[client] != before[client] for client in left) == 2


def test_a_sample_takes_equal_shares_of_the_strata():
    strata = Strata(3, seed=0)
    strata.update(range(30), 1, new_age=True)
    assert strata.sample(40, np.random.default_rng(0)) == list(range(30))
    extra: Counter[int] = Counter()
    for draw in range(200):
        chosen = strata.sample(7, np.random.default_rng(draw))
        counts = Counter(strata.of[client] for client in chosen)
        assert sorted(counts.values()) == [2, 2, 3]
        assert chosen == sorted(set(chosen))
        extra.update(q for q, count in counts.items() if count == 3)
    assert min(extra.values()) > 40  # of 200/3 each: chance has a standard deviation of 6.7


# ----------------------------------------------------------------- one model alone


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda: FedProx(proximal_mu=0.5), 0),
        (FedMedian, 0),
        (lambda: FedAvgM(server_momentum=0.9), 0),
        (FedAdam, 1e-5),  # Flower sends float64 weights on, which are float32 here
    ],
)
def test_one_model_is_the_strategy_of_flowers_itself(make, bound):
    """Bit for bit; replies come in the order of the clients, in which they are added up here."""
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


OWN: dict[str, tuple[Any, Any]] = {
    "SeededFedAvg": (SeededFedAvg, SGDClient),
    "SCAFFOLD": (SCAFFOLD, SCAFFOLDClient),
    "NTKFL": (lambda **o: NTKFL(learning_rate=0.5, steps=(0, 5, 20), **o), NTKFLClient),
}


@pytest.mark.parametrize("name", sorted(OWN))
def test_one_model_is_a_strategy_of_ours_itself(name):
    """Bit for bit, with half of the clients a round; the further exchange of NTK-FL, too."""
    make, client = OWN[name]
    half = OPTIONS | {"fraction_train": 0.5, "min_train_nodes": 3, "seed": 3}
    clients, alone = app(client), make(**half)
    one = FedEnsemble(inner=make, num_models=1, init=network, **half)
    grids = Grid(clients), Grid(clients)
    (own,) = models(start(one, grids[0], rounds=2))
    assert bits(own) == bits(start(alone, grids[1], rounds=2))
    assert grids[0].exchanges == grids[1].exchanges
    assert one.train_metrics[2]["train-loss"] == alone.train_metrics[2]["train-loss"]


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_client_receives_and_sends_what_it_would_in_a_run_of_one_model(name):
    make, client = OWN[name]
    clients, sizes = app(client), []
    for strategy in (make(**OPTIONS), FedEnsemble(inner=make, num_models=3, **OPTIONS)):
        start(strategy, grid := Grid(clients))
        kinds = ((way, each) for way, each in grid.seen if each.metadata.message_type == "train")
        sizes.append({(way, size(each)) for way, each in kinds})
    assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------- the models


def test_each_model_is_what_its_own_clients_alone_would_make():
    """One round: model k is FedAvg over the clients that were sent it, from its own weights."""
    strategy = FedEnsemble(num_models=3, seed=1, **OPTIONS)
    first = first_models(strategy)
    after = models(start(strategy, Grid(CLIENTS)))
    assigned = {node - 1: k for node, k in strategy._model_of.items()}
    assert set(assigned) == set(range(6))
    for k, begun in enumerate(first):
        others: Any = {client: lost for client, model in assigned.items() if model != k}
        if len(others) < 6:
            grid, alone = Grid(CLIENTS, changes=others), SeededFedAvg(**OPTIONS)
            begun = arrays_of(alone.start(grid, as_record(begun), num_rounds=1).arrays)
        assert bits(after[k]) == bits(begun)


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
        size = arrays.shape[1]
        assert (np.abs(arrays.mean(1)) < 4.5 * np.sqrt(variance / size)).all()
        assert (np.abs(arrays.var(1) / variance - 1) < 4.5 * np.sqrt(2 / size)).all()
        assert np.abs(np.corrcoef(arrays)[np.triu_indices(3, 1)]).max() < 4.5 / np.sqrt(size)
    for name, given in net.state_dict().items():
        for model in drawn if given.ndim < 2 else ():
            np.testing.assert_array_equal(model[name], 0 * given if "bias" in name else given)


def test_a_function_can_make_the_first_weights():
    drawn = first_models(FedEnsemble(num_models=3, init=network, **OPTIONS))
    assert [bits(own) for own in drawn] == [initial_bits(network(k)) for k in range(3)]
    other = FedEnsemble(num_models=2, init=lambda k: nn.Linear(4, 3), **OPTIONS)
    with pytest.raises(ValueError, match="model 0 has other names or shapes than initial_arrays"):
        first_models(other)


@pytest.mark.parametrize("change", [lost, failed])
def test_a_model_whose_clients_all_fail_stays_as_it_was_and_the_others_do_not(change):
    two = {"num_models": 2, "schedule": "balanced", **OPTIONS}
    start(probe := FedEnsemble(**two), Grid(CLIENTS))
    own = [node - 1 for node, k in probe._model_of.items() if k == 1]
    assert len(own) == 3
    again = FedEnsemble(**two)
    before = first_models(again)
    after = models(start(again, Grid(CLIENTS, changes=dict.fromkeys(own, change))))
    assert bits(after[1]) == bits(before[1])
    assert bits(after[0]) != bits(before[0])
    assert again.train_metrics[1]["models-updated"] == 1
    assert again.train_metrics[1]["replies-accepted"] == 3


@pytest.mark.parametrize("num_models", [2, 3, 6])
def test_one_hostile_reply_is_told_by_those_for_the_other_models(num_models):
    """Six clients: a model has three replies, two or one, the last two too few by themselves."""

    def ensemble() -> FedEnsemble:
        return FedEnsemble(
            num_models=num_models, schedule="balanced", min_train_nodes=6, seed=1, **OPTIONS
        )

    attacked, without = ensemble(), ensemble()
    far = damaged(0, lambda a: a + 1e4)
    after = start(attacked, Grid(CLIENTS, changes={2: far}))
    assert attacked.train_metrics[1]["rejected-scale"] == 1
    assert attacked.train_metrics[1]["replies-accepted"] == 5
    assert bits(after) == bits(start(without, Grid(CLIENTS, changes={2: lost})))


def test_metrics_of_the_inner_strategies_are_combined_as_these_say():
    """Kernel products of two models add up; the step count is their mean."""
    strategy = FedEnsemble(
        inner=lambda: NTKFL(learning_rate=0.5, steps=(0, 5, 10), selection="clients"),
        num_models=2,
        schedule="balanced",
        min_train_nodes=6,
        **OPTIONS,
    )
    start(strategy, Grid(app(NTKFLClient)), rounds=1)
    whole, own = strategy.train_metrics[1], [m.train_metrics[1] for m in strategy.members]
    assert whole["losses-accepted"] == 6 == sum(each["losses-accepted"] for each in own)
    assert whole["kernel-products"] == sum(each["kernel-products"] for each in own) > 0
    assert whole["solver-error-estimate"] == max(each["solver-error-estimate"] for each in own)
    shares = np.average([each["t"] for each in own], weights=[e["num-examples"] for e in own])
    assert whole["t"] == pytest.approx(shares)


@pytest.mark.parametrize("client", range(NUM_CLIENTS))
def test_a_list_for_a_number_is_left_out_of_the_metrics_over_all_models(client):
    """Each client in turn sends it, and is the only one of its model: another's reply is lost."""
    told = with_metrics(train_loss=[1.0, 2.0])
    changes = {client: told, (client + 1) % NUM_CLIENTS: lost}
    strategy = FedEnsemble(num_models=3, **OPTIONS)
    start(strategy, Grid(CLIENTS, changes=changes))
    assert isinstance(strategy.train_metrics[1]["train-loss"], float)
    assert strategy.train_metrics[1]["replies-accepted"] == 5


# --------------------------------------------------------------------- evaluation


def test_clients_evaluate_the_mean_of_the_models_probabilities():
    strategy = FedEnsemble(num_models=3, min_evaluate_nodes=6)
    after = start(strategy, Grid(ensemble_app(learning_rate=0.1)))
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    with torch.no_grad():
        nets = [loaded(own).double() for own in models(after)]
        mean = torch.stack([net(x.double()).softmax(1) for net in nets]).mean(0)
    accuracy = float((mean.argmax(1) == y).double().mean())
    loss = -float(mean[torch.arange(len(y)), y].log().mean())
    found = strategy.evaluate_metrics[1]
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["mutual-information"] > 0
    evaluated = strategy.predictor(after, network()).evaluate(x, y)
    assert evaluated.accuracy == pytest.approx(accuracy)
    assert evaluated.loss == pytest.approx(loss, rel=1e-5)


def test_a_client_of_one_model_cannot_evaluate_the_ensemble_and_the_run_goes_on(caplog):
    strategy = FedEnsemble(num_models=2, min_evaluate_nodes=6)
    with caplog.at_level(WARNING, "flwr"):
        start(strategy, Grid(CLIENTS), rounds=1)
    assert "each has to be wrapped in FedEnsembleClient" in caplog.text
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    assert strategy.evaluate_metrics[1]["rejected-error"] == 6


# ------------------------------------------------------------------------- resume


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


def test_an_ensemble_can_go_on_from_the_models_of_another_run():
    given = as_record(
        {
            f"model-{k}.{n}": a
            for k in (0, 1)
            for n, a in arrays_of(ArrayRecord(network(k).state_dict())).items()
        }
    )
    assert bits(arrays_of(FedEnsemble(num_models=2).begin(given, 1, 0))) == bits(arrays_of(given))
    with pytest.raises(ValueError, match="expected one model or 3, got 2"):
        FedEnsemble(num_models=3).begin(given, 1, 0)


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
    held = {"selection": "validation", "validation_partitions": [5]}
    strategy = FedEnsemble(
        inner=lambda: NTKFL(learning_rate=0.5, steps=(0, 5), **held),
        num_models=2,
        schedule="balanced",
        **OPTIONS,
    )
    start(strategy, grid := Grid(app(NTKFLClient)), rounds=2)
    assert set(grid.trained) == {0, 1, 2, 3, 4}
    assert strategy.train_metrics[1]["losses-accepted"] == 2  # of client 5, for each model


def test_the_inner_strategy_knows_who_is_held_out():
    """SCAFFOLD's c is a mean over all clients that are not."""
    clients, options = app(SCAFFOLDClient), OPTIONS | {"held_out": [5]}
    one = FedEnsemble(inner=SCAFFOLD, num_models=1, init=network, **options)
    (own,) = models(start(one, Grid(clients), rounds=2))
    assert bits(own) == bits(start(SCAFFOLD(**options), Grid(clients), rounds=2))


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


def test_a_bootstrap_asks_the_few_clients_that_are_shown():
    inner = tct(bootstrap=FedAvg(), bootstrap_rounds=2, normalise=False)
    FedEnsemble(inner=tct(solve="server", normalise=False), num_models=1)  # asks all clients
    strategy = FedEnsemble(inner=inner, num_models=5, **OPTIONS)
    start(strategy, Grid(app(TCTClient, cache=CACHE.name)), rounds=2)
    assert strategy.train_metrics[2]["replies-accepted"] == 6


def test_names_of_records_are_shared():
    names = {"arrayrecord_key": "weights", "configrecord_key": "settings"}
    strategy = FedEnsemble(num_models=2, min_evaluate_nodes=6, **names)
    start(strategy, Grid(ensemble_app()))
    assert strategy.evaluate_metrics[1]["replies-accepted"] == 6


def test_a_second_run_begins_without_the_moments_of_the_first():
    strategy = FedEnsemble(inner=FedAdam, num_models=2, **OPTIONS)
    first = start(strategy, Grid(CLIENTS), rounds=2)
    assert bits(start(strategy, Grid(CLIENTS), rounds=2)) == bits(first)


def test_a_network_whose_parts_are_called_models_is_one_network():
    assert not EnsembleArrays.are_in(["models.0.weight", "models.1.weight"])
    assert not EnsembleArrays.are_in(["model-0.weight", "weight"])
    assert EnsembleArrays.are_in(["model-0.weight", "model-1.a.weight"])


# ------------------------------------------------------------------- who is there


def test_clients_that_leave_later_end_no_run():
    class Shrinking(Grid):
        def get_node_ids(self):  # type: ignore[no-untyped-def]
            gone = 4 if strategy.server_round >= 2 else 0
            return list(super().get_node_ids())[gone:]

    strategy = FedEnsemble(num_models=3, **OPTIONS)
    start(strategy, Shrinking(CLIENTS), rounds=4)
    assert strategy.train_metrics[4]["replies-accepted"] == 2
