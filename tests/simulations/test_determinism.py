"""The same bits for one seed, whatever the order of replies and the number of workers."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from fedntk.simulations import Config, run
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
