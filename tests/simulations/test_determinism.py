"""The same bits for one seed, whatever the order of replies, the workers and what is kept."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedntk.simulations import Config, run
from fedntk.simulations.data.data import KeptExamples, LocalData
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.methods import all_methods

from .outcomes import bits, outcome
from .settings import SMALL, each_of


class Shuffled(LocalGrid):
    """Gives nodes and replies in another order each time."""

    generator = np.random.default_rng(5)

    def get_node_ids(self) -> Iterable[int]:
        return self.generator.permutation(list(super().get_node_ids())).tolist()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        return [replies[i] for i in self.generator.permutation(len(replies))]


def shuffled(config: Config, folder: Path) -> object:
    """Outcome with replies in any order, of three clients at work at a time."""
    config = config.replace(out=folder)
    with Shuffled(app, config.num_clients, config.run_config(), workers=3) as grid:
        serve(grid, config)
    return outcome(folder)


@pytest.mark.parametrize("method", each_of(all_methods()))
def test_order_of_replies_and_number_of_workers_change_nothing(tmp_path, finished_run, method):
    serial = finished_run(method)
    assert shuffled(serial.config, tmp_path) == outcome(serial.folder)


def test_dropout_in_clients_at_work_at_the_same_time(tmp_path):
    """Torch's generator, from which dropout draws, is one for all threads."""
    config = SMALL.replace(
        method="fedavg", local_epochs=3, learning_rate=0.05, min_partition_size=2,
        model="tests.simulations.networks:dropout",
    )  # fmt: skip
    serial = run(config, out=tmp_path / "serial", progress=False)
    assert shuffled(config, tmp_path / "shuffled") == outcome(serial.folder)
    other = run(config, seed=1, out=tmp_path / "seed", progress=False)
    assert bits(other.folder) != bits(serial.folder)


def examples(size: int) -> LocalData:
    """Return 4 `size` bytes of examples, and empty labels."""
    empty = torch.zeros(0)
    return LocalData((torch.zeros(size), empty), (empty, empty))


def test_no_more_is_kept_than_fits_and_the_oldest_goes_first():
    """Each has 40 bytes, so 2 replaces 1, which was asked for longest ago; 3 has 104 bytes."""
    kept, made = KeptExamples(most_bytes=100), []
    for partition, size in ((0, 10), (1, 10), (0, 10), (2, 10), (0, 10), (1, 10), (3, 26), (3, 26)):
        kept.of(partition, lambda own=(partition, size): made.append(own[0]) or examples(own[1]))
        assert kept.nbytes <= 100
    assert made == [0, 1, 2, 1, 3, 3]


def test_kept_examples_make_the_bits_of_new_ones(tmp_path, monkeypatch):
    """The network that halves what it is given would evaluate on quarters the second time."""
    every = {"clients_per_round": 6, "clients_per_evaluation": 6, "local_test_fraction": 0.2}
    config = SMALL.replace(
        method="fedavg", model="tests.simulations.networks:halving", num_clients=6,
        min_partition_size=5, **every,
    )  # fmt: skip
    kept = run(config, out=tmp_path / "kept", progress=False)
    monkeypatch.setattr(KeptExamples, "of", lambda self, partition, make: make())
    assert outcome(run(config, out=tmp_path / "new", progress=False).folder) == outcome(kept.folder)
