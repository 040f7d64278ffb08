"""Runs on a part of the training examples of a data set; others are held out before."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedntk.simulations import Config, Run, run
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.load import load_data

Values = Iterator[tuple[str, int | None, float]]
Rows = NDArray[np.int64]


def accuracy(settings: dict[str, Any], seed: int) -> Values:
    """Yield the mean of the last five test accuracies in %, and the last.

    Of the training examples, in an order of seed 0, the first ``held-out`` are left out, on which
    rates were chosen; the next ``examples``, all if 0, are those of the clients and the server.
    """
    options = dict(settings)
    data = _whole(options)
    train, _ = _parted(data, options)
    yield from _figures(_run(data, train, options=options, seed=seed))


def long_tailed(settings: dict[str, Any], seed: int) -> Values:
    """Yield the same on a long-tailed set (Cui et al., CVPR 2019).

    The first class has ``imbalance`` times as many examples as the last, and each class the same
    factor more than the next.
    """
    options = dict(settings)
    imbalance, data = options.pop("imbalance"), _whole(options)
    counts = np.bincount(data.y_train)
    shares = imbalance ** (-np.arange(len(counts)) / (len(counts) - 1))
    parts = [
        np.flatnonzero(data.y_train == label)[: round(count * share)]
        for label, (count, share) in enumerate(zip(counts, shares, strict=True))
    ]
    yield from _figures(_run(data, np.sort(np.concatenate(parts)), options=options, seed=seed))


def learning_rate(settings: dict[str, Any], seed: int) -> Values:
    """Yield how NTK-FL learns, its accuracy on the examples that are held out."""
    options = dict(settings)
    data = _whole(options)
    done = _run(data, *_parted(data, options), options=options, seed=seed)
    curve, rates = 100 * done.curve(), 1000 * done.curve("learning-rate")
    yield from (("curve", number, value) for number, value in curve.items())
    for number in {min(3, len(rates)), len(rates)}:
        yield "accuracy", number, curve[number]
    for number in (1, len(rates)):
        yield "rate", number, rates[number]
    yield "stuck", None, (done.curve("t") == 0).sum()
    yield "products", None, done.curve("kernel-products").median()
    yield "a-round", None, done.curve("seconds")[1:].median()


def _whole(options: dict[str, Any]) -> Data:
    """Return the whole data set, and take its place out of the options."""
    place = {"data-dir": options.pop("data-dir") or "data"}
    return load_data(Config(place, dataset=options["dataset"]))


def _parted(data: Data, options: dict[str, Any]) -> tuple[Rows, Rows]:
    """Return rows to train on and rows that are held out, and take their numbers out of options."""
    first, count = options.pop("held-out"), options.pop("examples")
    order = np.random.default_rng(0).permutation(len(data.y_train))
    return order[first:][: count or None], order[:first]


def _run(
    data: Data, train: Rows, tested: Rows | None = None, *, options: dict[str, Any], seed: int
) -> Run:
    """Run on some rows of the training examples; others may stand for the test set."""
    parts = {"x_train": data.x_train[train], "y_train": data.y_train[train]}
    parts |= {"x_test": data.x_test, "y_test": data.y_test}
    if tested is not None:
        parts |= {"x_test": data.x_train[tested], "y_test": data.y_train[tested]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        np.savez(path, **parts)
        options = {**options, "dataset": f"npz:{path}", "out": f"{folder}/run"}
        return run(Config(options, seed=seed), progress=False)


def _figures(done: Run) -> Values:
    curve = done.curve()
    yield "accuracy", None, 100 * float(curve.tail(5).mean())
    yield "last", None, 100 * float(curve.iloc[-1])
