"""SeededFedAvg is Flower's FedAvg, of weights that can be averaged; Flower's own, checked."""

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedYogi
from torch import nn

from fedntk.clients import LocalSGD, SGDClient
from fedntk.strategies import FromFlower, Sampling, SeededFedAvg

from .federation import Contract, Grid, InOrder, app, bits, damaged, network, run_as_if_lost, start

CLIENTS = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
ALL = {"fraction_evaluate": 0.0}
CONTRACT = {
    "SeededFedAvg": Contract(SeededFedAvg, CLIENTS),
    "FromFlower": Contract(lambda **o: FromFlower(FedAvgM(server_momentum=0.5), **o), CLIENTS),
}


def test_result_is_that_of_flowers_own_class_and_the_mean_weighted_by_examples():
    """All clients, replies in one order: the same sums, so the same bits, floats at least."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    ours = start(SeededFedAvg(**ALL), grid := Grid(CLIENTS))
    assert torch.equal(before, torch.get_rng_state())  # the global generator is left alone
    theirs = start(FedAvg(**ALL), InOrder(CLIENTS))
    replies = [m.content["arrays"] for way, m in grid.seen if way == "up"]
    for name, array in ours.items():
        models = [weights[name].numpy() for weights in replies]
        mean = np.average(models, axis=0, weights=np.arange(5.0, 11))
        if np.issubdtype(array.dtype, np.integer):
            assert array == np.rint(mean), name
        elif (alike := np.ptp(models, axis=0) == 0).any():  # a mean of equal numbers is that number
            assert name == "0.bias", name  # BatchNorm takes it off: most of its numbers stay
            assert (array[alike] == models[0][alike]).all()
        else:  # float32 sums of six terms
            np.testing.assert_allclose(array, mean, rtol=2e-6, atol=2e-7)
            assert array.tobytes() == theirs[name].astype(array.dtype).tobytes(), name


def test_flowers_fedavg_checked_is_ours():
    """The same sums of the same replies, so the same bits; half of the clients a round."""
    half = ALL | {"fraction_train": 0.5, "min_train_nodes": 3, "sampling": Sampling(seed=3)}
    checked = start(FromFlower(FedAvg(), **half), Grid(CLIENTS), rounds=3)
    floating = [name for name, array in checked.items() if array.dtype == np.float32]
    ours = start(SeededFedAvg(**half), Grid(CLIENTS), rounds=3)
    assert bits({n: checked[n] for n in floating}) == bits({n: ours[n] for n in floating})


@pytest.mark.parametrize("make", [FedAvg, FedAdam, FedYogi, FedAvgM, FedMedian])
def test_flowers_means_and_steps_leave_frozen_arrays_alone(make):
    """An Adam step is as long for a rounding error as for a gradient."""
    table = torch.randn(500, generator=torch.Generator().manual_seed(0))

    def frozen():
        model = nn.Linear(4, 3)
        model.register_buffer("table", table.clone())
        model.register_buffer("hash", torch.tensor([2**53 + 1, 2**61 - 1]))
        return model

    clients = app(lambda _, x, y, **options: SGDClient(frozen(), x, y, **options))
    model = frozen()
    after = start(FromFlower(make(), **ALL), Grid(clients), 3, model)
    assert after["table"].tobytes() == table.numpy().tobytes()
    assert after["hash"].tolist() == [2**53 + 1, 2**61 - 1]
    assert (after["weight"] != model.weight.detach().numpy()).all()


def test_what_a_strategy_of_flowers_keeps_is_saved_and_given_back():
    """Also to one that has gone on meanwhile: what it was without is gone again."""
    expected = start(FromFlower(FedAdam(), **ALL), Grid(CLIENTS), rounds=2)
    used = FromFlower(FedAdam(), **ALL)
    fresh = used.state_dict()
    start(used, Grid(CLIENTS), rounds=1)
    used.load_state_dict(fresh)
    assert bits(start(used, Grid(CLIENTS), rounds=2)) == bits(expected)


# ------------------------------------------------------------------ hostile weights

NAMES = list(network().state_dict())
VARIANCE, COUNTER = NAMES.index("1.running_var"), NAMES.index("1.num_batches_tracked")
FIRST, FAR = network().state_dict()["0.weight"].numpy(), damaged(0, lambda a: a + 1e4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (FAR, "scale"),  # 1,000 times as far as the others'
        (damaged(VARIANCE, lambda a: np.full_like(a, -1e6)), "range"),
        (damaged(VARIANCE, lambda a: np.full_like(a, 1e11)), "scale"),
        (damaged(COUNTER, lambda a: np.full_like(a, -(2**63))), "scale"),
    ],
)
def test_one_reply_that_would_stop_all_learning_is_dropped(change, reason):
    """Averaged, each of these made all later rounds fail, or a counter negative."""
    run_as_if_lost(lambda: SeededFedAvg(**ALL), CLIENTS, change, reason, rounds=2)


@pytest.mark.parametrize(
    ("change", "num_clients"),
    [
        (FAR, 2),  # of two clients neither is the outlier
        (damaged(COUNTER, lambda a: np.full_like(a, 10**5)), 6),  # of many more steps
        (damaged(0, lambda a: FIRST), 6),
        (damaged(0, lambda a: FIRST + np.float32(50) * (a - FIRST)), 6),
    ],
)
def test_weights_that_moved_within_the_limit_are_used(change, num_clients):
    strategy = SeededFedAvg(**ALL)
    start(strategy, Grid(CLIENTS, changes={1: change}, num_clients=num_clients))
    assert strategy.train_metrics[1]["replies-accepted"] == num_clients
