"""Runs on a part of the training examples: rates were chosen on others, held out before."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data


def accuracy(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, int | None, float]]:
    """Yield the mean of the last five test accuracies in %, and the last.

    Of the training examples, in an order of seed 0, the first ``held-out`` are left out; the next
    ``examples`` are those of the clients and the server.
    """
    options = dict(settings)
    place = {"data-dir": options.pop("data-dir") or "data"}
    first, count = options.pop("held-out"), options.pop("examples")
    data = load_data(Config(place, dataset=options["dataset"]))
    order = np.random.default_rng(0).permutation(len(data.y_train))[first : first + count]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        parts = {"x_train": data.x_train[order], "y_train": data.y_train[order]}
        np.savez(path, x_test=data.x_test, y_test=data.y_test, **parts)
        options |= {"dataset": f"npz:{path}", "out": str(Path(folder) / "run")}
        curve = run(Config(options, seed=seed), progress=False).curve()
    yield "accuracy", None, 100 * float(curve.tail(5).mean())
    yield "last", None, 100 * float(curve.iloc[-1])
