"""Parts of strategies: the mean of the weights over rounds, and inputs centred by their mean."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedntk.clients import LocalSGD, NTKFLClient, SCAFFOLDClient, SGDClient
from fedntk.ntk import CentredInputs
from fedntk.ntk.features.centred_inputs import CENTRE
from fedntk.strategies import NTKFL, SCAFFOLD, NoUsableReply, Sampling, SeededFedAvg, WeightAverage

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    bits,
    examples,
    failed,
    lost,
    network,
    renamed,
    start,
    with_arrays,
    with_metrics,
)

NTK = {"learning_rate": 0.1, "steps": [5, 20, 50]}
SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
CLIENTS = app(SGDClient, **SGD)
CONTRACT = {
    "averaged NTKFL": Contract(
        partial(NTKFL, **NTK, average=WeightAverage(0.6)), app(NTKFLClient), sends_queries=True
    )
}


def curve(decay):
    """Arrays that are evaluated in each round, those that clients are sent to train and evaluate,
    and the result, of three rounds."""
    evaluated, grid = [], Grid(CLIENTS)
    options = {"evaluate_fn": lambda _, arrays: evaluated.append(arrays_of(arrays))}
    result = start(SeededFedAvg(average=decay and WeightAverage(decay)), grid, 3, **options)
    sent = {"train": [], "evaluate": []}
    for message in [message for way, message in grid.seen if way == "down"]:
        sent[message.metadata.message_type].append(bits(arrays_of(message.content["arrays"])))
    return evaluated, sent, result


def test_the_mean_is_evaluated_and_returned_and_the_newest_weights_are_trained_from():
    plain, newest, _ = curve(None)
    means, sent, result = curve(0.7)
    assert sent["train"] == newest["train"]
    assert bits(means[0]) == bits(plain[0])  # before the first round
    for n in range(1, 4):
        factors = 0.7 ** np.arange(n)[::-1]
        for name, array in means[n].items():
            rounds = np.array([own[name] for own in plain[1 : n + 1]], np.float64)
            expected = np.tensordot(factors / factors.sum(), rounds, 1)
            if array.dtype.kind == "i":  # BatchNorm's number of batches
                expected = plain[n][name]
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    assert bits(result) == bits(means[3]) == sent["evaluate"][-1]


def test_a_round_that_changes_nothing_counts_for_nothing():
    strategy = SeededFedAvg(average=WeightAverage(0.7))
    once = bits(start(strategy, Grid(CLIENTS)))
    strategy.load_state_dict(strategy.state_dict())
    empty = Grid(CLIENTS, changes=dict.fromkeys(range(6), lost))
    assert bits(start(strategy, empty, rounds=3)) == once
    assert strategy.average.count == 1
    assert bits(start(strategy, Grid(CLIENTS))) == once  # another run begins anew


def test_weights_that_stay_are_their_own_mean():
    averaged = WeightAverage(0.9)
    record = ArrayRecord({"w": Array(np.float32([1 / 3, 1e-30, 7e30]))})
    for _ in range(50):
        averaged.add(record)
    assert bits(arrays_of(averaged.mean)) == bits(arrays_of(record))


# ------------------------------- centred inputs: those centred before, in float64, equal to 1e-9

BOUND = 1e-9
METHODS = {
    "NTKFL": (lambda **options: NTKFL(**NTK, **options), NTKFLClient, {}),
    "SeededFedAvg": (SeededFedAvg, SGDClient, SGD),
    "SCAFFOLD": (SCAFFOLD, SCAFFOLDClient, SGD),
}


def made(method, **options):
    return METHODS[method][0](**{"fraction_evaluate": 0.0, "centre": True} | options)


def centred():
    return CentredInputs(network(), (4,)).double()


def far(partition):
    x, y = examples(partition)
    return x.double() + torch.tensor([3.0, -2.0, 0.0, 7.0]) + partition / 10, y


def mean_without(*partitions):
    return torch.cat([far(p)[0] for p in range(6) if p not in partitions]).mean(0)


def clients(method, *, by_hand=False):
    _, make, options = METHODS[method]
    model, mean = (network().double(), mean_without()) if by_hand else (centred(), torch.zeros(4))

    def client(*_, seed):
        x, y = far(seed[1])
        return make(copy.deepcopy(model), x - mean, y, seed=seed, **options)

    return app(client)


def run(strategy, grid, rounds=1, **options):
    return start(strategy, grid, rounds, centred(), **options)


@pytest.mark.parametrize("method", METHODS)
def test_it_is_training_on_inputs_that_were_centred_before(method):
    common = {"fraction_train": 0.5, "min_available_nodes": 6}
    found = run(made(method, **common), grid := Grid(clients(method)), rounds=2)
    plain = made(method, centre=False, **common)
    expected = start(plain, Grid(clients(method, by_hand=True)), 2, network().double())
    np.testing.assert_allclose(found.pop(CENTRE), mean_without(), rtol=BOUND)
    assert len(found) == len(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[f"network.{name}"], array, rtol=BOUND, atol=BOUND)
    assert grid.exchanges.count(("query.input_sums", 6)) == 1


def sending(array):
    return with_arrays(lambda _: {"input-sums": np.asarray(array)})


@pytest.mark.parametrize(
    "change",
    [
        failed,
        with_arrays(lambda arrays: arrays | {"more": np.zeros(4)}),
        sending([1.0, 2.0]),
        sending(np.ones(4, np.float32)),
        sending([1.0, 2.0, np.inf, 4.0]),
        sending([1e9, 0.0, 0.0, 0.0]),
        with_metrics(num_examples=-1),
        with_metrics(num_examples=100_000),
    ],
)
def test_sums_that_cannot_be_right_are_left_out(change):
    grid = Grid(clients("NTKFL"), changes={2: change}, changed_kind="query.input_sums")
    found = run(made("NTKFL"), grid)
    assert grid.damaged == 1
    np.testing.assert_allclose(found[CENTRE], mean_without(2), rtol=BOUND)


@pytest.mark.parametrize("change", [failed, sending(np.full(4, 1e308))])
def test_with_half_the_answers_nothing_is_begun(change):
    """Two clients cannot tell which of their sums is too large."""
    grid = Grid(
        clients("NTKFL"), num_clients=2, changes={1: change}, changed_kind="query.input_sums"
    )
    with pytest.raises(NoUsableReply, match="1 of 2 clients gave a sum"):
        run(made("NTKFL"), grid)
    assert "train" not in dict(grid.exchanges)


def test_clients_held_out_are_not_in_the_mean_and_a_second_run_asks_anew():
    strategy = made("SeededFedAvg", sampling=Sampling(held_out=[1, 4]))
    for _ in range(2):
        found = run(strategy, grid := Grid(clients("SeededFedAvg")))
        np.testing.assert_allclose(found[CENTRE], mean_without(1, 4), rtol=BOUND)
        assert dict(grid.exchanges)["query.input_sums"] == 4


moved = with_arrays(lambda arrays: arrays | {CENTRE: arrays[CENTRE] + 0.5})


@pytest.mark.parametrize("method", ["SeededFedAvg", "SCAFFOLD"])
@pytest.mark.parametrize("change", [moved, lambda reply: renamed("arrays")(moved(reply))])
def test_a_reply_with_another_mean_is_dropped_under_any_name(method, change):
    strategy = made(method)
    found = run(strategy, Grid(clients(method), changes={2: change}))
    assert strategy.train_metrics[1]["rejected-arrays"] == 1
    np.testing.assert_allclose(found[CENTRE], mean_without(), rtol=BOUND)


@pytest.mark.parametrize("done", [0, 2])
def test_a_run_that_goes_on_asks_nobody_again_and_has_the_same_bits(tmp_path, done):
    options = {"fraction_train": 0.5, "average": WeightAverage(0.5)}
    whole = run(made("NTKFL", **options), Grid(clients("NTKFL")), 4)
    run(made("NTKFL", **options), Grid(clients("NTKFL")), done, checkpoint=tmp_path)
    grid = Grid(clients("NTKFL"))
    found = run(made("NTKFL", **options), grid, 4, checkpoint=tmp_path)
    assert bits(found) == bits(whole)
    assert "query.input_sums" not in dict(grid.exchanges)


def test_where_nothing_is_centred_it_is_said():
    strategy = made("SeededFedAvg")
    with pytest.raises(ValueError, match=r"'centre' in the model, got .*wrap the network as Centr"):
        start(strategy, Grid(clients("SeededFedAvg", by_hand=True)), 1, network().double())
    with pytest.raises(NoUsableReply, match="its model is no CentredInputs"):
        run(strategy, Grid(clients("SeededFedAvg", by_hand=True)))
