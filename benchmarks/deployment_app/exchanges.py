"""Exchanges without work: each reply says when its client's process did what. See ../reports.py.

All clocks are this machine's. CPU seconds are those of the process so far.
"""

import json
import os
import time
from pathlib import Path

LOADED = {"time": time.time(), "cpu": time.process_time()}  # Flower has got as far as this app

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from fedntk.clients import client_app  # noqa: E402
from fedntk.clients.core.numpy_client import NumPyClient  # noqa: E402

IMPORTED = {"time": time.time(), "cpu": time.process_time()}
KINDS = ("train", "query", "evaluate")
SHAPES = {"1.weight": (100, 784), "1.bias": (100,), "3.weight": (10, 100), "3.bias": (10,)}


def _stages() -> dict[str, float]:
    """When the process was started, had loaded Flower, had imported what the app needs, and now."""
    started = psutil.Process(os.getpid()).create_time()
    now = {"time": time.time(), "cpu": time.process_time()}
    stages = {"started": {"time": started}, "loaded": LOADED, "imported": IMPORTED, "answered": now}
    return {f"{name}-{of}": value for name, at in stages.items() for of, value in at.items()}


class Idle(NumPyClient):
    """Sends back what it gets."""

    def fit(self, parameters, config):
        """Return the weights that came."""
        return parameters, 1, _stages()

    def evaluate(self, parameters, config):
        """Return a loss of 0."""
        return 0.0, 1, _stages()

    def query(self, parameters, config):
        """Return nothing else."""
        return _stages()


client = client_app(lambda context: Idle())
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Exchange messages of each kind with all nodes in turn, and write what they said."""
    options = context.run_config
    while len(nodes := list(grid.get_node_ids())) < int(options["nodes"]):
        time.sleep(0.2)
    weights = ArrayRecord({k: Array(np.ones(v, np.float32)) for k, v in SHAPES.items()})
    rows = []
    for _ in range(int(options["repeats"])):
        for kind in KINDS:
            content = RecordDict({"arrays": weights, "config": ConfigRecord()})
            sent = time.time()
            messages = [Message(content, node, kind) for node in nodes]
            replies = list(grid.send_and_receive(messages))
            received = time.time()
            rows += [
                {
                    "exchange": kind,
                    "sent-time": sent,
                    "received-time": received,
                    **dict(reply.content["metrics"]),
                }
                for reply in replies
            ]
    Path(str(options["out"])).write_text(json.dumps(rows), encoding="utf-8")
