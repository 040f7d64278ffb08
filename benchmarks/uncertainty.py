"""How far Fed-ensemble's predictions can be trusted, next to FedAvg's, on non-IID Fashion-MNIST.

5,000 images on 50 clients, Dirichlet(0.1), 10 clients a round. Both methods have as many client
updates: Fed-ensemble's are shared by its 5 models. 5 further clients and 500 further images are
held out to calibrate prediction sets. MNIST is what the models have not seen. The seed changes the
split, the first weights and the sampling. Learning rate and local epochs were not searched
for either method, and both lengths are reported.

    python benchmarks/uncertainty.py --data-dir FOLDER [--rounds 50,150] [--seeds 0,1,2]

uncertainty.csv has each model of each run, uncertainty_sets.csv prediction sets. Pictures are of
the ensemble with the first seed and the most rounds.
"""

import itertools
import json
import tempfile
from typing import Any

import pandas as pd
from common import RESULTS, parse_options, write

from fedntk.simulations import Config, Run, assess, compare, read_runs

SETTINGS = {
    "dataset": "fashion-mnist", "partition": "dirichlet", "alpha": 0.1, "train-examples": 5500,
    "num-clients": 55, "validation-clients": 5, "validation-examples": 500, "clients-per-round": 10,
    "clients-per-evaluation": 0, "model": "mlp", "learning-rate": 0.1, "local-epochs": 5,
    "batch-size": 32, "device": "cpu",
}  # fmt: skip
RUNS = {
    "Fed-ensemble": {"method": "fed-ensemble", "fed-ensemble.num-models": 5},
    "FedAvg": {"method": "fedavg"},
}
COVERAGE = 0.9
TEXTS = ("calibrated_on", "score", "note")  # of the sets


def main() -> None:
    options = parse_options(__doc__, data_dir=True, rounds=(50, 150), seeds=(0, 1, 2))
    seeds = options.seeds
    lengths = sorted(options.rounds)
    configs = {name: Config.parse({**SETTINGS, **own}) for name, own in RUNS.items()}
    tables, sets = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rounds in lengths:  # the longer runs go on from the shorter ones
            compare(configs, seeds=seeds, out=scratch, rounds=rounds, data_dir=options.data_dir)
            for run in read_runs(scratch):
                table, own_sets = assessed(run)
                tables.append(table)
                sets += own_sets
                drawn = (run.summary["run"], run.summary["seed"], rounds)
                if drawn == ("Fed-ensemble", seeds[0], lengths[-1]):
                    draw(run)
    conclude(pd.concat(tables, ignore_index=True), pd.DataFrame(sets), seeds)


def assessed(run: Run) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    whose = {key: run.summary[key] for key in ("run", "rounds", "seed")}
    sets = []
    for on, score in itertools.product(("clients", "examples"), ("threshold", "adaptive")):
        found = assess(run, unfamiliar="mnist", coverage=COVERAGE, score=score, calibrate_on=on)
        own = {key: value for key, value in vars(found.sets).items() if key not in TEXTS}
        sets.append({**whose, "calibrated": on, "score": score, **own})
    table = found.table.rename_axis("model").reset_index()
    return pd.concat([pd.DataFrame([whose] * len(table)), table], axis=1), sets


def draw(run: Run) -> None:
    for name, figure in assess(run, unfamiliar="mnist").figures().items():
        if name in ("reliability", "rejection", "unfamiliar-entropy"):
            figure.savefig(RESULTS / f"uncertainty_{name.replace('-', '_')}.png")


def conclude(table: pd.DataFrame, sets: pd.DataFrame, seeds: list[int]) -> None:
    write("uncertainty_sets", sets)
    kind = table.model.str.replace(r"model \d+", "single model", regex=True)
    means = table.assign(model=kind).groupby(["rounds", "run", "model"]).mean(numeric_only=True)
    means = means.drop(columns="seed").round(4)
    by = sets.groupby(["rounds", "run", "calibrated", "score"])
    of_sets = by[["test_coverage", "mean_size", "empty"]].mean().round(4)
    summary = {
        "seeds": seeds,
        "settings": SETTINGS,
        "runs": RUNS,
        "means": json.loads(means.reset_index().to_json(orient="records")),
        "sets": json.loads(of_sets.reset_index().to_json(orient="records")),
    }
    write("uncertainty", table, summary)
    print(means.to_string())
    print(by.test_coverage.agg(["mean", "min", "max"]).round(3).to_string())
    print(of_sets.to_string())


if __name__ == "__main__":
    main()
