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

Runs go into runs/cp_ntk_fl_fast, and are not repeated if they are there. What searches came to is
taken from the results.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from common import CONF, RESULTS, parse_options, write
from cp_ntk_fl_fmnist import TARGET, to_target

from fedntk.simulations import Config, compare, tune
from fedntk.simulations.report.figures import accuracy_curves

FOLDER = Path("runs/cp_ntk_fl_fast")
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
                config, grid=grid, seeds=(0, 1), parallel=options.parallel,
                out=FOLDER / f"search, {name}",
            )  # fmt: skip
            told[name] = found.trials[["mean", "std", *grid]].round(4).to_dict("records")
        print(name, told[name][0], flush=True)
        return config.replace(**{key: told[name][0][key] for key in grid})

    def start(stem: str, **changes: Any) -> Config:
        return Config.load(
            CONF / f"{stem}.toml", **changes, data_dir=options.data_dir, rounds=20,
            validation_examples=5_000, checkpoint_every=20,
        )  # fmt: skip

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


def row(name: str, part: pd.DataFrame) -> dict[str, Any]:
    firsts, costs = to_target(part)
    rounds = int(part["round"].max())
    accuracy = part[part.metric == "accuracy"]
    up, down = (
        part[(part.metric == f"bytes-{way}") & (part["round"] > 0)].value.mean() / 1e6
        for way in ("up", "down")
    )
    return {
        "method": name,
        "seeds": sorted(map(int, part.seed.unique())),
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
    options = parse_options(
        __doc__, data_dir=True, seeds=(0, 1, 2), rounds=25, runs="", search="", parallel=1
    )
    options.search = [*filter(None, options.search.split(";"))]
    before = json.loads((RESULTS / "cp_ntk_fl_fast.json").read_text(encoding="utf-8"))
    told = before["search"]
    configs = {
        name: config.replace(rounds=options.rounds, clients_per_evaluation=0)
        for name, config in chosen(searched(options, told)).items()
    }
    asked = options.runs.split(";") if options.runs else [*configs]
    new = compare(
        {name: configs[name] for name in asked}, seeds=options.seeds, out=FOLDER / "table"
    )
    new = new[new.metric.isin(KEPT)].drop(columns="method")
    earlier = pd.read_csv(RESULTS / "cp_ntk_fl_fast.csv")
    measured_again = earlier.set_index(CASE).index.isin(new.set_index(CASE).index)
    rounds = pd.concat([earlier[~measured_again], new])
    rows = [row(name, of_run) for name in configs if len(of_run := rounds[rounds.run == name])]
    print(pd.DataFrame(rows).to_string(index=False), flush=True)
    write("cp_ntk_fl_fast", rounds, {"search": told, "table": rows})
    drawn = ("no option", "all three", "all three, compressed", "FedAvg'", "FedAvg", "SCAFFOLD'")
    shown = rounds[rounds.run.isin(drawn) & (rounds["round"] > 0)]
    for against in ("rounds", "bytes-up"):
        figure = accuracy_curves(
            shown, against=against, title="Fashion-MNIST, 300 clients, Dirichlet(0.1), 20 a round",
            target=TARGET, bottom=0.65,
        )  # fmt: skip
        if against == "bytes-up":
            figure.axes[0].set(xscale="log", xlim=(0.9, None))
        figure.savefig(RESULTS / f"cp_ntk_fl_fast_{against}.png")


if __name__ == "__main__":
    main()
