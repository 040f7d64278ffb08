"""TCT by one exchange of sums: the pooled solution, whatever the split; what clients may do."""

import tempfile
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import Tensor

from fedntk.clients import TCTClient, client_app
from fedntk.clients.core.disk_store import example_digests
from fedntk.ntk import FeatureMap, NotEnoughMemory, one_hot
from fedntk.ntk.convex import RIDGES, class_weights
from fedntk.ntk.payloads import draw_held_out
from fedntk.strategies import TCT, NoUsableReply, SeededFedAvg

from .federation import (
    Change,
    Contract,
    Grid,
    app,
    bits,
    damaged,
    examples,
    lost,
    network,
    run_as_if_lost,
    start,
    with_metrics,
)

LINEAR = "tct.linear"
CACHE = tempfile.TemporaryDirectory()  # removed when the tests end
OPTIONS: dict[str, Any] = {
    "fraction_train": 1.0, "fraction_evaluate": 0.0, "num_features": 12, "solve": "statistics",
}  # fmt: skip
CONTRACT = {
    "TCT, pooled statistics": Contract(
        lambda **options: TCT(
            **{"network": network(), "num_features": 12, "solve": "statistics"} | options
        ),
        app(TCTClient, cache=CACHE.name),
        once=True,
    ),
    "TCT, statistics with a share held out": Contract(
        lambda **options: TCT(
            **{"network": network(), "num_features": 12, "solve": "statistics"}
            | {"auto_ridge": True, "validation_share": 0.25}
            | options
        ),
        app(TCTClient, cache=CACHE.name),
        once=True,
    ),
}


def make(clients: int = 6, **options: Any) -> TCT:
    return TCT(network=network(), **OPTIONS | {"min_available_nodes": clients} | options)


@pytest.fixture
def clients(tmp_path: Path) -> Any:
    return app(TCTClient, cache=tmp_path, learning_rate=0.1, batch_size=4, local_epochs=1)


def pooled(partitions: int = 6) -> tuple[Tensor, Tensor]:
    parts = [examples(k) for k in range(partitions)]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return x, y


def held() -> tuple[Tensor, Tensor]:
    """Examples of nobody's."""
    x, y = (torch.cat(tensors) for tensors in zip(*map(examples, range(10, 14)), strict=True))
    return x, y


def rows(x: Tensor) -> Tensor:
    """Features of the first weights, float64."""
    return FeatureMap(num_features=12).extractor(network())(x).double()


def normalised(z: Tensor, by: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    mean = weights @ by / total
    std = (weights @ (by - mean) ** 2 / total).sqrt()
    std[std < 1e-6] = torch.inf
    return (z - mean) / std


def solved(ridge: float = 1e-2, *, bias: bool = False, weights: Tensor | None = None) -> Tensor:
    """Weighted ridge regression on all clients' rows, in float64."""
    x, y = pooled()
    w = torch.ones(len(y)).double() if weights is None else weights
    z = normalised(rows(x), rows(x), w)
    z = torch.cat([z, torch.ones(len(z), 1).double()], 1) if bias else z
    gram = z.T @ (w[:, None] * z)
    gram += ridge * gram.trace() / w.sum() * torch.eye(len(gram)).double()
    return torch.linalg.solve(gram, z.T @ (w[:, None] * (one_hot(y, 3).double() - 1 / 3)))


def distance(linear: np.ndarray, reference: Tensor) -> float:
    return float((torch.from_numpy(linear).double() - reference).norm() / reference.norm())


def regrouped(groups: list[list[int]], cache: Path) -> ClientApp:
    """Clients that have several of the six clients' examples each, in other orders."""

    def client_fn(context: Context) -> TCTClient:
        k = int(context.node_config["partition-id"])
        parts = [examples(own) for own in groups[k]]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return TCTClient(network(), x.flip(0), y.flip(0), seed=(0, k), cache=cache)

    return client_app(client_fn)


# ------------------------------------------------------------------------- theory


@pytest.mark.parametrize("bias", [False, True])
def test_the_sums_give_the_solution_of_the_pooled_rows(clients, bias):
    """Features and normaliser are float32: some 1e-6."""
    grid, strategy = Grid(clients), make(bias=bias)
    after = start(strategy, grid, rounds=3)
    assert distance(after[LINEAR], solved(bias=bias)) < 1e-5
    assert [kind for kind, _ in grid.exchanges].count("train") == 1  # then it is solved
    assert strategy.train_metrics[1]["ridge"] == 1e-2
    assert strategy.phase is None


def test_every_split_gives_the_same_bits_with_fixed_point_numbers(clients, tmp_path):
    """Whole numbers add up to the same in any order; the steps are of the server's examples."""
    options = {"bits": 8, "validation": held()}
    expected = start(make(**options), Grid(clients))
    assert distance(expected[LINEAR], solved()) < 0.05  # of 8 bits
    for i, groups in enumerate(([[0, 5], [3], [4, 1, 2]], [[2, 0, 1, 4, 3, 5]])):
        split = regrouped(groups, tmp_path / str(i))
        strategy = make(len(groups), min_train_nodes=1, **options)
        assert bits(start(strategy, Grid(split, num_clients=len(groups)))) == bits(expected)


def test_every_split_gives_the_same_solution_without(clients, tmp_path):
    expected = torch.from_numpy(start(make(), Grid(clients))[LINEAR]).double()
    split = regrouped([[5, 0, 2], [3, 4, 1]], tmp_path / "split")
    after = start(make(2), Grid(split, num_clients=2))
    assert distance(after[LINEAR], expected) < 1e-5


def test_without_normalisation_features_are_used_as_they_are(clients):
    x, y = pooled()
    z = rows(x)
    gram = z.T @ z
    gram += 1e-2 * gram.trace() / len(z) * torch.eye(12).double()
    expected = torch.linalg.solve(gram, z.T @ (one_hot(y, 3).double() - 1 / 3))
    after = start(make(normalise=False), Grid(clients))
    assert distance(after[LINEAR], expected) < 1e-4
    assert (after["tct.scale"] == 1).all()


def test_the_features_are_of_the_bootstrapped_network(clients):
    bootstrap = SeededFedAvg(fraction_evaluate=0.0)
    after = start(make(bootstrap=bootstrap, bootstrap_rounds=2), Grid(clients), rounds=3)
    trained = network()
    trained.load_state_dict({k: torch.tensor(after[k]) for k in trained.state_dict()})
    z = FeatureMap(num_features=12).extractor(trained)(pooled()[0])
    np.testing.assert_allclose(after["tct.mean"], z.mean(0), rtol=1e-4, atol=1e-6)


def test_balanced_classes_take_one_exchange_of_counts_before(clients):
    strategy = make(balanced=True)
    grid = Grid(clients)
    after = start(strategy, grid, rounds=4)
    _, y = pooled()
    weights = class_weights(np.bincount(y, minlength=3))
    assert strategy.class_weights.tolist() == weights.tolist()
    assert len(set(weights)) > 1
    assert distance(after[LINEAR], solved(weights=torch.from_numpy(weights)[y])) < 1e-5
    assert [kind for kind, _ in grid.exchanges].count("train") == 2


def test_the_ridge_is_chosen_on_the_servers_examples(clients):
    """That with the least squared error of all; the solution is that ridge's."""
    strategy = make(auto_ridge=True, validation=held())
    after = start(strategy, Grid(clients))
    x, y = held()
    z = normalised(rows(x), rows(pooled()[0]), torch.ones(len(pooled()[1])).double())
    error = {
        ridge: float((z @ solved(ridge) - one_hot(y, 3).double() + 1 / 3).square().sum())
        for ridge in RIDGES
    }
    best = min(error, key=error.__getitem__)
    assert strategy.train_metrics[1]["ridge"] == best
    assert distance(after[LINEAR], solved(best)) < 1e-4


def in_the_clients_order(partition: int) -> tuple[Tensor, Tensor]:
    """A client's examples as it takes them, in an order that does not depend on theirs."""
    x, y = examples(partition)
    order = torch.from_numpy(np.lexsort(example_digests(x, one_hot(y, 3)).T))
    return x[order], y[order]


def held_out_by_clients(share: float, partitions: int = 6) -> Tensor:
    """Which rows of `pooled_in_order` the clients hold out."""
    return torch.cat([
        draw_held_out(in_the_clients_order(k)[1], share, [0, k, *b"held-out"])
        for k in range(partitions)
    ])  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"bits": 8, "validation": held()}, {"balanced": True}])
def test_the_ridge_is_chosen_on_what_clients_hold_out(clients, options):
    """That of the others' solution with the least squared error on it; then all examples count.

    In float64, on the pooled rows. 8-bit features give errors of a hundredth, so that there the
    ridge has to have an error within 2 % of the least.
    """
    x, y = (torch.cat(p) for p in zip(*map(in_the_clients_order, range(6)), strict=True))
    held_out = held_out_by_clients(0.25)
    assert 0 < int(held_out.sum()) < len(y) / 2
    weights = torch.ones(len(y)).double()
    if "balanced" in options:
        weights = torch.from_numpy(class_weights(np.bincount(y, minlength=3)))[y]
    own, z, targets = ~held_out, rows(x), one_hot(y, 3).double() - 1 / 3
    z = normalised(z, z[own], weights[own])
    gram = z[own].T @ (weights[own, None] * z[own])
    scale = gram.trace() / weights[own].sum() * torch.eye(12).double()
    error = {}
    for ridge in RIDGES:
        right = z[own].T @ (weights[own, None] * targets[own])
        misses = z[held_out] @ torch.linalg.solve(gram + ridge * scale, right) - targets[held_out]
        error[ridge] = float((weights[held_out, None] * misses.square()).sum())
    strategy = make(auto_ridge=True, validation_share=0.25, **options)
    after = start(strategy, Grid(clients), rounds=2)
    found = strategy.train_metrics[1 + strategy.balanced]["ridge"]
    if "bits" in options:
        assert error[found] <= 1.02 * min(error.values())
        assert distance(after[LINEAR], solved(found)) < 0.05
        return
    assert found == min(error, key=error.__getitem__)
    order = torch.cat([examples(k)[1] for k in range(6)])
    own_weights = torch.from_numpy(class_weights(np.bincount(y, minlength=3)))[order]
    of_all = own_weights if "balanced" in options else None
    assert distance(after[LINEAR], solved(found, weights=of_all)) < 1e-5


def test_what_is_held_out_is_in_the_model_with_the_same_bits_in_fixed_point(clients):
    """Whole numbers: both parts are all examples, whatever was held out."""
    options = {"bits": 8, "validation": held()}
    strategy = make(auto_ridge=True, validation_share=0.2, **options)
    after = start(strategy, Grid(clients))
    ridge = strategy.train_metrics[1]["ridge"]
    assert bits(after) == bits(start(make(ridge=ridge, **options), Grid(clients)))


def test_where_no_example_can_be_held_out_the_model_stays_and_says_so(clients, caplog):
    """Of one client with an example: this one is held out, or none is."""

    def client_fn(context: Context) -> TCTClient:
        x, y = examples(0)
        return TCTClient(network(), x[:1], y[:1], seed=(0, 0), cache=CACHE.name)

    strategy = make(1, min_train_nodes=1, auto_ridge=True, validation_share=0.3)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(client_app(client_fn), num_clients=1))
    assert not after[LINEAR].any()
    assert "examples are held out and" in caplog.text
    assert "expected some of both" in caplog.text


def test_a_ridge_too_small_is_raised_tenfold_and_said_so(clients, caplog):
    """Features without normalisation, 12 and one more that is 1 of 45 examples, some the same."""
    strategy = make(ridge=1e-30, num_features=0)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(clients))
    said = [r.getMessage() for r in caplog.records if "is too small for these sums" in r.message]
    assert said
    assert "ridge = 1e-30 is too small for these sums; raise it: it is raised to 1e-29" in said[0]
    ridge = strategy.train_metrics[1]["ridge"]
    assert ridge == pytest.approx(1e-30 * 10 ** len(said), rel=1e-9)
    assert np.isfinite(after[LINEAR]).all()


# ------------------------------------------------------------------- what clients do


def bad_sums(first: int) -> list[tuple[Change, str]]:
    """Damages of the sums, whose arrays begin at a position, and why they are refused."""
    matrix, sums = damaged(first, lambda a: 1e6 * a), damaged(first + 1, lambda a: 1e3 * a)
    return [
        # a row that no inner products give, and a negative square
        (damaged(first, lambda a: a + 1e9 * (np.arange(len(a)) == 1)), "range"),
        (damaged(first, lambda a: -a), "range"),
        (damaged(first + 1, lambda a: 1e3 * a + 1e6), "range"),
        (damaged(first + 2, lambda a: a + 1), "num-examples"),
        (with_metrics(num_examples=500), "num-examples"),
        (lambda reply: matrix(sums(reply)), "scale"),  # features a thousand times as large
    ]


SHARE = {"auto_ridge": True, "validation_share": 0.25}  # two parts of sums, the first at 0 and 3


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        *[({}, *bad) for bad in bad_sums(0)],
        *[(SHARE, *bad) for bad in bad_sums(0)[:-1]],
        *[(SHARE, *bad) for bad in bad_sums(3)],
    ],
)
def test_sums_that_could_not_be_are_dropped_whole(clients, options, change, reason):
    run_as_if_lost(lambda: make(**options), clients, change, reason)


@pytest.mark.parametrize("change", [lambda a: a + 1, lambda a: a.astype(float), lambda a: a[:2]])
def test_counts_that_could_not_be_are_dropped(clients, change):
    expected = make(balanced=True)
    start(expected, Grid(clients, changes={2: lost}))
    strategy = make(balanced=True)
    start(strategy, Grid(clients, changes={2: damaged(0, change)}))
    assert strategy.train_metrics[1]["replies-rejected"] == 1
    assert strategy.class_weights.tolist() == expected.class_weights.tolist()


def test_a_network_that_diverged_leaves_the_model_and_says_so(clients, caplog):
    """Features that are not finite, on the server and, where it asks clients, on these."""
    broken = network()
    with torch.no_grad():
        broken[0].weight.fill_(torch.nan)
    for options in ({"bits": 8, "validation": held()}, {}):
        with (
            caplog.at_level(WARNING, "flwr"),
            pytest.raises(NoUsableReply, match="no client's reply could be used"),
        ):
            start(make(**options), Grid(clients), 1, broken)
    assert "no features of the validation examples: features: some are not finite" in caplog.text


def test_too_few_replies_leave_the_model_and_the_next_round_asks_again(clients):
    strategy = make(min_completed=6)
    grid = Grid(clients)

    def at_first(reply):
        return lost(reply) if strategy.server_round == 1 else reply

    grid.changes = {2: at_first}
    after = start(strategy, grid, rounds=2)
    assert strategy.train_metrics[1]["replies-accepted"] == 5
    assert distance(after[LINEAR], solved()) < 1e-5


def test_a_second_run_of_an_object_begins_anew(clients):
    strategy = make(balanced=True)
    first = bits(start(strategy, Grid(clients), rounds=3))
    assert bits(start(strategy, Grid(clients), rounds=3)) == first
    assert sorted(strategy.train_metrics) == [1, 2]


@pytest.mark.parametrize("options", [{"balanced": True}, {"bits": 8, "validation": held()}])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(clients, tmp_path, options, rounds):
    """After one round of the bootstrap, or after the classes' counts, too; in a new object."""

    def run(num_rounds: int, folder: str) -> dict[str, bytes]:
        bootstrap = SeededFedAvg(fraction_evaluate=0.0)
        strategy = make(bootstrap=bootstrap, bootstrap_rounds=1, **options)
        return bits(start(strategy, Grid(clients), num_rounds, checkpoint=tmp_path / folder))

    expected = run(4, "straight")
    run(rounds, "cut")
    assert run(4, "cut") == expected


def test_a_matrix_that_would_not_fit_is_refused_before_the_first_round(clients, monkeypatch):
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 2000)
    with pytest.raises(NotEnoughMemory, match=r"pooled-statistics of 12 features from 6 clients"):
        start(make(), Grid(clients))
