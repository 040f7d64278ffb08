"""TCT by one exchange of sums: the pooled solution, whatever the split; what clients may do."""

from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from fedntk.clients import TCTClient, client_app
from fedntk.clients.core.disk_store import example_digests
from fedntk.ntk import NotEnoughMemory, one_hot
from fedntk.ntk.convex import RIDGES, class_weights
from fedntk.ntk.payloads import draw_held_out
from fedntk.strategies import NoUsableReply

from .federation import (
    Change,
    Grid,
    bits,
    examples,
    network,
    run_as_if_lost,
    start,
    with_arrays,
    with_metrics,
)
from .tct_problem import (
    FIXED,
    LINEAR,
    distance,
    held,
    normalised,
    pooled,
    rows,
    served,
    solved,
    sums,
    targets,
)

SHARE: dict[str, Any] = {"auto_ridge": True, "validation_share": 0.25}  # two parts of sums


@pytest.fixture
def clients(tmp_path: Path) -> Any:
    return served(tmp_path)


# ------------------------------------------------------------------------- theory


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 1e-5), ({"bias": True}, 1e-5), ({"normalise": False}, 1e-4)]
)
def test_the_sums_give_the_solution_of_the_pooled_rows(clients, options, tolerance):
    """Features and normaliser are float32: some 1e-6."""
    grid, strategy = Grid(clients), sums(**options)
    after = start(strategy, grid, rounds=2)
    assert distance(after[LINEAR], solved(**options)) < tolerance
    assert strategy.normalise or (after["tct.scale"] == 1).all()
    assert [kind for kind, _ in grid.exchanges].count("train") == 1  # then it is solved
    assert (strategy.train_metrics[1]["ridge"], strategy.phase) == (1e-2, None)


def regrouped(groups: list[list[int]], cache: Path) -> ClientApp:
    """Clients that have several of the six clients' examples each, in other orders."""

    def client_fn(context: Context) -> TCTClient:
        k = int(context.node_config["partition-id"])
        x, y = pooled(groups[k])
        return TCTClient(network(), x.flip(0), y.flip(0), seed=(0, k), cache=cache)

    return client_app(client_fn)


def test_every_split_gives_the_same_bits_with_fixed_point_numbers(clients, tmp_path):
    """Whole numbers add up to the same in any order; the steps are of the server's examples."""
    expected = start(sums(**FIXED), Grid(clients))
    assert distance(expected[LINEAR], solved()) < 0.05  # of 8 bits
    for i, groups in enumerate(([[0, 5], [3], [4, 1, 2]], [[2, 0, 1, 4, 3, 5]])):
        split, number = regrouped(groups, tmp_path / str(i)), len(groups)
        strategy = sums(number, min_train_nodes=1, **FIXED)
        assert bits(start(strategy, Grid(split, num_clients=number))) == bits(expected)


def test_balanced_classes_take_one_exchange_of_counts_before(clients):
    """Also in a second run of the object, which begins anew."""
    strategy, (_, y) = sums(balanced=True), pooled()
    weights = class_weights(np.bincount(y, minlength=3))
    assert len(set(weights)) > 1
    for _ in range(2):
        after = start(strategy, grid := Grid(clients), rounds=4)
        assert strategy.class_weights.tolist() == weights.tolist()
        assert distance(after[LINEAR], solved(weights=torch.from_numpy(weights)[y])) < 1e-5
        assert [kind for kind, _ in grid.exchanges].count("train") == 2


def test_the_ridge_is_chosen_on_the_servers_examples(clients):
    """That with the least squared error of all; the solution is that ridge's."""
    strategy = sums(auto_ridge=True, validation=held())
    after = start(strategy, Grid(clients))
    x, y = held()
    z, own = normalised(rows(x), rows(pooled()[0])), targets(y)
    error = {ridge: float((z @ solved(ridge) - own).square().sum()) for ridge in RIDGES}
    best = min(error, key=error.__getitem__)
    assert strategy.train_metrics[1]["ridge"] == best
    assert distance(after[LINEAR], solved(best)) < 1e-4


def in_the_clients_order(partition: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A client's examples in its own order, which does not depend on theirs; which it holds out."""
    x, y = examples(partition)
    order = torch.from_numpy(np.lexsort(example_digests(x, one_hot(y, 3)).T))
    return x[order], y[order], draw_held_out(y[order], 0.25, [0, partition, *b"held-out"])


@pytest.mark.parametrize("options", [{}, FIXED, {"balanced": True}])
def test_the_ridge_is_chosen_on_what_clients_hold_out(clients, options):
    """That of the others' solution with the least squared error on it; then all examples count.

    In float64, on the pooled rows. 8-bit features give errors of a hundredth, so that there the
    ridge has to have an error within 2 % of the least.
    """
    x, y, out = map(torch.cat, zip(*map(in_the_clients_order, range(6)), strict=True))
    assert 0 < int(out.sum()) < len(y) / 2
    of_class = torch.ones(3).double()
    if "balanced" in options:
        of_class = torch.from_numpy(class_weights(np.bincount(y, minlength=3)))
    w, own, t = of_class[y], ~out, targets(y)
    z = normalised(rows(x), rows(x)[own], w[own])
    gram, right = (z[own].T @ (w[own, None] * b[own]) for b in (z, t))
    scale = gram.trace() / w[own].sum() * torch.eye(12).double()
    error = {}
    for ridge in RIDGES:
        misses = z[out] @ torch.linalg.solve(gram + ridge * scale, right) - t[out]
        error[ridge] = float((w[out, None] * misses.square()).sum())
    strategy, fixed = sums(**SHARE, **options), options is FIXED
    after = start(strategy, Grid(clients), rounds=2)
    found = strategy.train_metrics[1 + strategy.balanced]["ridge"]
    assert error[found] <= (1.02 if fixed else 1) * min(error.values())
    expected = solved(found, weights=of_class[pooled()[1]])
    assert distance(after[LINEAR], expected) < (0.05 if fixed else 1e-5)
    if fixed:  # whole numbers: both parts are all examples, to the bit
        assert bits(after) == bits(start(sums(ridge=found, **FIXED), Grid(clients)))


# ------------------------------------------------------------------------- trouble


def test_a_ridge_too_small_is_raised_tenfold_and_said_so(clients, caplog):
    """Of features of which some are the same, as they all are more than examples."""
    strategy = sums(ridge=1e-30, num_features=0)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(clients))
    said = [message for message in caplog.messages if "is too small for these features" in message]
    assert said[0].endswith("it is raised to 1e-29")
    assert strategy.train_metrics[1]["ridge"] == pytest.approx(1e-30 * 10 ** len(said), rel=1e-9)
    assert np.isfinite(after[LINEAR]).all()


def scaled(name: str, by: float, more: float = 0) -> Change:
    """Change the reply's sums of one name."""
    return with_arrays(lambda arrays: arrays | {name: by * arrays[name] + more})


LARGE: list[Change] = [scaled("gram", 1e6), scaled("class-sums", 1e3)]  # features 1,000 as large


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({}, scaled("gram", -1), "range"),
        ({}, scaled("class-sums", 1e3, 1e6), "range"),
        ({}, with_metrics(num_examples=500), "num-examples"),
        ({}, lambda reply: LARGE[0](LARGE[1](reply)), "scale"),
        ({"balanced": True}, scaled("counts", 1, 1), "num-examples"),
        ({"balanced": True}, scaled("counts", 1.0), "dtype"),
        (SHARE, scaled("held-out-gram", -1), "range"),
        (SHARE, with_metrics(num_examples=500), "num-examples"),
    ],
)
def test_sums_that_could_not_be_are_dropped_whole(clients, options, change, reason):
    attacked, without = run_as_if_lost(lambda: sums(**options), clients, change, reason)
    assert attacked.class_weights.tolist() == without.class_weights.tolist()


def test_a_network_that_diverged_leaves_the_model_and_says_so(clients, caplog):
    """Features that are not finite, on the server and, where it asks clients, on these."""
    broken = network()
    torch.nn.init.constant_(broken[0].weight, torch.nan)
    for options in (FIXED, {}):
        with caplog.at_level(WARNING, "flwr"), pytest.raises(NoUsableReply):
            start(sums(**options), Grid(clients), 1, broken)
    assert "no features of the validation examples: features: some are not finite" in caplog.text


def test_a_matrix_that_would_not_fit_is_refused_before_the_first_round(clients, monkeypatch):
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 2000)
    with pytest.raises(NotEnoughMemory, match=r"pooled-statistics of 12 features from 6 clients"):
        start(sums(), Grid(clients))
