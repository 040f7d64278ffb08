"""Weighted FedAvg beside FedAvg, local training and other personalised methods, on real data.

As in Huang et al. 2024, section 6.2, scaled down to run on a CPU: half of the clients a round, and
each client judged by its own model on its own part of the test set, which is split as the training
examples are. The paper names no batch size, local epochs or number of clients. Here they are 32, 2
(1 on CIFAR-10) and 20 (5 for digit-domains: one domain each, all in every round). All methods have
the same network (LeNet with BatchNorm) and rounds, and so the same number of client updates. One
exchange trains nothing: it has one round, on 2,000 cosines of scattering coefficients.

    python benchmarks/personalised.py cifar10-pathological --data-dir FOLDER [--rounds 20]
    python benchmarks/personalised.py fashion-mnist --data-dir FOLDER --variants

Tasks: cifar10-pathological (eight classes a client), cifar10-dirichlet (0.8), mnist and
fashion-mnist (two classes a client), digit-domains (MNIST as it is, inverted, rotated, blurred, and
scikit-learn's digits enlarged). CIFAR-10 is the JPEG subset of 10,000 images in
FOLDER/CIFAR10-jpeg.

Chosen on validation examples (a tenth of each client's training examples, which no method trains on
in any run), with one seed: the learning rate, from one grid for all; then, at that rate, the
method's own setting (temperature, strength of a penalty), if it has one. Forms of weighted
FedAvg take the rate of the form with temperature 1, those with personal BatchNorm FedBN's rate.
Then three seeds on the test examples. Runs go into runs/personalised and are not repeated if they
are there. Writes beside this file results/personalised_<task>.json, in which rows of other
methods stay as they are.

``--variants`` shows how the ranking depends on what the paper leaves open: batch size, local epochs
and number of clients are changed one at a time, with the settings that were chosen for the task as
it is, and one seed. It also holds four clients out of training and reports how accurate the models
are that these new clients are sent. Writes results/personalised_<task>_variants.json.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from common import RESULTS, parse_options, write

from fedntk.simulations import Config, compare, read_runs, tune
from fedntk.simulations.report.statistics import client_gains, client_summary

SEEDS = (0, 1, 2)
TABLES = ("summary", "gains")
RATES = [0.03, 0.1, 0.3]
TEMPERATURES = [0.03, 0.1, 0.3, 1.0]
TASKS: dict[str, dict[str, Any]] = {
    "cifar10-pathological": {
        "partition": "pathological", "classes_per_client": 8, "local_epochs": 1,
    },
    "cifar10-dirichlet": {
        "partition": "dirichlet", "alpha": 0.8, "min_partition_size": 40, "local_epochs": 1,
    },
    "mnist": {"dataset": "mnist", "partition": "pathological", "train_examples": 4_000},
    "fashion-mnist": {
        "dataset": "fashion-mnist", "partition": "pathological", "train_examples": 4_000,
    },
    "digit-domains": {
        "dataset": "digit-domains", "partition": "natural", "examples_per_domain": 500,
        "num_clients": 5, "clients_per_round": 5, "clients_per_evaluation": 5,
    },
}  # fmt: skip
CHOSEN_AS = {"cifar10-dirichlet": "cifar10-pathological"}  # whose rates and settings it takes


def weighted(**options: Any) -> dict[str, Any]:
    return {"method": "weighted-fedavg", "weighted_fedavg": options}


def sums(**options: Any) -> dict[str, Any]:
    return {
        "method": "one-exchange", "one_exchange": options, "rounds": 1, "model": "scattering",
        "random_features": 2000, "bandwidth": 1.6, "standardise": False,
    }  # fmt: skip


TAU = {"weighted-fedavg.temperature": TEMPERATURES}
# name -> settings, the method's own setting with its grid, and whose learning rate it takes
# or None if it has no learning rate
METHODS: dict[str, tuple[dict[str, Any], dict[str, list[Any]], str | None]] = {
    "local training": ({"method": "local-training"}, {}, ""),
    "FedAvg": ({"method": "fedavg"}, {}, ""),
    "FedPer": ({"method": "fed-per"}, {}, ""),
    "FedBN": ({"method": "fed-bn"}, {}, ""),
    "weighted, tau = 1": (weighted(), {}, ""),
    "weighted": (weighted(), TAU, "weighted, tau = 1"),
    "weighted, entk": (weighted(similarity="entk"), TAU, "weighted, tau = 1"),
    "weighted, personal BN": (weighted(personal_batch_norm=True), TAU, "FedBN"),
    "weighted, entk, personal BN": (
        weighted(similarity="entk", personal_batch_norm=True), TAU, "FedBN",
    ),
    "Ditto": ({"method": "ditto"}, {"ditto.pull": [0.1, 1.0, 10.0]}, ""),
    "FedProto": ({"method": "fed-proto"}, {"fed-proto.pull": [0.1, 1.0, 10.0]}, ""),
    "one exchange": (sums(), {}, None),
    "one exchange, personal": (sums(personal=True), {}, None),
}  # fmt: skip


def base(task: str, data_dir: str, rounds: int) -> Config:
    images = {"dataset": f"hf:{data_dir}/CIFAR10-jpeg"} if task.startswith("cifar10") else {}
    common = {
        "data_dir": data_dir, "num_clients": 20, "clients_per_round": 10,
        "clients_per_evaluation": 20, "private_test": True, "local_test_fraction": 0.1,
        "model": "lenet-bn", "local_epochs": 2, "batch_size": 32, "rounds": rounds,
        "test_examples": 1_000,  # of the server; clients have the whole test set
        "evaluate_every": 2, "monitor": "client-accuracy-mean",
    }  # fmt: skip
    return Config(**{**common, **images, **TASKS[task]})


def chosen(config: Config, name: str, folder: Path, parallel: int) -> dict[str, Any]:
    """Choose a method's learning rate, and then its own setting, on validation examples."""
    settings, setting, rate_of = METHODS[name]
    if rate_of is None:
        return {}
    found = chosen(config, rate_of, folder, parallel) if rate_of else {}
    grids = setting if rate_of else {"learning-rate": RATES, **setting}
    trial = config.replace(**settings, evaluate_on="validation")
    for key, values in grids.items():
        searched = tune(
            Config.parse({**trial.values(), **found}), grid={key: values}, last=2,
            metric="client-accuracy-mean", parallel=parallel, out=folder / f"tune {name} {key}",
        )  # fmt: skip
        found[key] = searched.best.values()[key]
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "as above": {},
    "batches of 8": {"batch_size": 8},
    "one local epoch": {"local_epochs": 1},
    "five local epochs": {"local_epochs": 5},
    "10 clients": {"num_clients": 10, "clients_per_round": 5, "clients_per_evaluation": 10},
    "50 clients": {"num_clients": 50, "clients_per_round": 25, "clients_per_evaluation": 50},
    "four new clients": {"validation_clients": 4},
}


def run_variants(configs: dict[str, Config], task: str, folder: Path) -> None:
    rows = []
    for variant, changes in VARIANTS.items():
        out = folder / task / "variants" / variant
        varied = {name: config.replace(**changes) for name, config in configs.items()}
        if changes.get("num_clients") and task == "digit-domains":
            continue
        compare(varied, seeds=SEEDS[:1], out=out)
        clients = pd.concat([run.clients for run in read_runs(out)], ignore_index=True)
        clients = clients[clients.run.isin(list(varied))]
        first_new = next(iter(varied.values())).num_clients - changes.get("validation_clients", 0)
        for kind, own in (
            ("trained", clients[clients.partition < first_new]),
            ("new", clients[clients.partition >= first_new]),
        ):
            if len(own):
                for row in client_summary(own).round(4).to_dict("records"):
                    rows.append({"variant": variant, "clients-are": kind, **row})
        print(pd.DataFrame(rows).to_string(), flush=True)
    write(f"personalised_{task}_variants", summary={"rows": rows})


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, task=TASKS, methods=tuple(METHODS), rounds=20, parallel=1,
        variants=False,
    )  # fmt: skip
    names, folder = options.methods, Path("runs/personalised")
    source = CHOSEN_AS.get(options.task, options.task)
    config, searched = (
        base(task, options.data_dir, options.rounds) for task in (options.task, source)
    )
    configs, settings = {}, {}
    for name in names:
        settings[name] = chosen(searched, name, folder / source, options.parallel)
        print(name, settings[name], flush=True)
        values = config.replace(**METHODS[name][0]).values()
        configs[name] = Config.parse({**values, **settings[name]})
    if options.variants:
        run_variants(configs, options.task, folder)
        return
    out = folder / options.task / "compare"
    compare(configs, seeds=SEEDS, out=out)
    clients = pd.concat([run.clients for run in read_runs(out)], ignore_index=True)
    clients = clients[clients.run.isin(names)]
    summary = client_summary(clients)
    gains = client_gains(clients, ["local training", "FedAvg"])
    print(summary.to_string(), gains.to_string(), sep="\n", flush=True)
    path = RESULTS / f"personalised_{options.task}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {key: [r for r in old.get(key, []) if r["run"] not in names] for key in TABLES}
    content = {
        "rounds": options.rounds,
        "rates": RATES,
        "chosen": {**old.get("chosen", {}), **settings},
        "summary": kept["summary"] + summary.round(4).to_dict("records"),
        "gains": kept["gains"] + gains.round(4).to_dict("records"),
    }
    write(path.stem, summary=content)


if __name__ == "__main__":
    main()
