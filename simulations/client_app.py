"""The client half of the Flower app: the configured method's client, with its partition."""

from functools import lru_cache

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import nn

from fedntk.clients import client_app

from .config import Config
from .data import load_data
from .methods import make_client
from .models import build_model
from .partitions import load_split

__all__ = ["app"]


def client_fn(context: Context) -> NumPyClient:
    """Make the client of the partition that the node's configuration names."""
    config = Config.parse(context.run_config)
    torch.set_num_threads(config.client_threads)
    partition = int(context.node_config["partition-id"])
    return make_client(config, partition, load_data(config), load_split(config), _model(config))


@lru_cache(maxsize=1)
def _model(config: Config) -> nn.Module:
    """One network a process: every message overwrites its weights."""
    data = load_data(config)
    return build_model(config, data.input_shape, data.num_classes)


app = client_app(client_fn)
