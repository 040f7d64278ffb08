"""Kept examples are those that would be made anew, and no more than fit."""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedntk.simulations import Config
from fedntk.simulations.data.kept_examples import KeptExamples, Own
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.engines import LocalGrid

CONFIG = Config(
    method="fedavg", num_clients=6, clients_per_round=6, batch_size=16, local_test_fraction=0.2,
    min_partition_size=5, train_examples=300,
)  # fmt: skip


def examples(size: int) -> Own:
    """Return 4 `size` bytes of examples, and empty labels."""
    empty = torch.zeros(0)
    return Own((torch.zeros(size), empty), (empty, empty))


def test_no_more_is_kept_than_fits_and_the_oldest_goes_first():
    """Of 40 bytes each, 2 replaces 1, asked for longest ago; 3 has 104 bytes."""
    kept, made = KeptExamples(most_bytes=100), []
    for partition, size in ((0, 10), (1, 10), (0, 10), (2, 10), (0, 10), (1, 10), (3, 26), (3, 26)):
        kept.of(partition, lambda own=(partition, size): made.append(own[0]) or examples(own[1]))
        assert kept.nbytes == sum(own.nbytes for own, _ in kept._kept.values()) <= 100
    assert made == [0, 1, 2, 1, 3, 3]


def replies(config: Config, order: list[int], workers: int = 1) -> dict[tuple[str, int, int], str]:
    """Return what partitions reply to the first weights, asked to train in this order.

    All evaluate at the end. Keys are kind, partition and how often it was asked before.
    """
    weights = ArrayRecord(dict(load_setup(config).network.state_dict()))
    training = [("train", own, order[:i].count(own)) for i, own in enumerate(order)]
    evaluation = [("evaluate", own, 0) for own in sorted(set(order))]
    answers = {}

    def message(kind: str, own: int, n: int) -> Message:
        told = ConfigRecord({"server-round": n + 1})
        return Message(RecordDict({"arrays": weights, "config": told}), own + 1, kind)

    with LocalGrid(app, config.num_clients, config.run_config(), workers=workers) as grid:
        for keys in (training, evaluation):
            messages = [message(*key) for key in keys]
            for reply, key in zip(grid.send_and_receive(messages), keys, strict=True):
                arrays = reply.content.array_records.get("arrays", {})
                told = {k: v for k, v in reply.content["metrics"].items() if k != "seconds"}
                answers[key] = repr([told, *(array.data for array in arrays.values())])
    return answers


def test_kept_examples_make_the_bits_of_new_ones_in_any_order(monkeypatch):
    """Every partition is asked three times, in two orders, by one thread and by two.

    The network that halves what it is given would train on quarters the second time.
    """
    config = CONFIG.replace(model="tests.simulations.networks:halving")
    order = [partition for _ in range(3) for partition in range(6)]
    other = np.random.default_rng(0).permutation(order).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(KeptExamples, "of", lambda self, partition, make: make())
        expected = replies(config, order)
    assert len(set(expected.values())) == len(expected)
    for asked, workers in ((order, 1), (other, 2)):
        assert replies(config, asked, workers) == expected
