"""NTK-FL at three fixed learning rates and at the automatic one, an MLP and a CNN.

Fashion-MNIST: 20 clients with 2,400 training images in all, Dirichlet(0.1), 10 clients a round,
full kernel, one seed. Accuracy is measured on 2,000 other images of the training set, which no
client has. The test set is not used.

    python benchmarks/learning_rate.py --data-dir FOLDER [--rounds 10]
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import RESULTS, parse_options, write
from matplotlib import pyplot
from matplotlib.figure import Figure

from fedntk.ntk.evolution.gradient_flow import AUTO_STEPS
from fedntk.simulations import Config, compare, read_runs
from fedntk.simulations.data.load import load_data
from fedntk.simulations.report.figures import COLOURS, MARKERS

VALIDATION = 2000
MODELS = {"MLP": "mlp", "CNN": "lenet"}
RATES = ("0.1", "0.01", "0.001", "auto")
KEPT = ("accuracy", "loss", "t", "learning-rate", "kernel-products", "seconds")
COMMON: dict[str, Any] = {
    "num_clients": 20, "clients_per_round": 10, "clients_per_evaluation": 0,
    "partition": "dirichlet", "alpha": 0.1, "train_examples": 2400, "seed": 0,
}  # fmt: skip


def without_test_set(data_dir: str, path: Path) -> None:
    """Write the training set as a data set with 2,000 of its images as the test set."""
    data = load_data(Config(dataset="fashion-mnist", data_dir=data_dir))
    order = np.random.default_rng(0).permutation(len(data.y_train))
    train, validation = order[VALIDATION:], order[:VALIDATION]
    np.savez(
        path, x_train=data.x_train[train], y_train=data.y_train[train],
        x_test=data.x_train[validation], y_test=data.y_train[validation],
    )  # fmt: skip


def configuration(model: str, rate: str, **common: Any) -> Config:
    own: dict[str, Any] = {"kernel": "full"}
    if rate == "auto":
        own["auto_learning_rate"] = True
    else:
        common["learning_rate"] = float(rate)
    return Config(method="ntk-fl", model=model, ntk_fl=own, **COMMON, **common)


def of(rounds: pd.DataFrame, run: str, metric: str) -> pd.Series:
    chosen = rounds[(rounds.run == run) & (rounds.metric == metric)]
    return chosen.set_index("round")["value"]


def row(rounds: pd.DataFrame, run: str, last: int) -> dict[str, Any]:
    accuracy, steps = of(rounds, run, "accuracy"), of(rounds, run, "t")
    rates, seconds = of(rounds, run, "learning-rate"), of(rounds, run, "seconds")
    return {
        "accuracy": {str(r): round(accuracy[r], 4) for r in (3, last)},
        "best-accuracy": round(accuracy.max(), 4),
        "loss": round(of(rounds, run, "loss")[last], 4),
        "rounds-without-step": int((steps == 0).sum()),
        "learning-rates": [float(f"{rates.min():.3g}"), float(f"{rates.max():.3g}")],
        "median-kernel-products": int(of(rounds, run, "kernel-products").median()),
        "median-seconds-a-round": round(seconds[seconds.index > 0].median(), 2),
    }


def curves(rounds: pd.DataFrame) -> Figure:
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    for axis, model in zip(axes, MODELS, strict=True):
        for rate, colour, marker in zip(RATES, COLOURS, MARKERS, strict=False):
            line = of(rounds, f"{model}, {rate}", "accuracy")
            axis.plot(line.index, line, color=colour, marker=marker, ms=4, label=rate)
        axis.set(title=model, xlabel="communication round", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy on 2,000 validation images")
    axes[0].legend(title="learning rate", loc="lower right")
    return figure


def main() -> None:
    options = parse_options(__doc__, data_dir=True, rounds=10)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "training_set.npz"
        without_test_set(options.data_dir, path)
        common = {"dataset": f"npz:{path}", "rounds": options.rounds}
        configs = {
            f"{name}, {rate}": configuration(model, rate, **common)
            for name, model in MODELS.items()
            for rate in RATES
        }
        rounds = compare(configs, out=Path(scratch) / "runs")
        split = {finished.summary["split"] for finished in read_runs(Path(scratch) / "runs")}
    rounds = rounds[rounds.metric.isin(KEPT)]
    settings = {
        key: value
        for key, value in next(iter(configs.values())).values().items()
        if key not in ("out", "data-dir", "dataset", "learning-rate", "model", "name")
        and key != "ntk-fl.auto-learning-rate"
    }
    summary = {
        "validation-examples": VALIDATION, "settings": settings, "steps-of-auto": list(AUTO_STEPS),
        "splits": sorted(split), "runs": {run: row(rounds, run, options.rounds) for run in configs},
    }  # fmt: skip
    write("learning_rate", rounds, summary)
    curves(rounds).savefig(RESULTS / "learning_rate.png", dpi=110)


if __name__ == "__main__":
    main()
