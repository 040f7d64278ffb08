"""The client half of the Flower app: the configured method's client, with its partition."""

import copy
import threading
from functools import lru_cache

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import nn

from fedntk.clients import client_app

from .config import Config
from .data import load_data
from .meter import meter
from .methods import make_client
from .models import build_model
from .partitions import load_split

__all__ = ["app"]


def client_fn(context: Context) -> NumPyClient:
    """Make the client of the partition that the node's configuration names."""
    config = _config(tuple(context.run_config.items()))
    torch.set_num_threads(config.client_threads)
    partition = int(context.node_config["partition-id"])
    return make_client(config, partition, load_data(config), load_split(config), _model(config))


@lru_cache(maxsize=4)
def _config(items: tuple[tuple[str, bool | float | int | str], ...]) -> Config:
    return Config.parse(dict(items))


class _Thread(threading.local):
    """The network of a thread, and the configuration it was built for."""

    config: Config | None = None
    model: nn.Module


_thread, _building = _Thread(), threading.Lock()


def _model(config: Config) -> nn.Module:
    """One network for each thread at work: every message overwrites its weights."""
    if _thread.config != config:
        with _building:  # building draws from torch's global state, copying does not
            _thread.model = copy.deepcopy(_template(config))
        _thread.config = config
    return _thread.model


@lru_cache(maxsize=1)
def _template(config: Config) -> nn.Module:
    data = load_data(config)
    return build_model(config, data.input_shape, data.num_classes)


app = client_app(client_fn, mods=[meter])
