"""TCT with a bias that starts elsewhere, on data with a rare class."""

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
from sklearn.datasets import load_digits, make_classification

from fedntk.ntk.convex.pooled_statistics import class_weights
from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data
from fedntk.strategies.tct import tct

Examples = tuple[np.ndarray, np.ndarray]
Figures = Iterator[tuple[str, None, float]]


def digits() -> Examples:
    """Return all digits of scikit-learn, as rows of 64 numbers."""
    x, y = load_digits(return_X_y=True)
    return x.astype(np.float32), y


def digit_8() -> Examples:
    """Return the same with the classes "is an 8" and "is another digit"."""
    x, y = digits()
    return x, (y == 8).astype(np.int64)


def table(share: float = 0.5) -> Examples:
    """Return 2,500 rows of 20 numbers in two classes; the first has a share of them."""
    x, y = make_classification(
        2500, 20, n_informative=8, n_redundant=4, weights=[share], class_sep=0.5, flip_y=0.01,
        random_state=3,
    )  # fmt: skip
    return x.astype(np.float32), y


def rare_table() -> Examples:
    """Return such rows with 94 % in one class."""
    return table(0.94)


def measure(settings: dict[str, Any], seed: int) -> Figures:
    """Yield accuracy and balanced accuracy after the last round, in percent.

    ``bias-from-zero`` starts the bias at 0. ``plain-ridge`` divides the ridge by the factor that
    `balanced` multiplies it with.
    """
    options = dict(settings)
    zero, plain = (options.pop(key, False) for key in ("bias-from-zero", "plain-ridge"))
    if function := options.pop("function", ""):
        options["dataset"] = f"{__file__}:{function}"
    start = mock.patch.object(tct, "best_bias", lambda counts, _: np.zeros(len(counts)))
    with tempfile.TemporaryDirectory() as folder, start if zero else nullcontext():
        config = Config(options, seed=seed, out=folder)
        if plain:
            counts = np.bincount(load_data(config).y_train)
            weights = class_weights(counts)
            ridge = 0.01 * (counts * weights).sum() / (counts * weights**2).sum()
            config = config.replace(tct={"sums": {"ridge": float(ridge)}})
        done = run(config, progress=False)
    for metric in ("accuracy", "balanced-accuracy"):
        yield metric, None, 100 * done.curve(metric).iloc[-1]
