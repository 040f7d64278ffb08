"""TCT by one exchange of sums: the pooled solution, whatever the split, and without clients."""

from logging import WARNING

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import TCTClient
from fedntk.clients.core.disk_store import example_digests
from fedntk.ntk import NotEnoughMemory, one_hot
from fedntk.ntk.convex.pooled_statistics import class_weights
from fedntk.ntk.payloads.split_statistics import draw_held_out
from fedntk.strategies import KeptSums, NoUsableReply, Sampling, SecureAggregation, SeededFedAvg

from ..conftest import refused
from .federation import (
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    examples,
    loaded,
    lost,
    network,
    run_as_if_lost,
    start,
    with_arrays,
    with_metrics,
)
from .tct_problem import FIXED, LINEAR, distance, errors, held, pooled, served, solved, sums

SHARE = {"auto_ridge": True, "validation_share": 0.25}  # two parts of sums


@pytest.fixture
def clients(tmp_path):
    return served(tmp_path)


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 1e-5), ({"bias": False}, 1e-5), ({"normalise": False}, 1e-4)]
)
def test_the_sums_give_the_solution_of_the_pooled_rows(clients, options, tolerance):
    """Features and normaliser are float32: some 1e-6."""
    grid, strategy = Grid(clients), sums(**options)
    after = start(strategy, grid, rounds=2)
    assert distance(after[LINEAR], solved(**options)) < tolerance
    assert strategy.normalise or (after["tct.scale"] == 1).all()
    assert [kind for kind, _ in grid.exchanges].count("train") == 1  # then it is solved
    assert (strategy.train_metrics[1]["ridge"], strategy.stage) == (1e-2, "solved")


def regrouped(groups, cache):
    """Clients that have several of the six clients' examples each, in other orders."""

    def client(model, *_, seed):
        x, y = pooled(groups[seed[1]])
        return TCTClient(model, x.flip(0), y.flip(0), seed=seed, cache=cache)

    return app(client)


def test_every_split_gives_the_same_bits_with_fixed_point_numbers(clients, tmp_path):
    """Whole numbers add up to the same in any order; the steps are of the server's examples."""
    expected = start(sums(**FIXED), Grid(clients))
    assert distance(expected[LINEAR], solved()) < 0.05  # of 8 bits
    for i, groups in enumerate(([[0, 5], [3], [4, 1, 2]], [[2, 0, 1, 4, 3, 5]])):
        split, number = regrouped(groups, tmp_path / str(i)), len(groups)
        strategy = sums(number, min_train_nodes=1, **FIXED)
        assert bits(start(strategy, Grid(split, num_clients=number))) == bits(expected)


def test_balanced_classes_take_one_exchange_of_counts_before(clients):
    strategy, (_, y) = sums(balanced=True), pooled()
    weights = class_weights(np.bincount(y, minlength=3))
    assert len(set(weights)) > 1
    for _ in range(2):
        after = start(strategy, grid := Grid(clients), rounds=4)
        assert strategy.class_weights.tolist() == weights.tolist()
        assert distance(after[LINEAR], solved(weights=torch.from_numpy(weights)[y])) < 1e-5
        assert [kind for kind, _ in grid.exchanges].count("train") == 2


def test_the_ridge_is_chosen_on_the_servers_examples(clients):
    strategy = sums(auto_ridge=True, validation=held())
    after = start(strategy, Grid(clients))
    error = errors(pooled(), held(), torch.ones(3).double())
    best = min(error, key=error.__getitem__)
    assert strategy.train_metrics[1]["ridge"] == best
    assert distance(after[LINEAR], solved(best)) < 1e-4


def drawn(partition):
    """A client's examples in the order in which it sorts them, and which of them it holds out."""
    x, y = examples(partition)
    order = torch.from_numpy(np.lexsort(example_digests(x, one_hot(y, 3)).T))
    return x[order], y[order], draw_held_out(y[order], 0.25, [0, partition, *b"held-out"])


@pytest.mark.parametrize("options", [{}, {"balanced": True}])
def test_the_ridge_is_chosen_on_what_clients_hold_out(clients, options):
    x, y, out = map(torch.cat, zip(*map(drawn, range(6)), strict=True))
    of_class = torch.ones(3).double()
    if "balanced" in options:
        of_class = torch.from_numpy(class_weights(np.bincount(y, minlength=3)))
    error = errors((x[~out], y[~out]), (x[out], y[out]), of_class)
    strategy = sums(**SHARE, **options)
    after = start(strategy, Grid(clients), rounds=2)
    found = strategy.train_metrics[1 + strategy.balanced]["ridge"]
    assert error[found] == min(error.values())
    expected = solved(found, weights=of_class[pooled()[1]])
    assert distance(after[LINEAR], expected) < 1e-5


def test_a_ridge_too_small_is_raised_tenfold_and_said_so(clients, caplog):
    strategy = sums(ridge=1e-30, num_features=0)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(clients))
    said = [message for message in caplog.messages if "is too small for these features" in message]
    assert strategy.train_metrics[1]["ridge"] == pytest.approx(1e-30 * 10 ** len(said), rel=1e-9)
    assert np.isfinite(after[LINEAR]).all()


def scaled(name, by, more=0):
    return with_arrays(lambda arrays: arrays | {name: by * arrays[name] + more})


LARGE = [scaled("gram", 1e6), scaled("class-sums", 1e3)]  # features 1,000 as large


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({}, scaled("gram", -1), "range"),
        ({}, scaled("class-sums", 1e3, 1e6), "range"),
        ({}, with_metrics(num_examples=500), "num-examples"),
        ({}, lambda reply: LARGE[0](LARGE[1](reply)), "scale"),
        ({"balanced": True}, scaled("counts", 1, 1), "num-examples"),
        (SHARE, scaled("held-out-class-sums", 1e3, 1e6), "range"),
    ],
)
def test_sums_that_could_not_be_are_dropped_whole(clients, options, change, reason):
    attacked, without = run_as_if_lost(lambda: sums(**options), clients, change, reason)
    assert attacked.class_weights.tolist() == without.class_weights.tolist()


def test_a_network_that_diverged_leaves_the_model(clients):
    """On the server, which computes features of its own for fixed-point numbers, and on clients."""
    broken = network()
    nn.init.constant_(broken[0].weight, torch.nan)
    for options in (FIXED, FIXED | {"secure": SecureAggregation()}, {}):
        with pytest.raises(NoUsableReply):
            start(sums(**options), Grid(clients), 1, broken)


def started(strategy, grid, rounds=2, *args, **options):
    return as_record(start(strategy, grid, rounds, *args, **options))


def raw(arrays):
    return bits(arrays_of(arrays))


@pytest.mark.parametrize("options", [{"bias": False}, {"auto_ridge": True, "validation": held()},
                                     SHARE | FIXED])  # fmt: skip
def test_it_is_to_the_bit_the_model_of_a_run_that_never_had_them(clients, tmp_path, options):
    """Float64 adds up in the order of the clients, whatever that of nodes and replies."""
    strategy = sums(storage=KeptSums(tmp_path / "sums"), **options)
    arrays = started(strategy, Grid(clients, node_ids=[90, 12, 55, 7, 31, 68], order=1))
    expected = started(sums(sampling=Sampling(held_out=[5, 0]), **options), Grid(clients))
    found = strategy.without([5, 0], arrays)
    assert raw(found) == raw(expected)
    assert raw(found)[LINEAR] != raw(arrays)[LINEAR]
    assert raw(strategy.without([], found)) == raw(arrays)


def test_a_client_whose_reply_never_came_is_not_in_the_model(clients, tmp_path):
    strategy = sums(storage=KeptSums(tmp_path / "sums"), **FIXED)
    arrays = started(strategy, Grid(clients, changes={2: lost}))
    refused(r"clients: expected some of .* 0, 1, 3, 4, 5, got 2", strategy.without, [2], arrays)
    expected = started(sums(sampling=Sampling(held_out=[2, 4]), **FIXED), Grid(clients))
    assert raw(strategy.without([4], arrays)) == raw(expected)


def test_a_network_that_was_trained_stays_as_it_is(clients, tmp_path):
    """Stage 1 has seen the client."""
    options = {"bootstrap": SeededFedAvg(), "bootstrap_rounds": 1, **FIXED}
    strategy = sums(storage=KeptSums(tmp_path / "sums"), **options)
    arrays = started(strategy, Grid(clients), rounds=3)
    trained = {name: arrays[name].numpy() for name in network().state_dict()}
    expected = started(
        sums(sampling=Sampling(held_out=[1]), **FIXED), Grid(clients), 1, loaded(trained)
    )
    assert raw(strategy.without([1], arrays)) == raw(expected)


def test_each_run_keeps_its_own_and_one_that_was_cut_off_finds_them_again(clients, tmp_path):
    first, again = (sums(storage=KeptSums(tmp_path / "sums"), **FIXED) for _ in range(2))
    before = started(first, Grid(clients), 1, checkpoint=tmp_path / "cut")
    expected = raw(first.without([4], before))
    assert expected == raw(first.without([4], started(first, Grid(clients))))
    assert len(list((tmp_path / "sums").iterdir())) == 2
    arrays = started(again, Grid(clients), 3, checkpoint=tmp_path / "cut")
    assert raw(again.without([4], arrays)) == expected


def test_what_was_forgotten_or_damaged_is_gone_and_has_to_be_named_from_then_on(clients, tmp_path):
    strategy = sums(storage=KeptSums(tmp_path / "sums"))
    arrays = started(strategy, Grid(clients))
    strategy.storage.forget([3])
    refused(r"those of client 3 are not in .* take that client out", strategy.without, [1], arrays)
    (path,) = tmp_path.glob("sums/*/client-4.safetensors")
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    refused(r"those of client 4 are not in .* or are damaged", strategy.without, [1, 3], arrays)
    expected = started(sums(sampling=Sampling(held_out=[1, 3, 4])), Grid(clients))
    assert raw(strategy.without([1, 3, 4], arrays)) == raw(expected)


def test_what_cannot_be_solved_again_or_would_not_fit_is_refused(clients, tmp_path, monkeypatch):
    strategy, arrays = sums(storage=KeptSums(tmp_path / "sums")), started(sums(), Grid(clients))
    refused(r"no sums were kept .* the round of sums", strategy.without, [1], arrays)
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 2000)
    with pytest.raises(NotEnoughMemory, match=r"sums of 12 features from 6 clients"):
        start(sums(), Grid(clients))
