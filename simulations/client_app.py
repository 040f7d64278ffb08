"""The client half of the Flower app: the configured method's client, with its partition."""

import copy
import threading
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient
from torch import nn

from fedntk.clients import client_app

from .config import Config
from .data import Data, load_data
from .meter import meter
from .methods import make_client
from .models import build_model
from .partitions import Split, load_split

__all__ = ["app"]

STATE = "fedntk.client"  # name of the record that a client keeps


def client_fn(context: Context) -> NumPyClient:
    """Make the client of the partition that the node's configuration names."""
    if (_thread.run_id, _thread.run_config) != (context.run_id, context.run_config):
        _thread.prepare(context)
    torch.set_num_threads(_thread.config.client_threads)
    partition = int(context.node_config["partition-id"])
    if STATE not in context.state:
        context.state[STATE] = ConfigRecord()
    return make_client(
        _thread.config,
        partition,
        _thread.data,
        _thread.split,
        _thread.model,
        context.state.config_records[STATE],
    )


class _Thread(threading.local):
    """What the clients of one run share in a thread: every message overwrites the weights."""

    run_id: int | None = None
    run_config: Mapping[str, Any] = MappingProxyType({})
    config: Config
    data: Data
    split: Split
    model: nn.Module

    def prepare(self, context: Context) -> None:
        self.config = config = Config.parse(context.run_config)
        with _building:  # building draws from torch's global state, copying does not
            self.data, self.split = load_data(config), load_split(config)
            self.model = copy.deepcopy(_template(config))
        self.run_id, self.run_config = context.run_id, dict(context.run_config)


_thread, _building = _Thread(), threading.Lock()


@lru_cache(maxsize=1)
def _template(config: Config) -> nn.Module:
    data = load_data(config)
    return build_model(config, data.input_shape, data.num_classes)


app = client_app(client_fn, mods=[meter])
