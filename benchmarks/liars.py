"""Clients that lie, and what a defence leaves of it: accuracy of each method under attack.

Ten clients, all in each round, Dirichlet 0.5 and 0.1: scikit-learn's digits, and 3,000 images of
Fashion-MNIST. Nobody lies; one client sends the change of its weights times -50 (times -99 a large
client is over the outlier factor and dropped), or has its labels moved on by one; two
have their labels moved on by one, or send the mean of the honest changes times -1; three have their
labels moved on by one. NTK-FL and NTK-DFL are also attacked by two who send the Jacobians of false
labels 50 times as large; CP-NTK-FL's, which are encoded, are beyond that attack. Liars are drawn
among the clients of at least the median size, and evaluate honestly.

Each method runs without a defence, and with its recommended one for two liars, or for three among
three; FedAvg with all defences, which are Flower's strategies FedMedian, FedTrimmedAvg, Krum,
MultiKrum and Bulyan by other names (tests/ntk/test_robust_averages.py compares them). Bulyan is set
for one liar, as ten clients are too few for two. Each also runs without a defence and without the
liars, as if a defence knew them. Methods that learn one model are judged on the test set, others by
the mean over the eight clients that never lie, each on its own part of the test set.

With ``validation`` the server keeps 100 of the training examples. Defences were chosen with FedAvg
on validation examples of digits (seeds 0 and 1); so were the 0.5 % from which ``validation`` drops
a client (FedAvg with seeds 10 to 12, TCT with 10 and 11).

    python benchmarks/liars.py [--data-dir FOLDER] [--methods fedavg,tct] [--seeds 0,1,2]
        [--defences leave-one-out]

Costs at worst are in liars_costs.csv. Without --data-dir only digits are run; with --seeds "" only
costs and picture are made anew.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import RESULTS, keep_rows, parse_options

from fedntk.ntk.robust_averages import DEFENCES
from fedntk.simulations import Config, run
from fedntk.simulations.attacks import choose_liars
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.methods import find_method

KEYS = ["data", "alpha", "method", "defence", "attack", "liars", "seed"]
SEEDED = ["data", "alpha", "method", "seed"]
Case = tuple[str, int]  # attack, liars
CASES: list[Case] = [
    ("none", 0),
    ("sign-flip", 1),
    ("label-shift", 1),
    ("label-shift", 2),
    ("inner-product", 2),
    ("label-shift", 3),
]
FACTORS = {"sign-flip": 50.0}
ABSENT: list[Case] = [("absent", 1), ("absent", 2), ("absent", 3)]
# NTK-FL's replies with changed labels are malformed, and dropped without a defence
OF_KERNELS = [case for case in CASES if case[0] in ("none", "label-shift")]
FALSE_JACOBIANS: Case = ("false-jacobians", 2)
GOAL = {"nobody": 1, "one": 3, "two": 5}  # who lies -> points that a defence may cost
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
    "fedavg": ("validation", {}),
    "scaffold": ("validation", {"scaffold": {"option": "II"}}),
    "tct": ("validation", {"tct": TCT, "rounds": 16}),
    "fed-ensemble": ("validation", {"fed_ensemble": {"num_models": 2}}),
    "weighted-fedavg": ("none", {**PERSONAL, "weighted_fedavg": {"temperature": 0.2}}),
    "fed-proto": ("geometric-median", PERSONAL),
    "fed-per": ("nnm", PERSONAL),
    "ditto": ("validation", PERSONAL),
    "ntk-fl": ("leave-one-out", {**HALF, "ntk_fl": {"steps": STEPS}}),
    "cp-ntk-fl": ("leave-one-out", {**HALF, "cp_ntk_fl": {"steps": STEPS, "sparsity": 0.5}}),
    "ntk-dfl": ("leave-one-out", {**HALF, "ntk_dfl": {"steps": "200"}}),
}
CASES_OF = {
    "ntk-fl": [*OF_KERNELS, FALSE_JACOBIANS],
    "cp-ntk-fl": OF_KERNELS,
    "ntk-dfl": [*CASES, FALSE_JACOBIANS],
}
# the third liar is among the clients that these are judged by
FEWER_LIARS = [method for method, (_, settings) in METHODS.items() if "private_test" in settings]


def measure(config: Config) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = run(config.replace(out=folder), progress=False)
    if not config.private_test:
        return float(result.summary["accuracy"])
    sizes = [len(own) for own in load_setup(config).split.clients]
    own = result.clients[result.clients.metric == "accuracy"]
    never = ~own.partition.isin(choose_liars(2, sizes, config.seed))
    return float(own[never & (own["round"] == own["round"].max())].value.mean())


def points_lost(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean `points` that each case loses to the honest run without a defence."""
    honest = table[(table.attack == "none") & (table.defence == "none")]
    both = table.merge(honest[[*SEEDED, "accuracy"]], on=SEEDED, suffixes=("", "_honest"))
    both["points"] = 100 * (both.accuracy_honest - both.accuracy)
    grouped = both.groupby(KEYS[:-1]).points
    return grouped.agg(points="mean", seeds="count").reset_index()


def costs_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy in percent and the points that the worst attack costs, a method a row.

    ``plain-1``, ``defended-1`` and ``absent-1`` are for one liar: without a defence, with the
    recommended one, and without the liar. ``missed`` says with how many liars the
    recommended defence costs more than the goal, if all were measured.
    """
    honest = table[(table.attack == "none") & (table.defence == "none")]
    honest, rows = honest.groupby(KEYS[:3]).accuracy.mean(), []
    for (name, alpha, method), part in points_lost(table).groupby(KEYS[:3]):
        recommended = METHODS[method][0]
        part = part[part.defence.isin(("none", recommended))]
        absent = part.attack == "absent"
        worst = part[~absent].groupby(["defence", "liars"]).points.max()
        without = part[absent].set_index("liars").points
        row = {"data": name, "alpha": alpha, "method": method, "defence": recommended}
        row |= {"seeds": part.seeds.min(), "honest": 100 * honest[name, alpha, method]}
        row["defended-0"] = worst.get((recommended, 0), np.nan)
        for liars in (1, 2, 3):
            row[f"plain-{liars}"] = worst.get(("none", liars), np.nan)
            row[f"defended-{liars}"] = worst.get((recommended, liars), np.nan)
            row[f"absent-{liars}"] = without.get(liars, np.nan)
        costs = {word: row[f"defended-{n}"] for n, word in enumerate(GOAL)}
        if not np.isnan([*costs.values()]).any():
            row["missed"] = " ".join(w for w, cost in costs.items() if cost > GOAL[w]) or "none"
        rows.append(row)
    methods = list(METHODS)
    rows.sort(key=lambda row: (row["data"], -row["alpha"], methods.index(row["method"])))
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, path: Path) -> None:
    import matplotlib.pyplot as plt

    lost = points_lost(table)
    data = [name for name in DATA if name in set(lost.data)]
    methods = [method for method in METHODS if method in set(lost.method)]
    figure, axes = plt.subplots(
        len(data), 2, figsize=(11, 3.6 * len(data)), sharey=True, squeeze=False
    )
    for (name, alpha), axis in zip(itertools.product(data, (0.5, 0.1)), axes.flat, strict=True):
        part = lost[(lost.data == name) & (lost.alpha == alpha)]
        recommended = part.method.map(lambda method: METHODS[method][0])
        absent = part.attack == "absent"
        defended = ~absent & (part.defence == recommended)
        for offset, colour, marker, shown, label in (
            (-0.2, "tab:red", "x", ~absent & (part.defence == "none"), "without a defence"),
            (0.0, "tab:green", "o", defended, "with the recommended one"),
            (0.2, "black", "_", absent, "without the liars"),
        ):
            some = part[shown]
            x = [methods.index(method) + offset for method in some.method]
            axis.scatter(x, some.points, c=colour, marker=marker, s=30, alpha=0.8, label=label)
        for level in (GOAL["one"], GOAL["two"]):
            axis.axhline(level, color="grey", lw=0.7, ls=":")
        axis.axhline(0, color="black", lw=0.7)
        axis.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
        axis.set_xlim(-0.5, len(methods) - 0.5)
        axis.set_title(f"{name}, Dirichlet {alpha}", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    for row in axes:
        row[0].set_ylabel("points lost to the honest run")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def cases_of(method: str) -> Iterator[tuple[str, Case]]:
    """Return the defences and cases that a method is run with."""
    others = DEFENCES if method == "fedavg" else ("none",)
    defences = dict.fromkeys(("none", METHODS[method][0], "norm-bound", *others))
    for defence in defences:
        if defence in find_method(method, {})[1].strategy_class.rules:
            more = ABSENT if defence == "none" else []
            for case in [*CASES_OF.get(method, CASES), *more]:
                if case[1] < 3 or method not in FEWER_LIARS:
                    yield defence, case


def run_case(
    name: str, alpha: float, method: str, defence: str, case: Case, seed: int, data_dir: str = ""
) -> None:
    attack, liars = case
    common: dict[str, Any] = {
        "method": method, "num_clients": 10, "alpha": alpha, "rounds": 10, "seed": seed,
        "learning_rate": 0.1, "local_epochs": 5, "clients_per_evaluation": 0,
        "screening": {"rule": defence, "malicious": 1 if defence == "bulyan" else max(2, liars)},
        "attack": attack, "liars": liars, "attack_factor": FACTORS.get(attack, 0.0),
        "data_dir": data_dir, "validation_examples": 100 * (defence == "validation"),
    }  # fmt: skip
    config = Config.parse({**common, **DATA[name], **METHODS[method][1]})
    config = config.replace(evaluate_every=config.rounds, checkpoint_every=config.rounds)
    values = (name, alpha, method, defence, attack, liars, seed)
    row = {**dict(zip(KEYS, values, strict=True)), "accuracy": measure(config)}
    print(row, flush=True)
    keep_rows("liars", [row], KEYS)


def conclude() -> None:
    table = pd.read_csv(RESULTS / "liars.csv")
    costs_of(table).to_csv(RESULTS / "liars_costs.csv", index=False, float_format="%.2f")
    draw(table, RESULTS / "liars.png")


def main() -> None:
    options = parse_options(
        __doc__, data_dir="", methods=tuple(METHODS), defences="", seeds=(0, 1, 2)
    )
    seeds = options.seeds
    name = "fashion-mnist" if options.data_dir else "digits"
    for seed, method in itertools.product(seeds, options.methods):
        for (defence, case), alpha in itertools.product(cases_of(method), (0.5, 0.1)):
            if not options.defences or defence in options.defences.split(","):
                run_case(name, alpha, method, defence, case, seed, options.data_dir)
    conclude()


if __name__ == "__main__":
    main()
