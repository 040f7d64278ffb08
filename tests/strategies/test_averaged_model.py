"""The mean of the weights over rounds: what is evaluated and returned, and never trained from."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedntk.clients import NTKFLClient, SGDClient
from fedntk.strategies import NTKFL, TCT, FedBE, FedEnsemble, FedPer, SeededFedAvg
from fedntk.strategies.core.averaged_model import AveragedModel

from .federation import Contract, Grid, app, bits, lost, network, start

CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)
ALL = {"fraction_evaluate": 0.0}
CONTRACT = {
    "averaged NTKFL": Contract(
        lambda **options: NTKFL(learning_rate=0.1, steps=[5, 20, 50], average_decay=0.6, **options),
        app(NTKFLClient),
        sends_queries=True,
    )
}


def curve(strategy, rounds: int, **options):
    """Arrays that are evaluated in each round, and those that clients are sent to train."""
    evaluated, sent = [], []

    class Watched(Grid):
        def send_and_receive(self, messages, **more):
            asked: list[Message] = list(messages)
            first = next((m for m in asked if m.metadata.message_type == "train"), None)
            if first is not None:
                record = first.content[strategy.arrayrecord_key]
                sent.append({name: a.numpy() for name, a in record.items()})
            return super().send_and_receive(asked, **more)

    def evaluate(_, arrays):
        evaluated.append({name: array.numpy() for name, array in arrays.items()})
        return MetricRecord()

    initial = ArrayRecord(dict(network().state_dict()))
    result = strategy.start(
        Watched(CLIENTS, **options), initial, num_rounds=rounds, evaluate_fn=evaluate
    )
    return evaluated, sent, {name: array.numpy() for name, array in result.arrays.items()}


def test_the_mean_is_evaluated_and_returned_and_the_newest_weights_are_trained_from():
    plain, newest, _ = curve(SeededFedAvg(**ALL), 5)
    means, sent, result = curve(SeededFedAvg(average_decay=0.7, **ALL), 5)
    assert [bits(own) for own in sent] == [bits(own) for own in newest]
    assert bits(means[0]) == bits(plain[0])  # before the first round
    for n in range(1, 6):
        factors = 0.7 ** np.arange(n)[::-1]
        for name, array in means[n].items():
            rounds = np.array([own[name] for own in plain[1 : n + 1]], np.float64)
            expected = np.tensordot(factors / factors.sum(), rounds, 1)
            if array.dtype.kind == "i":  # BatchNorm's number of batches
                expected = plain[n][name]
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    assert bits(result) == bits(means[5])


def test_a_round_that_changes_nothing_counts_for_nothing():
    strategy = SeededFedAvg(average_decay=0.7, **ALL)
    start(strategy, Grid(CLIENTS))
    once = bits(start(SeededFedAvg(average_decay=0.7, **ALL), Grid(CLIENTS)))
    strategy.load_state_dict(strategy.state_dict())
    empty = Grid(CLIENTS, changes=dict.fromkeys(range(6), lost))
    assert bits(start(strategy, empty, rounds=3)) == once
    assert strategy.averaged.count == 1


def test_clients_evaluate_the_mean():
    seen = []

    class Watched(Grid):
        def send_and_receive(self, messages, **more):
            asked: list[Message] = list(messages)
            seen.extend(m for m in asked if m.metadata.message_type == "evaluate")
            return super().send_and_receive(asked, **more)

    strategy = SeededFedAvg(average_decay=0.5)
    result = start(strategy, Watched(CLIENTS), rounds=3)
    last = seen[-1].content[strategy.arrayrecord_key]
    assert bits({name: array.numpy() for name, array in last.items()}) == bits(result)


def test_a_state_goes_on_from_the_newest_weights_though_the_mean_was_returned():
    first = SeededFedAvg(average_decay=0.7, **ALL)
    mean = start(first, Grid(CLIENTS), rounds=2)
    second = SeededFedAvg(average_decay=0.7, **ALL)
    second.load_state_dict(first.state_dict())
    arrays = ArrayRecord({name: Array(array) for name, array in mean.items()})
    result = second.start(Grid(CLIENTS), arrays, num_rounds=5)
    whole = start(SeededFedAvg(average_decay=0.7, **ALL), Grid(CLIENTS), rounds=5)
    assert bits({name: array.numpy() for name, array in result.arrays.items()}) == bits(whole)
    with pytest.raises(ValueError, match=r"expected average_decay = 0\.0, got 0\.7"):
        SeededFedAvg(**ALL).load_state_dict(first.state_dict())


def test_a_checkpoint_goes_on_to_the_same_bits(tmp_path):
    def checkpointed(rounds: int):
        initial = ArrayRecord(dict(network().state_dict()))
        strategy = SeededFedAvg(average_decay=0.7, **ALL)
        return strategy.start(Grid(CLIENTS), initial, num_rounds=rounds, checkpoint=tmp_path)

    checkpointed(2)
    result = checkpointed(5).arrays
    whole = start(SeededFedAvg(average_decay=0.7, **ALL), Grid(CLIENTS), rounds=5)
    assert bits({name: array.numpy() for name, array in result.items()}) == bits(whole)
    ended = checkpointed(5).arrays  # no round is left, and the mean is what is returned
    assert bits({name: array.numpy() for name, array in ended.items()}) == bits(whole)


def test_an_ensembles_models_are_averaged_each():
    def made(average: float) -> FedEnsemble:
        options = {"min_train_nodes": 6, "average_decay": average}
        return FedEnsemble(inner=FedAvg, num_models=2, **ALL, **options)

    newest = [start(made(0.0), Grid(CLIENTS), rounds=n) for n in (1, 2)]
    mean = start(made(0.5), Grid(CLIENTS), rounds=2)
    for name, array in mean.items():
        if array.dtype.kind == "f":
            expected = (0.5 * newest[0][name].astype(float) + newest[1][name]) / 1.5
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SeededFedAvg(average_decay=1.0),
            "average_decay: expected less than 1, got 1.0",
        ),
        (
            lambda: SeededFedAvg(average_decay=-0.1),
            "average_decay: expected at least 0, got -0.1",
        ),
        (lambda: FedPer(network=network(), average_decay=0.5), "expected 0 for FedPer"),
        (lambda: FedBE(average_decay=0.5), "expected 0 for FedBE"),
        (lambda: TCT(network=network(), average_decay=0.5), "expected 0 for TCT"),
        (
            lambda: TCT(network=network(), bootstrap=SeededFedAvg(average_decay=0.5)),
            "bootstrap: expected average_decay = 0, got 0.5",
        ),
        (
            lambda: FedEnsemble(inner=FedBE, average_decay=0.5),
            "expected 0 with models by FedBE",
        ),
        (
            lambda: FedEnsemble(inner=lambda: SeededFedAvg(average_decay=0.5)),
            "expected 0 within a FedEnsemble",
        ),
    ],
)
def test_what_has_no_mean_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_weights_that_stay_are_their_own_mean():
    averaged = AveragedModel(0.9)
    record = ArrayRecord({"w": Array(np.float32([1 / 3, 1e-30, 7e30]))})
    for _ in range(50):
        averaged.add(record)
    assert bits({"w": averaged.mean["w"].numpy()}) == bits({"w": record["w"].numpy()})
