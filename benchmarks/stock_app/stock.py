"""FedAvg on Flower without fedntk, as in its quickstart: DataLoader, torch's SGD, Flower's FedAvg.

See ../engine.py, which writes the examples.
"""

import json
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

client = ClientApp()
server = ServerApp()
after_round: list[Callable[[int], Any]] = []  # is told of each round, where it runs in one process


def network(name: str) -> nn.Module:
    """Make the 784-100-10 perceptron, or the two convolutions of Yu et al. (2022)."""
    if name == "mlp-100":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


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


def run_config(context: Context) -> dict[str, Any]:
    """Return the settings; where Flower's ``run_simulation`` takes none, from the environment."""
    return dict(context.run_config) or json.loads(os.environ["STOCK_APP"])


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Train the received weights."""
    torch.set_num_threads(1)
    options = run_config(context)
    model = network(str(options["network"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = examples(str(options["examples"]), int(context.node_config["partition-id"]))
    batches = DataLoader(own, batch_size=int(options["batch-size"]), shuffle=True)
    loss = train(model, batches, float(options["learning-rate"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(own)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg; write the time of day before the first round and after each into `out`."""
    options, times = run_config(context), list[float]()

    def told(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del arrays
        times.append(time.time())
        for tell in after_round:
            tell(server_round)
        return MetricRecord({"accuracy": 0.0})

    number = int(options["num-clients"])
    strategy = FedAvg(
        fraction_train=int(options["clients-per-round"]) / number,
        fraction_evaluate=0.0,
        min_available_nodes=number,
    )
    torch.manual_seed(0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network(str(options["network"])).state_dict()),
        num_rounds=int(options["rounds"]),
        evaluate_fn=told,
    )
    if out := str(options["out"]):
        np.save(out, times)
