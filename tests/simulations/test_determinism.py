"""The same bits for one seed, whatever the order of replies and the number of workers."""

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from fedntk.simulations import Config
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.methods import all_methods

from .settings import SETTINGS
from .test_resume import outcome

SMALL = Config(
    num_clients=12, clients_per_round=6, clients_per_evaluation=5, rounds=3, train_examples=400
)


class Shuffled(LocalGrid):
    """Gives nodes and replies in another order each time."""

    generator = np.random.default_rng(5)

    def get_node_ids(self) -> Iterable[int]:
        return self.generator.permutation(list(super().get_node_ids())).tolist()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        return [replies[i] for i in self.generator.permutation(len(replies))]


def result(config: Config, folder: Path, kind: type[LocalGrid], workers: int) -> object:
    config = replace(config, out=str(folder))
    with kind(app, config.num_clients, config.run_config(), workers=workers) as grid:
        serve(grid, config)
    return outcome(folder)


HUBS = {"topology": "clustered", "degree": 2, "evolve_once": True, "steps": "5,10"}
CASES = {method: {"method": method, **SETTINGS[method]} for method in all_methods()}
CASES |= {"ntk-dfl, hubs": {"method": "ntk-dfl", "ntk_dfl": HUBS}}


@pytest.mark.parametrize("case", sorted(CASES))
def test_order_of_replies_and_number_of_workers_change_nothing(tmp_path, case):
    config = replace(SMALL, learning_rate=0.05, **CASES[case])
    expected = result(config, tmp_path / "serial", LocalGrid, 1)
    assert result(config, tmp_path / "shuffled", Shuffled, 3) == expected
    other = result(replace(config, seed=1), tmp_path / "seed", LocalGrid, 1)
    assert other[0] != expected[0]  # the model


def test_dropout_in_clients_at_work_at_the_same_time(tmp_path, monkeypatch):
    """Torch's generator, from which dropout draws, is one for all threads."""
    code = """
        from torch import nn
        def make(input_shape, num_classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(),
                                 nn.Dropout(0.5), nn.Linear(32, num_classes))
    """
    (tmp_path / "dropout_network.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    config = replace(
        SMALL, method="fedavg", model="dropout_network:make", local_epochs=3, min_partition_size=2
    )
    expected = result(config, tmp_path / "serial", LocalGrid, 1)
    assert result(config, tmp_path / "shuffled", Shuffled, 4) == expected
