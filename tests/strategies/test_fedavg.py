"""SeededFedAvg is Flower's FedAvg, the weighted mean, of weights that can be averaged."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedntk.clients import SGDClient, client_app
from fedntk.strategies import SeededFedAvg

from .federation import (
    NUM_CLIENTS,
    Contract,
    Grid,
    app,
    bits,
    damaged,
    examples,
    lost,
    network,
    start,
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

    class Sorted(Grid):
        def send_and_receive(self, messages: list[Message], *, timeout: float | None = None):  # type: ignore[override]
            messages = sorted(messages, key=lambda m: m.metadata.dst_node_id)
            return super().send_and_receive(messages, timeout=timeout)

    theirs = start(FedAvg(fraction_evaluate=0.0), Sorted(CLIENTS))
    for name, array in ours.items():
        if not np.issubdtype(array.dtype, np.integer):
            assert array.tobytes() == theirs[name].astype(array.dtype).tobytes(), name


def test_a_model_with_a_boolean_buffer_is_averaged():
    """Such as a mask, which no client changes."""

    def masked() -> torch.nn.Module:
        model = torch.nn.Linear(4, 3)
        model.register_buffer("mask", torch.tensor([True, False]))
        return model

    clients = app(lambda _, x, y, **options: SGDClient(masked(), x, y, **options))
    strategy = SeededFedAvg(fraction_evaluate=0.0)
    result = strategy.start(Grid(clients), ArrayRecord(dict(masked().state_dict())), num_rounds=2)
    assert strategy.train_metrics[2]["replies-accepted"] == NUM_CLIENTS
    mask = result.arrays["mask"].numpy()
    assert (mask.dtype, mask.tolist()) == (np.dtype(bool), [True, False])


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
    attacked, without = SeededFedAvg(**ALL), SeededFedAvg(**ALL)
    grid = Grid(CLIENTS, changes={2: change})
    after = start(attacked, grid, rounds=2)
    assert grid.damaged == 2
    assert attacked.train_metrics[1][f"rejected-{reason}"] == 1
    assert bits(after) == bits(start(without, Grid(CLIENTS, changes={2: lost}), rounds=2))


def test_a_client_that_took_many_more_steps_is_no_outlier_by_its_counter():
    strategy, many = SeededFedAvg(**ALL), damaged(COUNTER, lambda a: np.full_like(a, 10**5))
    start(strategy, Grid(CLIENTS, changes={2: many}))
    assert strategy.train_metrics[1]["replies-accepted"] == 6


@pytest.mark.parametrize("factor", [0.0, 50.0])
def test_weights_that_moved_within_the_limit_are_used(factor):
    """Of two clients neither is the outlier, whatever the factor."""

    def moved(reply: Message) -> Message:
        first = network().state_dict()
        arrays = {k: a.numpy() for k, a in reply.content["arrays"].items()}
        for name in ("0.weight", "3.weight"):
            start_ = first[name].numpy()
            arrays[name] = start_ + np.float32(factor) * (arrays[name] - start_)
        reply.content["arrays"] = ArrayRecord({k: Array(a) for k, a in arrays.items()})
        return reply

    strategy = SeededFedAvg(**ALL)
    start(strategy, Grid(CLIENTS, changes={2: moved}))
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    few = SeededFedAvg(**ALL)
    far = damaged(0, lambda a: a + 1e4)
    start(few, Grid(CLIENTS, changes={1: far}, num_clients=2))
    assert few.train_metrics[1]["replies-accepted"] == 2


def test_the_limit_can_be_raised_or_lifted():
    """For clients that take very different numbers of steps."""
    far = {2: damaged(0, lambda a: a + 1e4)}
    for factor, accepted in ((100.0, 5), (1e9, 6), (float("inf"), 6)):
        strategy = SeededFedAvg(outlier_factor=factor, **ALL)
        start(strategy, Grid(CLIENTS, changes=far))
        assert strategy.train_metrics[1]["replies-accepted"] == accepted


def test_an_array_that_did_not_change_may_hold_anything():
    """Such as a mask of the largest numbers, which is a buffer and is never trained."""

    def masked(seed: int = 0) -> nn.Module:
        model = network(seed)
        model.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
        return model

    def client_fn(context: Context) -> SGDClient:
        partition = int(context.node_config["partition-id"])
        return SGDClient(masked(), *examples(partition), learning_rate=0.1, batch_size=4)

    strategy = SeededFedAvg(**ALL)
    initial = ArrayRecord(dict(masked().state_dict()))
    strategy.start(Grid(client_app(client_fn)), initial, num_rounds=1)
    assert strategy.train_metrics[1]["replies-accepted"] == 6


def test_counters_near_the_limit_stay_there():
    """2^53 from all six: shares of k / 45 sum to it within float64, and it stays an integer."""
    full = damaged(COUNTER, lambda a: np.full_like(a, 2**53))
    after = start(SeededFedAvg(**ALL), Grid(CLIENTS, changes=dict.fromkeys(range(6), full)))
    assert after[NAMES[COUNTER]].dtype == np.int64
    assert abs(int(after[NAMES[COUNTER]]) - 2**53) <= 2
