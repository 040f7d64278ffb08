"""How far Fed-ensemble's predictions can be trusted, next to FedAvg's, on non-IID Fashion-MNIST.

5,000 images on 50 clients, Dirichlet(0.1), 10 clients a round, and as many client updates for both
methods: Fed-ensemble's are shared by its 5 models. 5 further clients and 500 further images are held
out to calibrate prediction sets. MNIST is what the models have not seen. The seed changes the split,
the first weights and the sampling. No setting was tried besides these.

    python benchmarks/uncertainty.py --data-dir FOLDER [--rounds 50] [--seeds 0,1,2]

FOLDER is in torchvision's layout, with both data sets. Writes beside this file
results/uncertainty.csv (each model of each run), results/uncertainty_sets.csv (prediction sets),
results/uncertainty.json (machine, settings, means over the seeds) and the pictures of the
ensemble with the first seed.
"""

import argparse
import json
import tempfile
from pathlib import Path

import pandas as pd

from fedntk.simulations import Config, assess, compare, read_runs
from fedntk.simulations.results import machine

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "dataset": "fashion-mnist",
    "partition": "dirichlet",
    "alpha": 0.1,
    "train-examples": 5500,
    "num-clients": 55,
    "validation-clients": 5,
    "validation-examples": 500,
    "clients-per-round": 10,
    "clients-per-evaluation": 0,
    "model": "mlp",
    "learning-rate": 0.1,
    "local-epochs": 5,
    "batch-size": 32,
    "device": "cpu",
}
RUNS = {
    "Fed-ensemble": {"method": "fed-ensemble", "fed-ensemble.num-models": 5},
    "FedAvg": {"method": "fedavg"},
}
COVERAGE = 0.9


def main() -> None:
    """Run, assess, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", default="0,1,2")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    configs = {name: Config.parse({**SETTINGS, **own}) for name, own in RUNS.items()}
    tables, sets = [], []
    with tempfile.TemporaryDirectory() as scratch:
        compare(
            configs, seeds=seeds, out=scratch, rounds=arguments.rounds, data_dir=arguments.data_dir
        )
        for run in read_runs(scratch):
            name, seed = run.summary["run"], run.summary["seed"]
            for on in ("clients", "examples"):
                for score in ("threshold", "adaptive"):
                    found = assess(
                        run, unfamiliar="mnist", coverage=COVERAGE, score=score, calibrate_on=on
                    )
                    row = {"run": name, "seed": seed, "calibrated": on, **vars(found.sets)}
                    sets.append(
                        {k: v for k, v in row.items() if k not in ("note", "calibrated_on")}
                    )
            tables.append(found.table.rename_axis("model").reset_index())
            tables[-1].insert(0, "seed", seed)
            tables[-1].insert(0, "run", name)
            if name == "Fed-ensemble" and seed == seeds[0]:
                for picture, figure in found.figures().items():
                    if picture in ("reliability", "rejection", "unfamiliar-entropy"):
                        stem = f"uncertainty_{picture.replace('-', '_')}"
                        figure.savefig(RESULTS / f"{stem}.png")
    table, in_sets = pd.concat(tables, ignore_index=True), pd.DataFrame(sets)
    table.to_csv(RESULTS / "uncertainty.csv", index=False, float_format="%.6g")
    in_sets.to_csv(RESULTS / "uncertainty_sets.csv", index=False, float_format="%.6g")
    kind = (
        table["run"] + ", " + table["model"].str.replace(r"model \d+", "single model", regex=True)
    )
    means = table.drop(columns=["run", "model"]).groupby(kind).mean().drop(columns="seed")
    of_sets = in_sets.groupby(["run", "calibrated", "score"])[
        ["test_coverage", "mean_size", "empty"]
    ]
    summary = {
        "machine": machine(),
        "seeds": seeds,
        "rounds": arguments.rounds,
        "settings": SETTINGS,
        "runs": RUNS,
        "means": json.loads(means.round(4).to_json(orient="index")),
        "sets": of_sets.mean().round(4).reset_index().to_dict("records"),
    }
    path = RESULTS / "uncertainty.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(means.round(4).to_string())
    print(of_sets.agg(["mean", "min", "max"]).round(3).to_string())


if __name__ == "__main__":
    main()
