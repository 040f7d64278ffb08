"""The mean of the weights over rounds: what is evaluated and returned, and never trained from."""

from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord

from fedntk.clients import LocalSGD, NTKFLClient, SGDClient
from fedntk.strategies import NTKFL, SeededFedAvg, WeightAverage

from .federation import Contract, Grid, app, arrays_of, bits, lost, start

CLIENTS = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
CONTRACT = {
    "averaged NTKFL": Contract(
        partial(NTKFL, learning_rate=0.1, steps=[5, 20, 50], average=WeightAverage(0.6)),
        app(NTKFLClient),
        sends_queries=True,
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
