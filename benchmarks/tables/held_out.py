"""Runs on a part of the training examples of a data set, and all its test examples."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedntk.simulations import Config, run
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.load import load_data

Figures = Iterator[tuple[str, None, float]]


def accuracy(settings: dict[str, Any], seed: int) -> Figures:
    """Yield the mean of the last five test accuracies in %, and the last.

    Of the training examples, in an order of seed 0, the first ``held-out`` are left out, on which
    rates were chosen; the next ``examples`` are those of the clients and the server.
    """
    options = dict(settings)
    first, count = options.pop("held-out"), options.pop("examples")
    data = whole(options)
    order = np.random.default_rng(0).permutation(len(data.y_train))
    yield from figures(data, order[first : first + count], options, seed)


def long_tailed(settings: dict[str, Any], seed: int) -> Figures:
    """Yield the same on a long-tailed set (Cui et al., CVPR 2019).

    The first class has ``imbalance`` times as many examples as the last, and each class the same
    factor more than the next.
    """
    options = dict(settings)
    imbalance, data = options.pop("imbalance"), whole(options)
    counts = np.bincount(data.y_train)
    shares = imbalance ** (-np.arange(len(counts)) / (len(counts) - 1))
    parts = [
        np.flatnonzero(data.y_train == label)[: round(count * share)]
        for label, (count, share) in enumerate(zip(counts, shares, strict=True))
    ]
    yield from figures(data, np.sort(np.concatenate(parts)), options, seed)


def whole(options: dict[str, Any]) -> Data:
    """Return the whole data set, and take its place out of the options."""
    place = {"data-dir": options.pop("data-dir") or "data"}
    return load_data(Config(place, dataset=options["dataset"]))


def figures(data: Data, rows: NDArray[np.int64], options: dict[str, Any], seed: int) -> Figures:
    """Yield the figures of a run on some rows of the training examples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        parts = {"x_train": data.x_train[rows], "y_train": data.y_train[rows]}
        np.savez(path, x_test=data.x_test, y_test=data.y_test, **parts)
        options = {**options, "dataset": f"npz:{path}", "out": f"{folder}/run"}
        curve = run(Config(options, seed=seed), progress=False).curve()
    yield "accuracy", None, 100 * float(curve.tail(5).mean())
    yield "last", None, 100 * float(curve.iloc[-1])
