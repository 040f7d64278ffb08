"""NTK-DFL and its rivals on Fashion-MNIST: rounds to 85 %, as in Thompson et al. 2025, figure 2.

Also MNIST with Dirichlet shares of 0.1 and 0.05 (its figure 10).

300 clients in a regular random graph of degree 5 that is drawn anew in each round, MLP with 100
hidden units, 200 images a client: disjoint for IID, else drawn for each client by its own Dirichlet
shares, so that clients overlap, as in the authors' program. Settings of each method are those of
the paper's appendix C.2; nothing is searched for here. Measured is the equal mean of all clients'
models on the test set. The seed changes the split, the first weights and the graphs; all methods
share all three.

    python benchmarks/ntk_dfl_fmnist.py --data-dir FOLDER [--methods "NTK-DFL;DFedAvg"]
        [--splits "IID;Dirichlet 0.5"] [--seeds 0,1,2] [--rounds 20] [--workers 1]

Each combination's run goes into runs/ntk_dfl_fmnist and is not repeated if it is there; what its
clients kept, 5 GB, is removed when it has ended. Of runs of different lengths the longest counts.
"""

import shutil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from common import CONF, RESULTS, parse_options, write

from fedntk.simulations import Config, read_runs, run
from fedntk.simulations.report.results import round_at

FOLDER = Path("runs/ntk_dfl_fmnist")
TARGET = 0.85
CASE = ["method", "split", "seed"]
KEPT = (
    "accuracy", "loss", "inter-client-deviation", "averaged-accuracy-mean",
    "averaged-accuracy-std", "trained-accuracy-mean", "trained-accuracy-std",
    "trained-accuracy-min", "trained-accuracy-max", "bytes-up", "bytes-down", "seconds",
    "seconds-clients",
)  # fmt: skip
CORRECTED = {"ntk-dfl.kernel": "corrected", "ntk-dfl.steps": "200,400,600,800"}
# name -> configuration, what differs from it, and in which rounds models are evaluated
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "NTK-DFL": ("ntk_dfl_fmnist", {}, 1),
    "NTK-DFL, rate decay 0.07": ("ntk_dfl_fmnist", {"ntk-dfl.learning-rate-decay": 0.07}, 1),
    "NTK-DFL, corrected kernel": ("ntk_dfl_fmnist", CORRECTED, 1),
    "NTK-DFL, corrected kernel, rate decay 0.07": (
        "ntk_dfl_fmnist",
        {**CORRECTED, "ntk-dfl.learning-rate-decay": 0.07},
        1,
    ),
    "NTK-DFL, batches m_1 = 5": ("ntk_dfl_fmnist", {"ntk-dfl.batches": 5}, 1),
    "NTK-DFL, no averaging": ("ntk_dfl_fmnist", {"ntk-dfl.average-first": False}, 1),
    "NTK-FL, as busy clients": ("ntk_fl_busyness_fmnist", {}, 1),
    "DFedAvg": ("dfedavg_fmnist", {}, 2),
    "DFedAvgM": ("dfedavg_momentum_fmnist", {}, 2),
    "D-PSGD": ("d_psgd_fmnist", {}, 5),
    "DFedSAM": ("dfedsam_fmnist", {}, 5),
    "DisPFL": ("dispfl_fmnist", {}, 5),
}
SPLITS: dict[str, dict[str, Any]] = {
    "IID": {"partition": "iid", "train_examples": 60_000},
    "Dirichlet 0.5": {"alpha": 0.5},
    "Dirichlet 0.1": {"alpha": 0.1},
    "MNIST, Dirichlet 0.1": {"dataset": "mnist", "alpha": 0.1},
    "MNIST, Dirichlet 0.05": {"dataset": "mnist", "alpha": 0.05},
}


def conclude() -> None:
    """Join the runs in the folder with those that were written before; the longest count."""
    path = RESULTS / "ntk_dfl_fmnist.csv"
    columns = [*CASE, "round", "metric", "value"]
    found = [pd.read_csv(path)] if path.exists() else []
    for finished in read_runs(FOLDER):
        method, split = finished.config.name.split(" on ")
        own = finished.rounds[finished.rounds.metric.isin(KEPT)]
        found.append(own.assign(method=method, split=split)[columns])
    runs = [own for table in found for _, own in table.groupby(CASE)]
    longest = {
        tuple(own[CASE].iloc[0]): own for own in sorted(runs, key=lambda own: own["round"].max())
    }
    rounds = pd.concat(longest.values()).sort_values(columns[:-1])
    rows = [row(case, own) for case, own in rounds.groupby(CASE)]
    table = pd.DataFrame(rows).sort_values(["split", "method", "seed"])
    print(table.to_string(index=False), flush=True)
    told = table.astype(object).where(table.notna(), None).to_dict("records")
    write("ntk_dfl_fmnist", rounds, {"target": TARGET, "rows": told})
    draw(rounds[rounds.metric == "accuracy"], path.with_suffix(".png"))


def row(case: tuple[Any, ...], part: pd.DataFrame) -> dict[str, Any]:
    accuracy = part[part.metric == "accuracy"]
    last = accuracy["round"].max()
    seconds = part[(part.metric == "seconds") & (part["round"] > 0)].value
    return {
        **dict(zip(CASE, case, strict=True)),
        "rounds": int(last),
        "rounds-to-85": round_at(accuracy.set_index("round").value.to_dict(), TARGET),
        "last": round(float(accuracy.value.iloc[-1]), 4),
        "best": round(float(accuracy.value.max()), 4),
        **{
            f"last-{point}-mean": round(float(at[at["round"] == last].value.iloc[0]), 4)
            for point in ("averaged", "trained")
            if len(at := part[part.metric == f"{point}-accuracy-mean"])
        },
        "seconds-a-round": round(float(seconds.median()), 1),
    }


def draw(accuracy: pd.DataFrame, path: Path) -> None:
    colours = dict(zip(METHODS, plt.get_cmap("tab20").colors, strict=False))
    splits = [split for split in SPLITS if split in set(accuracy.split)]
    figure, axes = plt.subplots(1, len(splits), figsize=(3.4 * len(splits), 4), squeeze=False)
    for axis, split in zip(axes[0], splits, strict=True):
        for method, colour in colours.items():
            part = accuracy[(accuracy.split == split) & (accuracy.method == method)]
            part = part[part["round"] > 0]
            if len(part):
                curves = part.groupby("round").value.agg(["mean", "min", "max"])
                axis.plot(curves.index, curves["mean"], label=method, color=colour, marker=".")
                axis.fill_between(
                    curves.index, curves["min"], curves["max"], color=colour, alpha=0.2, lw=0
                )
        axis.axhline(TARGET, color="0.6", lw=0.8, ls=":")
        axis.set(title=split, xlabel="round", xscale="log")
        axis.set_ylim((0.75, 0.95) if "MNIST" in split else (0.6, 0.88))
        last = accuracy[accuracy.split == split]["round"].max()
        ticks = [number for number in (1, 2, 5, 10, 20, 50, 100) if number <= last]
        axis.set_xticks(ticks, [str(number) for number in ticks])
        axis.set_xticks([], minor=True)
    axes[0][0].set_ylabel("test accuracy of the mean model")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    shown = [name for name in METHODS if name in lines]
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.legend([lines[name] for name in shown], shown, loc="lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, methods=tuple(METHODS), splits=tuple(SPLITS), seeds=(0, 1, 2),
        rounds=20, workers=1,
    )  # fmt: skip
    for seed in options.seeds:
        for split in options.splits:
            for method in options.methods:
                stem, changes, every = METHODS[method]
                name = f"{method} on {split}"
                config = Config.load(
                    CONF / f"{stem}.toml", **{**changes, **SPLITS[split]}, name=name, seed=seed,
                    rounds=options.rounds, evaluate_every=every, data_dir=options.data_dir,
                    out=str(FOLDER / f"{name}, {options.rounds} rounds" / str(seed)),
                )  # fmt: skip
                finished = run(config, workers=options.workers)
                shutil.rmtree(finished.folder / "cache", ignore_errors=True)  # up to 5 GB
    conclude()


if __name__ == "__main__":
    main()
