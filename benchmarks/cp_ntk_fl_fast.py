"""CP-NTK-FL with this package's options: rounds and bytes to 85 %, and FedAvg with the same help.

The data of Yue et al. 2022, Table 1: Fashion-MNIST, 300 clients, 200 images each from a client-wise
Dirichlet(0.1), or 55,000 split at random; 20 clients a round, MLP with 100 hidden units. The
options are the class prior, the exponential mean of the weights over rounds, and low frequencies in
place of the Gaussian projection; one at a time, together, and compressed.

"search": learning rate and decay of the mean are chosen on 5,000 validation images that no client
has, with two seeds and 20 rounds: by the mean accuracy of the last five. The configuration has the
best pair at the third of four rates, 0.024: the fourth was 0.2 points better and takes more
products of the kernel. The learning rate of FedAvg', its local epochs of batches of 32, and whether
its clients' loss has the class prior are chosen in the same way. It also has the mean of the
weights, with a decay of 0.5 (the best of 0.5, 0.7 and 0.85 in an earlier search, which is not
kept), and the projection to low frequencies; clients use all their examples in each round. What was
chosen for it serves FedAvg without projection, SCAFFOLD', and FedProx', for which only mu is
searched. A further search has FedAvg' with more local epochs than it is chosen from, to see how
much they would gain.
"table": test accuracy by rounds and by bytes from clients to server, metered.

    python benchmarks/cp_ntk_fl_fast.py --data-dir FOLDER [--runs "all three;FedAvg'"]
        [--search "FedAvg'"] [--seeds 0,1,2] [--rounds 25] [--parallel 1]

FOLDER is in torchvision's layout. Runs go into runs/cp_ntk_fl_fast, and are not repeated if they
are there. Writes beside this file results/cp_ntk_fl_fast.csv (accuracy and bytes of all rounds),
.json (machine, search, table) and _rounds.png and _bytes-up.png. What these have of other runs and
seeds stays, and what searches came to is taken from there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from fedntk.simulations import Config, compare, tune
from fedntk.simulations.report.figures import accuracy_curves
from fedntk.simulations.report.results import machine, round_at

CONF = Path(__file__).parent.parent / "simulations" / "conf"
RESULTS = Path(__file__).parent / "results"
FOLDER = Path("runs/cp_ntk_fl_fast")
TARGET = 0.85
CASE = ["run", "seed"]
KEPT = ("accuracy", "bytes-up", "bytes-down")
DECAYS = [0.5, 0.7, 0.85]
WHOLE: dict[str, Any] = {"cp-ntk-fl.sparsity": 0.0, "cp-ntk-fl.bits": 32}
GAUSSIAN = {"projection_kind": "gaussian"}
NEWEST = {"average": False}
NO_PRIOR = {"cp-ntk-fl.class-prior": False}
IID = {"partition": "iid", "train_examples": 55_000}
# name -> what differs from cp_ntk_fl_fmnist_fast.toml
OURS: dict[str, dict[str, Any]] = {
    "no option": {**WHOLE, **GAUSSIAN, **NEWEST, **NO_PRIOR},
    "class prior": {**WHOLE, **GAUSSIAN, **NEWEST},
    "mean of the weights": {**WHOLE, **GAUSSIAN, **NO_PRIOR},
    "low frequencies": {**WHOLE, **NEWEST, **NO_PRIOR},
    "all three": WHOLE,
    "all three, compressed": {},
    "all three, compressed, classes as so far": {"cp-ntk-fl.class-target": "seen"},
    "prior and mean, compressed": GAUSSIAN,
    "prior, mean and centred, compressed": {
        **GAUSSIAN,
        "centre": True,
        "cp-ntk-fl.shuffle": False,  # which the clients' sums would undo
    },
    "IID, no option": {**WHOLE, **GAUSSIAN, **NEWEST, **NO_PRIOR, **IID},
    "IID, all three, compressed": IID,
}
MORE_EPOCHS = "FedAvg', more epochs"  # beyond what is chosen from
HELPED = {"average": {"decay": 0.5}, "batch_size": 32, "clients_per_evaluation": 0}
PROJECTED = {"projection": 200, "projection_kind": "low-frequency"}
# name -> what is searched; FedProx' also has what was chosen for FedAvg'
GRIDS: dict[str, dict[str, list[Any]]] = {
    "CP-NTK-FL": {"learning-rate": [0.006, 0.012, 0.024, 0.048], "average.decay": DECAYS},
    "FedAvg'": {
        "local-epochs": [5, 20, 50],
        "learning-rate": [0.03, 0.1, 0.3],
        "class-prior": [True, False],
    },
    MORE_EPOCHS: {"local-epochs": [100, 200], "learning-rate": [0.03, 0.1], "class-prior": [True]},
    "FedProx'": {"fedavg.proximal-mu": [0.001, 0.01, 0.1]},
}


def searched(options: argparse.Namespace, told: dict[str, Any]) -> dict[str, Config]:
    """Return the best configuration of each method; `told` has, and gets, what searches came to."""

    def best(name: str, config: Config) -> Config:
        grid = GRIDS[name]
        if name not in told or name in options.search:
            found = tune(
                config,
                grid=grid,
                seeds=(0, 1),
                parallel=options.parallel,
                out=FOLDER / f"search, {name}",
            )
            told[name] = found.trials[["mean", "std", *grid]].round(4).to_dict("records")
        print(name, told[name][0], flush=True)
        return config.replace(**{key: told[name][0][key] for key in grid})

    def start(stem: str, **changes: Any) -> Config:
        return Config.load(
            CONF / f"{stem}.toml",
            **changes,
            data_dir=options.data_dir,
            rounds=20,
            validation_examples=5_000,
            checkpoint_every=20,
        )

    ours = best("CP-NTK-FL", start("cp_ntk_fl_fmnist_fast"))
    if "FedAvg'" in options.search:
        told.pop("FedProx'", None)
    helped = start("fedavg_fmnist", **HELPED, **PROJECTED)
    fedavg = best("FedAvg'", helped)
    best(MORE_EPOCHS, helped)
    return {"CP-NTK-FL": ours, "FedAvg'": fedavg, "FedProx'": best("FedProx'", fedavg)}


def chosen(best: dict[str, Config]) -> dict[str, Config]:
    """Return all configurations of the table, with what the searches chose."""
    settled = Config.load(CONF / "cp_ntk_fl_fmnist_fast.toml")
    ours = best["CP-NTK-FL"].replace(learning_rate=settled.learning_rate, average=settled.average)
    decay = {"average": ours.average}
    named = {name: ours.replace(**{**decay, **changes}) for name, changes in OURS.items()}
    theirs = best["FedAvg'"]
    return named | {
        "FedAvg'": theirs,
        "FedProx'": best["FedProx'"],
        "FedAvg": theirs.replace(projection=0, projection_kind="gaussian"),
        "SCAFFOLD'": theirs.replace(method="scaffold"),
        "IID, FedAvg'": theirs.replace(**IID),
    }


def row(name: str, own: pd.DataFrame) -> dict[str, Any]:
    """Return rounds and bytes to the target for each seed, and the accuracy at some rounds."""
    firsts, costs, rounds = [], [], int(own["round"].max())
    for _, of_seed in own.groupby("seed"):
        wide = of_seed.pivot_table(index="round", columns="metric", values="value")
        first = round_at(wide.accuracy.to_dict(), TARGET)
        firsts.append(first)
        bytes_up = None if first is None else wide["bytes-up"].loc[:first].sum()
        costs.append(None if bytes_up is None else round(float(bytes_up) / 1e6, 1))
    accuracy = own[own.metric == "accuracy"]
    up, down = (
        own[(own.metric == f"bytes-{way}") & (own["round"] > 0)].value.mean() / 1e6
        for way in ("up", "down")
    )
    return {
        "method": name,
        "seeds": sorted(map(int, own.seed.unique())),
        "rounds to 85 %": firsts,
        "MB up to 85 %": costs,
        "MB up a round": round(float(up), 2),
        "MB down a round": None if pd.isna(down) else round(float(down), 2),  # older runs
        **{
            f"accuracy after {n}": round(float(accuracy[accuracy["round"] == n].value.mean()), 4)
            for n in (5, 10, 20, rounds)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--runs", default="", help="names, by semicolons; all without it")
    parser.add_argument("--search", default="", help="names to search again, by semicolons")
    parser.add_argument("--parallel", type=int, default=1, help="trials of the search at a time")
    options = parser.parse_args()
    options.search = [*filter(None, options.search.split(";"))]
    if unknown := set(options.search) - GRIDS.keys():
        parser.error(f"--search: expected some of {', '.join(GRIDS)}, got {', '.join(unknown)}")
    stem = RESULTS / "cp_ntk_fl_fast"
    before = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    told = before["search"]
    configs = {
        name: config.replace(rounds=options.rounds, clients_per_evaluation=0)
        for name, config in chosen(searched(options, told)).items()
    }
    asked = options.runs.split(";") if options.runs else [*configs]
    if unknown := set(asked) - configs.keys():
        parser.error(f"--runs: expected some of {', '.join(configs)}, got {', '.join(unknown)}")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = compare({name: configs[name] for name in asked}, seeds=seeds, out=FOLDER / "table")
    found = found[found.metric.isin(KEPT)].drop(columns="method")
    kept = pd.read_csv(stem.with_suffix(".csv"))
    again = kept.set_index(CASE).index.isin(found.set_index(CASE).index)
    rounds = pd.concat([kept[~again], found])
    rows = [row(name, own) for name in configs if len(own := rounds[rounds.run == name])]
    print(pd.DataFrame(rows).to_string(index=False), flush=True)
    rounds.to_csv(stem.with_suffix(".csv"), index=False, float_format="%.6g")
    content = {"machine": machine(), "search": told, "table": rows}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    drawn = ("no option", "all three", "all three, compressed", "FedAvg'", "FedAvg", "SCAFFOLD'")
    shown = rounds[rounds.run.isin(drawn) & (rounds["round"] > 0)]
    for against in ("rounds", "bytes-up"):
        figure = accuracy_curves(
            shown,
            against=against,
            title="Fashion-MNIST, 300 clients, Dirichlet(0.1), 20 a round",
            target=TARGET,
            bottom=0.65,
        )
        if against == "bytes-up":
            figure.axes[0].set(xscale="log", xlim=(0.9, None))
        figure.savefig(RESULTS / f"cp_ntk_fl_fast_{against}.png")


if __name__ == "__main__":
    main()
