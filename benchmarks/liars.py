"""Clients that lie, and what a defence leaves of it: accuracy of each method under attack.

Ten clients, all in each round, Dirichlet 0.5 and 0.1: scikit-learn's digits, and 3,000 images of
Fashion-MNIST. Nobody lies; one client sends the change of its weights times -50 (times -99 a large
client is over the limit of `outlier_factor` and dropped), or has its labels moved on by one; two
have their labels moved on by one, or send the mean of the honest changes times -1. Methods whose
clients send Jacobians are also attacked by two who send those of false labels 50 times as large.
Liars are drawn among the clients of at least the median size, and evaluate honestly.

Each method runs without a defence and with its recommended one, for two liars; FedAvg with all,
which are Flower's strategies FedMedian, FedTrimmedAvg, Krum, MultiKrum and Bulyan by other names
(tests/ntk/test_robust_averages.py compares them). Bulyan is set for one liar, as ten clients are
too few for two. Methods that learn one model are judged on the test set, others by the mean over
the eight clients that never lie, each on its own part of the test set.

The recommended defence was chosen with FedAvg on validation examples of digits, with seeds 0 and 1.

    python benchmarks/liars.py [--data-dir FOLDER] [--methods fedavg,tct] [--seeds 0,1]

Writes results/liars.csv, a run a row, after each run, and .png. Rows of other cases stay. Without
--data-dir only digits are run; with --seeds "" only the picture is drawn.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedntk.ntk.robust_averages import DEFENCES
from fedntk.simulations import Config, run
from fedntk.simulations.attacks import choose_liars
from fedntk.simulations.config.registry import find_method
from fedntk.simulations.engine.building import load_setup

RESULTS = Path(__file__).parent / "results"
KEYS = ["data", "alpha", "method", "defence", "attack", "liars", "seed"]
# attack, liars, factor
CASES = [
    ("none", 0, 0.0),
    ("sign-flip", 1, 50.0),
    ("label-shift", 1, 0.0),
    ("label-shift", 2, 0.0),
    ("inner-product", 2, 0.0),
]
FALSE_JACOBIANS = ("false-jacobians", 2, 0.0)
# NTK-FL's replies with changed labels are malformed, and dropped without a defence
OF_KERNELS = [*(case for case in CASES if case[0] in ("none", "label-shift")), FALSE_JACOBIANS]
DATA: dict[str, dict[str, Any]] = {
    "digits": {},
    "fashion-mnist": {"dataset": "fashion-mnist", "train_examples": 3000, "test_examples": 2000},
}
PERSONAL: dict[str, Any] = {"clients_per_evaluation": 10, "private_test": True, "batch_size": 16}
HALF: dict[str, Any] = {"rounds": 4, "sampling_rate": 0.5}
STEPS = "100,200,400"
TCT = {"bootstrap_rounds": 5, "num_features": 2000, "learning_rate": 5e-4, "local_steps": 100}
# method -> its recommended defence, its settings
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("nnm", {}),
    "scaffold": ("nnm", {"scaffold": {"option": "II"}}),
    "tct": ("nnm", {"tct": TCT, "rounds": 16}),
    "fed-ensemble": ("nnm", {"fed_ensemble": {"num_models": 2}}),
    "weighted-fedavg": ("norm-bound", {**PERSONAL, "weighted_fedavg": {"temperature": 0.2}}),
    "fed-proto": ("median", PERSONAL),
    "fed-per": ("nnm", PERSONAL),
    "ditto": ("nnm", PERSONAL),
    "ntk-fl": ("leave-one-out", {**HALF, "ntk_fl": {"steps": STEPS}}),
    "cp-ntk-fl": ("leave-one-out", {**HALF, "cp_ntk_fl": {"steps": STEPS, "sparsity": 0.5}}),
    "ntk-dfl": ("leave-one-out", {**HALF, "ntk_dfl": {"steps": "200"}}),
}
CASES_OF = {"ntk-fl": OF_KERNELS, "cp-ntk-fl": OF_KERNELS, "ntk-dfl": [*CASES, FALSE_JACOBIANS]}
WORDS = {
    ("none", 0): "nobody lies",
    ("sign-flip", 1): "one: change times -50",
    ("label-shift", 1): "one: false labels",
    ("label-shift", 2): "two: false labels",
    ("inner-product", 2): "two: honest mean times -1",
    ("false-jacobians", 2): "two: false labels, large Jacobians",
}


def supported(method: str) -> tuple[str, ...]:
    """Return the defences that a method can follow."""
    return find_method(method)[1].strategy_class.defences


def measure(config: Config) -> float:
    """Run a configuration; return the accuracy of what was learned."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(config.replace(out=folder), progress=False)
    if not config.private_test:
        return float(result.summary["accuracy"])
    sizes = [len(own) for own in load_setup(config).split.clients]
    own = result.clients[result.clients.metric == "accuracy"]
    never = ~own.partition.isin(choose_liars(2, sizes, config.seed))
    return float(own[never & (own["round"] == own["round"].max())].value.mean())


def record(row: dict[str, Any], path: Path) -> None:
    """Add a row to the results, in place of one of the same case."""
    old = [pd.read_csv(path)] if path.exists() else []
    table = pd.concat([*old, pd.DataFrame([row])]).drop_duplicates(KEYS, keep="last")
    table.sort_values(KEYS).to_csv(path, index=False, float_format="%.4f")


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the points that each attack costs, without and with the recommended defence."""
    import matplotlib.pyplot as plt

    data = [name for name in DATA if name in set(table.data)]
    figure, axes = plt.subplots(
        len(data), 2, figsize=(11, 3.6 * len(data)), sharey=True, squeeze=False
    )
    for (name, alpha), axis in zip(itertools.product(data, (0.5, 0.1)), axes.flat, strict=True):
        own = table[(table.data == name) & (table.alpha == alpha)]
        means = own.groupby(["method", "defence", "attack", "liars"]).accuracy.mean()
        methods = [method for method in METHODS if method in set(own.method)]
        for i, method in enumerate(methods):
            for side, (defence, colour) in enumerate(
                (("none", "tab:red"), (METHODS[method][0], "tab:green"))
            ):
                best = means[method, "none", "none", 0]
                costs = [
                    100 * (best - means.get((method, defence, *case), np.nan)) for case in WORDS
                ]
                axis.scatter(
                    np.full(len(costs), i + 0.3 * side - 0.15), costs, c=colour, s=30,
                    marker="o" if side else "x", alpha=0.8,
                    label=("with the recommended defence" if side else "without") if not i else "",
                )  # fmt: skip
        for level in (3, 5):
            axis.axhline(level, color="grey", lw=0.7, ls=":")
        axis.axhline(0, color="black", lw=0.7)
        axis.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
        axis.set_title(f"{name}, Dirichlet {alpha}", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    for row in axes:
        row[0].set_ylabel("points lost to the honest run")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure the cases of the methods and seeds, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1")
    options = parser.parse_args()
    path = RESULTS / "liars.csv"
    seeds = [int(seed) for seed in options.seeds.split(",") if seed]
    data = ["fashion-mnist"] if options.data_dir else ["digits"]
    for seed, name, method in itertools.product(seeds, data, options.methods.split(",")):
        recommended, settings = METHODS[method]
        others = DEFENCES if method == "fedavg" else ("none",)
        defences = dict.fromkeys(("none", recommended, "norm-bound", *others))
        defences = [each for each in defences if each in supported(method)]
        for defence, alpha, case in itertools.product(
            defences, (0.5, 0.1), CASES_OF.get(method, CASES)
        ):
            attack, liars, factor = case
            common: dict[str, Any] = {
                "method": method, "num_clients": 10, "alpha": alpha, "rounds": 10, "seed": seed,
                "learning_rate": 0.1, "local_epochs": 5, "clients_per_evaluation": 0,
                "defence": defence, "liars_expected": 1 if defence == "bulyan" else 2,
                "attack": attack, "liars": liars, "attack_factor": factor,
                "data_dir": options.data_dir,
            }  # fmt: skip
            config = Config.parse({**common, **DATA[name], **settings})
            values = (name, alpha, method, defence, attack, liars, seed)
            row = {**dict(zip(KEYS, values, strict=True)), "accuracy": measure(config)}
            print(row, flush=True)
            record(row, path)
    draw(pd.read_csv(path), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
