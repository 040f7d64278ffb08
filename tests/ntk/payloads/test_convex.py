"""ConvexTask through Flower's records."""

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fedntk.ntk import FeatureMap
from fedntk.ntk.options import read_task
from fedntk.ntk.payloads.convex_task import ConvexTask

TASKS = [
    ConvexTask(step="moments", network_key="a key"),
    ConvexTask(
        step="linear", features="last-layer", num_features=0, feature_seed=7, head="body.fc",
        bias=True, loss="cross-entropy", learning_rate=1e-300, local_steps=1, optimizer="fedavg",
        state_round=12, control="sent", bits=6,
    ),
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_tasks_survive_flowers_config_among_other_keys(task):
    config = dict(ConfigRecord({"server-round": 3, "lr": 0.1, **task.to_config()}))
    received = read_task(ConvexTask, config)
    for name in ConvexTask.options():
        assert getattr(received, name) == getattr(task, name)
        assert type(getattr(received, name)) is type(getattr(task, name))
    assert received.feature_map == task.feature_map
    assert read_task(ConvexTask, {"server-round": 3, "step": "linear"}) is None


def test_a_key_names_network_and_map():
    """The same for the same bytes, in whatever memory; another for any change in them."""
    state = [np.arange(6.0).reshape(2, 3), np.array(3), np.zeros((0, 2), np.float32)]
    key = ConvexTask.key_of(FeatureMap(), state)
    assert ConvexTask.key_of(FeatureMap(), [np.array(a, order="F") for a in state]) == key
    first, *rest = state
    changed = (first.reshape(3, 2), np.nextafter(first, 9), first.view(np.int64))
    others = {ConvexTask.key_of(FeatureMap(), [other, *rest]) for other in changed}
    others |= {ConvexTask.key_of(FeatureMap(), arrays) for arrays in (state[::-1], state[:2])}
    assert len({key, ConvexTask.key_of(FeatureMap(seed=1), state), *others}) == 7
