"""Rounds without training: the weights of an MLP go out and come back. See ../overhead.py."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp import Grid, ServerApp

from fedntk.clients import client_app
from fedntk.strategies import SeededFedAvg

SHAPES = {"1.weight": (100, 64), "1.bias": (100,), "3.weight": (10, 100), "3.bias": (10,)}


class Idle(NumPyClient):
    """Sends back what it gets."""

    def fit(self, parameters, config):
        """Return the weights that came."""
        return parameters, 1, {}


client = client_app(lambda context: Idle())
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Write the seconds of each round into the file `out`."""
    options = context.run_config
    Path(str(options["out"])).write_text(
        json.dumps(rounds(grid, int(options["num-clients"]), int(options["rounds"]))),
        encoding="utf-8",
    )


def rounds(grid: Grid, num_clients: int, num_rounds: int) -> list[float]:
    """Seconds of each round with all clients, the strategy's own work included."""
    weights = ArrayRecord({k: Array(np.ones(v, np.float32)) for k, v in SHAPES.items()})
    strategy = SeededFedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=num_clients
    )
    ends: list[float] = []
    strategy.start(
        grid=grid,
        initial_arrays=weights,
        num_rounds=num_rounds,
        evaluate_fn=lambda *_: ends.append(time.perf_counter()),
    )
    replies = [strategy.train_metrics[r]["replies-accepted"] for r in range(1, num_rounds + 1)]
    if replies != [num_clients] * num_rounds:
        raise RuntimeError(f"expected {num_clients} replies a round, got {replies}")
    return np.diff(ends).tolist()
