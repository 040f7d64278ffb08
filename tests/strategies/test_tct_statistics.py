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
    with_arrays,
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


def solved(
    ridge: float = 1e-2,
    *,
    bias: bool = False,
    normalise: bool = True,
    weights: Tensor | None = None,
) -> Tensor:
    """Weighted ridge regression on all clients' rows, in float64."""
    x, y = pooled()
    w = torch.ones(len(y)).double() if weights is None else weights
    z = normalised(rows(x), rows(x), w) if normalise else rows(x)
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


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 1e-5), ({"bias": True}, 1e-5), ({"normalise": False}, 1e-4)],
    ids=["plain", "bias", "as they are"],
)
def test_the_sums_give_the_solution_of_the_pooled_rows(clients, options, tolerance):
    """Features and normaliser are float32: some 1e-6."""
    grid, strategy = Grid(clients), make(**options)
    after = start(strategy, grid, rounds=2)
    assert distance(after[LINEAR], solved(**options)) < tolerance
    assert strategy.normalise or (after["tct.scale"] == 1).all()
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


def in_the_clients_order(partition: int) -> tuple[Tensor, Tensor, Tensor]:
    """A client's examples in its own order, which does not depend on theirs; which it holds out."""
    x, y = examples(partition)
    order = torch.from_numpy(np.lexsort(example_digests(x, one_hot(y, 3)).T))
    return x[order], y[order], draw_held_out(y[order], 0.25, [0, partition, *b"held-out"])


@pytest.mark.parametrize("options", [{}, {"bits": 8, "validation": held()}, {"balanced": True}])
def test_the_ridge_is_chosen_on_what_clients_hold_out(clients, options):
    """That of the others' solution with the least squared error on it; then all examples count.

    In float64, on the pooled rows. 8-bit features give errors of a hundredth, so that there the
    ridge has to have an error within 2 % of the least.
    """
    parts = zip(*map(in_the_clients_order, range(6)), strict=True)
    x, y, held_out = map(torch.cat, parts)
    assert 0 < int(held_out.sum()) < len(y) / 2
    of_class = torch.ones(3).double()
    if "balanced" in options:
        of_class = torch.from_numpy(class_weights(np.bincount(y, minlength=3)))
    weights, own = of_class[y], ~held_out
    z, targets = normalised(rows(x), rows(x)[own], weights[own]), one_hot(y, 3).double() - 1 / 3
    gram = z[own].T @ (weights[own, None] * z[own])
    scale = gram.trace() / weights[own].sum() * torch.eye(12).double()
    right = z[own].T @ (weights[own, None] * targets[own])
    error = {}
    for ridge in RIDGES:
        misses = z[held_out] @ torch.linalg.solve(gram + ridge * scale, right) - targets[held_out]
        error[ridge] = float((weights[held_out, None] * misses.square()).sum())
    strategy = make(auto_ridge=True, validation_share=0.25, **options)
    after = start(strategy, Grid(clients), rounds=2)
    found = strategy.train_metrics[1 + strategy.balanced]["ridge"]
    rounded = "bits" in options
    assert error[found] <= (1.02 if rounded else 1) * min(error.values())
    expected = solved(found, weights=of_class[pooled()[1]])
    assert distance(after[LINEAR], expected) < (0.05 if rounded else 1e-5)


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
    said = [r.getMessage() for r in caplog.records if "is too small for" in r.message]
    assert said[0].startswith("ridge = 1e-30 is too small for these features; raise it")
    assert said[0].endswith("it is raised to 1e-29")
    ridge = strategy.train_metrics[1]["ridge"]
    assert ridge == pytest.approx(1e-30 * 10 ** len(said), rel=1e-9)
    assert np.isfinite(after[LINEAR]).all()


# ------------------------------------------------------------------- what clients do


def scaled(sums: str, by: float, more: float = 0.0) -> Change:
    """Change the reply's sums of one name."""
    return with_arrays(lambda arrays: arrays | {sums: by * arrays[sums] + more})


SHARE = {"auto_ridge": True, "validation_share": 0.25}  # two parts of sums
LARGE: list[Change] = [scaled("gram", 1e6), scaled("class-sums", 1e3)]  # features 1,000 as large


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({}, scaled("gram", -1), "range"),
        ({}, scaled("class-sums", 1e3, 1e6), "range"),
        ({}, with_metrics(num_examples=500), "num-examples"),
        ({}, lambda reply: LARGE[0](LARGE[1](reply)), "scale"),
        (SHARE, scaled("held-out-gram", -1), "range"),
        (SHARE, with_metrics(num_examples=500), "num-examples"),
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


def test_a_second_run_of_an_object_begins_anew(clients):
    strategy = make(balanced=True)
    first = bits(start(strategy, Grid(clients), rounds=2))
    assert bits(start(strategy, Grid(clients), rounds=2)) == first


@pytest.mark.parametrize(
    ("options", "rounds"), [({"balanced": True}, 2), ({"bits": 8, "validation": held()}, 1)]
)
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(clients, tmp_path, options, rounds):
    """After one round of the bootstrap, or after the classes' counts as well; in a new object."""

    def run(num_rounds: int, folder: str) -> dict[str, bytes]:
        strategy = make(bootstrap=SeededFedAvg(), bootstrap_rounds=1, **options)
        return bits(start(strategy, Grid(clients), num_rounds, checkpoint=tmp_path / folder))

    expected = run(3, "straight")
    run(rounds, "cut")
    assert run(3, "cut") == expected


def test_a_matrix_that_would_not_fit_is_refused_before_the_first_round(clients, monkeypatch):
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 2000)
    with pytest.raises(NotEnoughMemory, match=r"pooled-statistics of 12 features from 6 clients"):
        start(make(), Grid(clients))
