"""SeededFedAvg is Flower's FedAvg: the weighted mean, nothing else."""

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from fedntk.clients import SGDClient
from fedntk.strategies import SeededFedAvg

from .federation import NUM_CLIENTS, Grid, app, examples, network, start

CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)


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


def test_nodes_that_cannot_tell_their_partition_go_by_their_node_id():
    class Silent(Grid):
        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "query.partition":
                return []
            return super().send_and_receive(messages, timeout=timeout)

    strategy = SeededFedAvg(fraction_evaluate=0.0)
    start(strategy, Silent(CLIENTS, node_ids=[50, 20, 90, 10, 60, 30]))
    assert strategy.partitions == {i: i for i in (10, 20, 30, 50, 60, 90)}


def test_partitions_are_asked_for_once():
    grid = Grid(CLIENTS)
    start(SeededFedAvg(fraction_evaluate=0.0), grid, rounds=3)
    assert [kind for kind, _ in grid.exchanges] == ["query.partition", "train", "train", "train"]


def test_torch_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    start(SeededFedAvg(fraction_evaluate=0.0), Grid(CLIENTS))
    assert torch.equal(before, torch.get_rng_state())
