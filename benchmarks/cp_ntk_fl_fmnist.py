"""CP-NTK-FL on non-IID Fashion-MNIST: bytes and rounds to 85 %, and what each tool costs.

Yue et al. 2022, section 6: 300 clients, 20 a round, Dirichlet(0.1), MLP with 100 hidden units. The
seed changes the split, the first weights, the sampling and the projection; runs of a seed share all
of them.

    python benchmarks/cp_ntk_fl_fmnist.py PART --data-dir FOLDER [--seeds 0,1,2] [--out FOLDER]

Parts, each with results/cp_ntk_fl_<part>.csv, .json and .png beside this file:

table
    Table 1 and figure 3: rounds and uplink to 85 %, of CP-NTK-FL and of FedAvg, with and without
    the tools. The literal wire's bytes are measured over three rounds.
grid
    Figure 6: accuracy after 10 rounds, by sampling rate and features of the projection.
bytes
    Accuracy of rounds 4 to 6 against bytes a round: the factored and the literal Jacobian,
    sparsified and quantised.
"""

import argparse
import json
import tempfile
from typing import Any

import numpy as np
import pandas as pd
from common import CONF, RESULTS, parse_options, write
from matplotlib.figure import Figure

from fedntk.simulations import Config, compare
from fedntk.simulations.report.figures import COLOURS, accuracy_curves
from fedntk.simulations.report.results import round_at

KEPT = ("accuracy", "bytes-up", "t")
TARGET = 0.85
# (stem of the configuration, overrides)
Run = tuple[str, dict[str, Any]]
CP, FEDAVG = "cp_ntk_fl_fmnist", "fedavg_fmnist"
TOOLS = {"sampling_rate": 0.3, "projection": 200}
PLAIN = {"cp-ntk-fl.sparsity": 0.0, "cp-ntk-fl.bits": 32, "cp-ntk-fl.shuffle": False}
# Thompson et al. 2025, appendix E
SMALL = {"cp-ntk-fl.sparsity": 0.5, "cp-ntk-fl.bits": 6, "cp-ntk-fl.shuffle": True}
DENSE = {"cp-ntk-fl.structure": "dense", "clients_per_evaluation": 0}

TABLE: dict[str, Run] = {
    "CP-NTK-FL": (CP, PLAIN),
    "CP-NTK-FL, sparsity 0.5, 6 bits": (CP, SMALL),
    "NTK-FL (no tools)": (CP, PLAIN | {"sampling_rate": 1.0, "projection": 0}),
    "FedAvg'": (FEDAVG, TOOLS),
    "FedAvg": (FEDAVG, {}),
}
ROUNDS = {"CP-NTK-FL": 150, "CP-NTK-FL, sparsity 0.5, 6 bits": 150, "NTK-FL (no tools)": 40}
LITERAL: dict[str, Run] = {
    "literal": (CP, PLAIN | DENSE),
    "literal, sparsity 0.5, 6 bits": (CP, SMALL | DENSE),
}
RATES = (0.1, 0.2, 0.3, 0.5, 1.0)
FEATURES = (50, 100, 200, 400, 784)
FACTORED_CODES = ((0.0, 32), (0.0, 8), (0.5, 6), (0.5, 3), (0.8, 4), (0.9, 3), (0.95, 3))
LITERAL_CODES = ((0.9, 6), (0.98, 6), (0.995, 6), (0.999, 4))


def table(options: argparse.Namespace) -> None:
    parts = []
    for name, run in TABLE.items():
        rounds = options.rounds or ROUNDS.get(name, 300)
        parts.append(measured({name: run}, options, rounds=rounds))
    literal = measured(LITERAL, options, rounds=3)
    rounds = pd.concat(parts)
    reached: dict[str, Any] = {}
    for name, rows in rounds.groupby("run", sort=False):
        firsts, costs = to_target(rows)
        reached[str(name)] = {
            "rounds to 85 %": firsts,
            "MB up to 85 %": [cost for cost in costs if cost is not None],
            "MB up a round": megabytes_a_round(rows),
            "rounds run": int(rows["round"].max()),
            "accuracy after round 10, 40, last": [
                mean_accuracy(rows, r) for r in (10, 40, int(rows["round"].max()))
            ],
        }
    for name, rows in literal.groupby("run", sort=False):
        reached[str(name)] = {
            "MB up a round": megabytes_a_round(rows),
            "accuracy after round 3": mean_accuracy(rows, 3),
        }
    keep("table", pd.concat([rounds, literal]), {"reached": reached})
    for against in ("rounds", "bytes-up"):
        figure = accuracy_curves(
            rounds[rounds["round"] > 0],
            against=against,
            title="Fashion-MNIST, 300 clients, Dirichlet(0.1), 20 a round",
            target=TARGET,
            bottom=0.6,
        )
        if against == "bytes-up":
            figure.axes[0].set(xscale="log", xlim=(0.9, None))
        figure.savefig(RESULTS / f"cp_ntk_fl_table_{against}.png")


def to_target(rows: pd.DataFrame) -> tuple[list[int | None], list[float | None]]:
    """Return rounds and MB from clients until the target, for each seed of a run."""
    firsts, costs = [], []
    for _, part in rows.groupby("seed"):
        by_metric = part.pivot_table(index="round", columns="metric", values="value")
        first = round_at(by_metric.accuracy.to_dict(), TARGET)
        bytes_up = by_metric["bytes-up"].loc[:first].sum() / 1e6
        firsts.append(first)
        costs.append(None if first is None else round(float(bytes_up), 1))
    return firsts, costs


def grid(options: argparse.Namespace) -> None:
    runs: dict[str, Run] = {
        f"{rate:g} x {features}": (
            CP,
            PLAIN | {"sampling_rate": rate, "projection": features, "clients_per_evaluation": 0},
        )
        for rate in RATES
        for features in FEATURES
    }
    rounds = measured(runs, options, rounds=10)
    values = np.array([
        [mean_accuracy(rounds[rounds.run == f"{rate:g} x {d}"], 10) for d in FEATURES]
        for rate in RATES
    ])  # fmt: skip
    cells = pd.DataFrame(values, index=list(RATES), columns=list(FEATURES))
    keep("grid", rounds, {"accuracy after 10 rounds": json.loads(cells.to_json(orient="split"))})
    figure = Figure(figsize=(6, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    picture = axes.imshow(100 * values, cmap="cividis", origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(100 * values):
        dark = value < 100 * (values.min() + values.max()) / 2
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color="w" if dark else "k")
    axes.set_xticks(range(len(FEATURES)), FEATURES)
    axes.set_yticks(range(len(RATES)), RATES)
    axes.set(
        xlabel="features of the projection, $d_1'$",
        ylabel=r"sampling rate, $\beta$",
        title="Test accuracy (%) of CP-NTK-FL after 10 rounds",
    )
    figure.colorbar(picture, ax=axes, label="test accuracy (%)")
    figure.savefig(RESULTS / "cp_ntk_fl_grid.png")


def by_bytes(options: argparse.Namespace) -> None:
    runs: dict[str, Run] = {}
    for wire, codes in (("factored", FACTORED_CODES), ("dense", LITERAL_CODES)):
        for sparsity, bits in codes:
            runs[f"{wire} {sparsity:g} {bits}"] = (
                CP,
                {
                    "cp-ntk-fl.structure": wire,
                    "cp-ntk-fl.sparsity": sparsity,
                    "cp-ntk-fl.bits": bits,
                    "cp-ntk-fl.shuffle": False,
                    "cp-ntk-fl.kernel": "mean",  # of literal rows the full one takes minutes
                    "clients_per_evaluation": 0,
                },
            )
    rounds = measured(runs, options, rounds=6)
    rows = []
    for name, part in rounds.groupby("run", sort=False):
        wire, sparsity, bits = str(name).split()
        late = part[(part.metric == "accuracy") & (part["round"] >= 4)].groupby("seed").value.mean()
        rows.append({
            "wire": wire,
            "sparsity": float(sparsity),
            "bits": int(bits),
            "MB up a round": megabytes_a_round(part),
            "accuracy, mean of rounds 4 to 6": round(float(late.mean()), 4),
            "lowest seed": round(float(late.min()), 4),
            "highest seed": round(float(late.max()), 4),
        })  # fmt: skip
    cells = pd.DataFrame(rows)
    keep("bytes", rounds, {"settings": cells.to_dict(orient="records")})
    drawn_by_bytes(cells).savefig(RESULTS / "cp_ntk_fl_bytes.png")


def drawn_by_bytes(cells: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for (wire, own), colour, marker in zip(
        cells.groupby("wire", sort=False), COLOURS, "os", strict=False
    ):
        own = own.sort_values("MB up a round")
        middle = 100 * own["accuracy, mean of rounds 4 to 6"]
        below, above = middle - 100 * own["lowest seed"], 100 * own["highest seed"] - middle
        label = {"factored": "in factors", "dense": "literal tensor"}[str(wire)]
        axes.errorbar(
            own["MB up a round"], middle, [below, above], color=colour, marker=marker, label=label
        )
        for x, y, s, b in zip(own["MB up a round"], middle, own.sparsity, own.bits, strict=True):
            axes.annotate(f"{s:g}, {b}", (x, y), (4, -11), textcoords="offset points", fontsize=7)
    axes.set(
        xscale="log",
        xlabel="data sent by 20 clients in a round (MB)",
        ylabel="test accuracy (%), mean of rounds 4 to 6",
        title="Compressed Jacobians (sparsity, bits)",
    )
    axes.legend(frameon=False, loc="lower right", title="bars: range over seeds")
    axes.margins(x=0.1)
    return figure


def measured(runs: dict[str, Run], options: argparse.Namespace, *, rounds: int) -> pd.DataFrame:
    configs = {
        name: Config.load(CONF / f"{stem}.toml", **overrides)
        for name, (stem, overrides) in runs.items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        return compare(
            configs, seeds=options.seeds, out=options.out or scratch, rounds=rounds,
            data_dir=options.data_dir, targets=str(TARGET), checkpoint_every=rounds,
            server_threads=options.threads,
        )  # fmt: skip


def megabytes_a_round(rows: pd.DataFrame) -> float:
    up = rows[(rows.metric == "bytes-up") & (rows["round"] > 0)]
    return round(float(up.value.mean() / 1e6), 3)


def mean_accuracy(rows: pd.DataFrame, server_round: int) -> float:
    accuracy = rows[(rows.metric == "accuracy") & (rows["round"] == server_round)]
    return round(float(accuracy.value.mean()), 4)


def keep(part: str, rounds: pd.DataFrame, summary: dict[str, Any]) -> None:
    configuration = (CONF / f"{CP}.toml").read_text(encoding="utf-8").splitlines()
    measured = rounds[rounds.metric.isin(KEPT)].drop(columns="method")
    write(f"cp_ntk_fl_{part}", measured, {"configuration": configuration, **summary})


PARTS = {"table": table, "grid": grid, "bytes": by_bytes}


def main() -> None:
    options = parse_options(
        __doc__, part=PARTS, data_dir=True, out="", seeds=(0, 1, 2), threads=0, rounds=0
    )
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
