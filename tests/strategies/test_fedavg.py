"""SeededFedAvg is Flower's FedAvg, the weighted mean, of weights that can be averaged."""

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedntk.clients import SGDClient
from fedntk.strategies import SeededFedAvg

from .federation import (
    NUM_CLIENTS,
    Contract,
    Grid,
    InOrder,
    app,
    bits,
    damaged,
    examples,
    network,
    run_as_if_lost,
    start,
    with_arrays,
)

CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)
CONTRACT = {"SeededFedAvg": Contract(SeededFedAvg, CLIENTS)}


def test_result_is_the_mean_weighted_by_examples():
    grid = Grid(CLIENTS)
    averaged = start(SeededFedAvg(fraction_evaluate=0.0), grid)
    sizes = np.array([len(examples(p)[1]) for p in range(NUM_CLIENTS)], dtype=np.float64)
    trained = []
    for partition in range(NUM_CLIENTS):
        x, y = examples(partition)
        start_weights = [v.numpy() for v in network().state_dict().values()]
        client = SGDClient(network(), x, y, learning_rate=0.1, batch_size=4, seed=(0, partition))
        trained.append(client.fit(start_weights, {"server-round": 1})[0])
    for k, (name, array) in enumerate(averaged.items()):
        mean = sum(n * w[k].astype(np.float64) for n, w in zip(sizes, trained, strict=True))
        mean = mean / sizes.sum()
        if np.issubdtype(array.dtype, np.integer):
            assert array == np.rint(mean), name
        else:  # float32 sums of six terms
            np.testing.assert_allclose(array, mean, rtol=2e-6, atol=2e-7)


def test_result_is_that_of_flowers_own_class():
    """All clients, replies in one order: the same sums, so the same bits, floats at least."""
    ours = start(SeededFedAvg(fraction_evaluate=0.0), Grid(CLIENTS))

    theirs = start(FedAvg(fraction_evaluate=0.0), InOrder(CLIENTS))
    for name, array in ours.items():
        if not np.issubdtype(array.dtype, np.integer):
            assert array.tobytes() == theirs[name].astype(array.dtype).tobytes(), name


@pytest.mark.parametrize(
    "mask", [torch.tensor([True, False]), torch.full((3,), torch.finfo(torch.float32).min)]
)
def test_a_buffer_that_no_client_changes_stays_and_may_hold_anything(mask):
    def masked() -> nn.Module:
        model = nn.Linear(4, 3)
        model.register_buffer("mask", mask)
        return model

    clients = app(lambda _, x, y, **options: SGDClient(masked(), x, y, **options))
    strategy = SeededFedAvg(fraction_evaluate=0.0)
    after = start(strategy, Grid(clients), 2, masked())
    assert strategy.train_metrics[2]["replies-accepted"] == NUM_CLIENTS
    assert bits({"mask": after["mask"]}) == bits({"mask": mask.numpy()})


def test_torch_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    start(SeededFedAvg(fraction_evaluate=0.0), Grid(CLIENTS))
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------ hostile weights

ALL = {"fraction_evaluate": 0.0}
NAMES = list(network().state_dict())
VARIANCE, COUNTER = NAMES.index("1.running_var"), NAMES.index("1.num_batches_tracked")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(0, lambda a: np.full_like(a, 3.4e38)), "scale"),
        (damaged(0, lambda a: a + 1e4), "scale"),  # 1,000 times as far as the others'
        (damaged(VARIANCE, lambda a: np.full_like(a, -1e6)), "range"),
        (damaged(VARIANCE, lambda a: np.full_like(a, 1e11)), "scale"),
        (damaged(COUNTER, lambda a: np.full_like(a, 2**63 - 1)), "scale"),
        (damaged(COUNTER, lambda a: np.full_like(a, -(2**63))), "scale"),
    ],
)
def test_one_reply_that_would_stop_all_learning_is_dropped(change, reason):
    """Averaged, each of these made all later rounds fail, or a counter negative."""
    run_as_if_lost(lambda: SeededFedAvg(**ALL), CLIENTS, change, reason, rounds=2)


@pytest.mark.parametrize("factor", [1e9, float("inf")])
def test_the_limit_can_be_raised_or_lifted(factor):
    """For clients that take very different numbers of steps."""
    strategy = SeededFedAvg(outlier_factor=factor, **ALL)
    start(strategy, Grid(CLIENTS, changes={2: damaged(0, lambda a: a + 1e4)}))
    assert strategy.train_metrics[1]["replies-accepted"] == 6


def test_a_client_that_took_many_more_steps_is_no_outlier_by_its_counter():
    strategy, many = SeededFedAvg(**ALL), damaged(COUNTER, lambda a: np.full_like(a, 10**5))
    start(strategy, Grid(CLIENTS, changes={2: many}))
    assert strategy.train_metrics[1]["replies-accepted"] == 6


@pytest.mark.parametrize("factor", [0.0, 50.0])
def test_weights_that_moved_within_the_limit_are_used(factor):
    """Of two clients neither is the outlier, whatever the factor."""

    def moved(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name in ("0.weight", "3.weight"):
            first = network().state_dict()[name].numpy()
            arrays[name] = first + np.float32(factor) * (arrays[name] - first)
        return arrays

    strategy = SeededFedAvg(**ALL)
    start(strategy, Grid(CLIENTS, changes={2: with_arrays(moved)}))
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    few = SeededFedAvg(**ALL)
    far = damaged(0, lambda a: a + 1e4)
    start(few, Grid(CLIENTS, changes={1: far}, num_clients=2))
    assert few.train_metrics[1]["replies-accepted"] == 2


def test_counters_near_the_limit_stay_there():
    """2^53 from all six: shares of k / 45 sum to it within float64, and it stays an integer."""
    full = damaged(COUNTER, lambda a: np.full_like(a, 2**53))
    after = start(SeededFedAvg(**ALL), Grid(CLIENTS, changes=dict.fromkeys(range(6), full)))
    assert after[NAMES[COUNTER]].dtype == np.int64
    assert abs(int(after[NAMES[COUNTER]]) - 2**53) <= 2
