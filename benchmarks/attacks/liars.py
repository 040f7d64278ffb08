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
"""

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from common import RESULTS

from fedntk.ntk.robust_averages import DEFENCES
from fedntk.simulations import Config, run
from fedntk.simulations.attacks import choose_liars
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.methods import find_method

from . import Row, grid

Attack = tuple[str, int]  # and number of liars
LABELS: list[Attack] = [("label-shift", 1), ("label-shift", 2), ("label-shift", 3)]
CHANGES: list[Attack] = [("sign-flip", 1), ("inner-product", 2)]
JACOBIANS: list[Attack] = [("false-jacobians", 2)]
ABSENT: list[Attack] = [("absent", 1), ("absent", 2), ("absent", 3)]
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


def cells() -> Iterator[Row]:
    """Return the attacks and defences that each method is run with."""
    for method, (recommended, settings) in METHODS.items():
        others = DEFENCES if method == "fedavg" else ("none",)
        rules = find_method(method, {})[1].strategy_class.rules
        # NTK-FL's replies with changed labels are malformed, and dropped without a defence
        attacks = [*LABELS, *([] if method in ("ntk-fl", "cp-ntk-fl") else CHANGES)]
        attacks += JACOBIANS if method in ("ntk-fl", "ntk-dfl") else []
        for defence in dict.fromkeys(("none", recommended, "norm-bound", "nnm", *others)):
            more = ABSENT if defence == "none" else []
            for attack, liars in [("none", 0), *attacks, *more]:
                # a third liar would be among the clients by which personal methods are judged
                if defence in rules and (liars < 3 or "private_test" not in settings):
                    yield from grid(data=DATA, alpha=(0.5, 0.1), method=(method,),
                                    defence=(defence,), attack=(attack,), liars=(liars,),
                                    seed=range(10))  # fmt: skip


CELLS = list(cells())


def rows(
    data_dir: str, data: str, alpha: float, method: str, defence: str, attack: str, liars: int,
    seed: int,
) -> Iterator[Row]:  # fmt: skip
    common: dict[str, Any] = {
        "method": method, "num_clients": 10, "alpha": alpha, "rounds": 10, "seed": seed,
        "learning_rate": 0.1, "local_epochs": 5, "clients_per_evaluation": 0,
        "screening": {"rule": defence, "malicious": 1 if defence == "bulyan" else max(2, liars)},
        "attack": attack, "liars": liars, "attack_factor": 50.0 * (attack == "sign-flip"),
        "data_dir": data_dir, "validation_examples": 100 * (defence == "validation"),
    }  # fmt: skip
    config = Config.parse({**common, **DATA[data], **METHODS[method][1]})
    config = config.replace(evaluate_every=config.rounds, checkpoint_every=config.rounds)
    with tempfile.TemporaryDirectory() as folder:
        result = run(config.replace(out=folder), progress=False)
    if not config.private_test:
        yield {"accuracy": float(result.summary["accuracy"])}
        return
    sizes = [len(places) for places in load_setup(config).split.clients]
    clients = result.clients[result.clients.metric == "accuracy"]
    honest = ~clients.partition.isin(choose_liars(2, sizes, seed))
    yield {"accuracy": float(clients[honest & (clients["round"] == config.rounds)].value.mean())}


def points_lost(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean points that each attack costs, of the honest run without a defence.

    A case is `plain` without a defence, `defended` with the recommended one (both, if none is), and
    `absent` without the liars.
    """
    keys = ["data", "alpha", "method", "seed"]
    honest = table[(table.attack == "none") & (table.defence == "none")]
    both = table.merge(honest[[*keys, "accuracy"]], on=keys, suffixes=("", "-honest"))
    both["points"] = 100 * (both["accuracy-honest"] - both.accuracy)
    present, recommended = both.attack != "absent", both.method.map(lambda m: METHODS[m][0])
    cases = {
        "plain": present & (both.defence == "none"),
        "defended": present & (both.defence == recommended),
        "absent": ~present,
    }
    parts = pd.concat([both[some].assign(case=case) for case, some in cases.items()])
    groups = parts.groupby([*keys[:3], "case", "attack", "liars"])
    return groups.agg({"points": "mean", "seed": "count"}).reset_index()


def costs(table: pd.DataFrame) -> pd.DataFrame:
    """Return what the worst attack costs each method, a row for each number of liars."""
    keys, lost = ["data", "alpha", "method"], points_lost(table)
    worst = lost.groupby([*keys, "liars", "case"]).points.max().unstack().reset_index("liars")
    honest = table[(table.attack == "none") & (table.defence == "none")]
    worst["honest"] = 100 * honest.groupby(keys).accuracy.mean()
    worst["seeds"] = lost.groupby(keys).seed.min()
    worst = worst.reset_index()
    worst["defence"] = worst.method.map(lambda method: METHODS[method][0])
    order = [worst.data, -worst.alpha, worst.method.map([*METHODS].index), worst.liars]
    columns = [*keys, "defence", "seeds", "honest", "liars", "defended", "plain", "absent"]
    return worst.iloc[np.lexsort(order[::-1])][columns]


def draw(table: pd.DataFrame, _: Any, stem: str) -> None:
    """Draw the points that each attack costs, and write those of the worst for each method."""
    costs(table).to_csv(RESULTS / f"{stem}_costs.csv", index=False, float_format="%.2f")
    lost = points_lost(table)
    styles = {
        "plain": ("rx", -0.2, "without a defence"),
        "defended": ("go", 0.0, "with the recommended one"),
        "absent": ("k_", 0.2, "without the liars"),
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.2), sharey=True, layout="constrained")
    for (data, alpha), axis in zip(itertools.product(DATA, (0.5, 0.1)), axes.flat, strict=True):
        for case, (style, offset, label) in styles.items():
            part = lost[(lost.case == case) & (lost.data == data) & (lost.alpha == alpha)]
            x = part.method.map([*METHODS].index) + offset
            axis.plot(x, part.points, style, ms=5, alpha=0.8, label=label)
        axis.axhline(0, color="black", lw=0.7)
        axis.set_xticks(range(len(METHODS)), METHODS, rotation=30, ha="right")
        axis.set(title=f"{data}, Dirichlet {alpha}", ylabel="points lost to the honest run")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(RESULTS / f"{stem}.png", dpi=110)
