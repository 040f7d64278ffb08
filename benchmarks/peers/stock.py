"""FedAvg on Flower without fedntk, as in its quickstart: DataLoader, torch's SGD, Flower's FedAvg.

See ../cases.py, which writes the examples.
"""

import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NETWORKS
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

client = ClientApp()
server = ServerApp()
OPTIONS: dict[str, Any] = json.loads(os.environ["STOCK"])
after_round: list[Callable[[int], Any]] = []  # is told of each round


@lru_cache
def examples(folder: str, partition: int) -> TensorDataset:
    """Return a client's examples; loaded once in a process."""
    own = np.load(Path(folder) / "clients.npy")[partition]
    x, y = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r")[own] for name in "xy")
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def train(model: nn.Module, batches: DataLoader[tuple[Tensor, Tensor]], rate: float) -> float:
    """One epoch; mean loss of its batches."""
    model.train()
    criterion, total = nn.CrossEntropyLoss(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Train the received weights."""
    torch.set_num_threads(1)
    model = NETWORKS[OPTIONS["network"]][0]()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = examples(OPTIONS["examples"], int(context.node_config["partition-id"]))
    batches = DataLoader(own, batch_size=OPTIONS["batch-size"], shuffle=True)
    loss = train(model, batches, OPTIONS["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(own)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg."""

    def told(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        for tell in after_round:
            tell(server_round)
        return MetricRecord({"accuracy": 0.0})

    strategy = FedAvg(
        fraction_train=OPTIONS["clients-per-round"] / OPTIONS["num-clients"],
        fraction_evaluate=0.0,
        min_available_nodes=OPTIONS["num-clients"],
    )
    torch.manual_seed(0)
    weights = NETWORKS[OPTIONS["network"]][0]().state_dict()
    strategy.start(grid, ArrayRecord(weights), OPTIONS["rounds"], evaluate_fn=told)
