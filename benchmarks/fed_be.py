"""FedBE with and without distillation beside FedAvg, with the same client updates.

    python benchmarks/fed_be.py --data-dir FOLDER [--out FOLDER]

Two data sets: scikit-learn's digits, split as in simulations/conf/fed_be_digits.toml, and 5,000
images of Fashion-MNIST; 20 clients have 4,000 of them, two classes each. The clients' learning rate
is the best of four for FedAvg, then the rate of the distillation the best of six, by the accuracy
on labelled examples that neither the clients nor the server have and that are no test examples. The
figures are from further runs, on the test set, with three seeds.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import parse_options, write

from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data

Settings = dict[str, Any]

COMMON: Settings = {
    "clients_per_round": 10, "clients_per_evaluation": 0, "rounds": 20, "model": "mlp",
    "batch_size": 32, "fed_be.batch_size": 32,
}  # fmt: skip
DATA: dict[str, Settings] = {
    "digits": {
        "choice": 237, "kept": 1200,
        "partition": "dirichlet", "alpha": 0.1, "num_clients": 30, "local_epochs": 20,
        "validation_examples": 300,
    },
    "fashion-mnist": {
        "choice": 1000, "kept": 5000,
        "partition": "pathological", "classes_per_client": 2, "num_clients": 20,
        "local_epochs": 10, "validation_examples": 1000,
    },
}  # fmt: skip
METHODS: dict[str, Settings] = {
    "FedAvg": {"method": "fedavg"},
    "FedBE, Gaussian": {"method": "fed-be"},
    "FedBE, Dirichlet": {"method": "fed-be", "fed_be.distribution": "dirichlet"},
    "FedBE, Gaussian, distilled": {"method": "fed-be", "fed_be.distill": True},
    "FedBE, Gaussian, distilled, no SWA": {
        "method": "fed-be", "fed_be.distill": True, "fed_be.swa": False,
    },
}  # fmt: skip
CLIENT_RATES, SERVER_RATES = (0.03, 0.1, 0.3, 1.0), (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
CHOICE_SEEDS, SEEDS = (0, 1), (0, 1, 2)
LAST = 5  # rounds whose accuracies are averaged


def files(name: str, folder: Path, data_dir: str) -> dict[str, str]:
    """Write the data set twice: tested on examples to choose by, and on the test set."""
    data = load_data(Config(dataset=name, data_dir=data_dir))
    order = np.random.default_rng(0).permutation(len(data.y_train))
    choice, kept = np.split(order, [DATA[name]["choice"]])
    kept = kept[: DATA[name]["kept"]]
    parts = {
        "choice": (data.x_train[choice], data.y_train[choice]),
        "test": (data.x_test, data.y_test),
    }
    found = {}
    for part, (x_test, y_test) in parts.items():
        path = folder / f"{name}-{part}.npz"
        np.savez(
            path, x_train=data.x_train[kept], y_train=data.y_train[kept],
            x_test=x_test, y_test=y_test,
        )  # fmt: skip
        found[part] = f"npz:{path}"
    return found


def main() -> None:
    chosen = parse_options(__doc__, data_dir=True, out="")
    rows: list[dict[str, Any]] = []
    rates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, settings in DATA.items():
            own = {k: v for k, v in settings.items() if k not in ("choice", "kept")}
            paths = files(name, folder, chosen.data_dir)

            def accuracy(
                part: str, method: str, seed: int, client_rate: float, server_rate: float,
                name: str = name, own: Settings = own, paths: dict[str, str] = paths,
            ) -> float:  # fmt: skip
                """Run one, add its row, and return the mean accuracy of its last rounds."""
                values = {
                    **COMMON, **own, **METHODS[method], "dataset": paths[part], "seed": seed,
                    "learning_rate": client_rate, "fed_be.learning_rate": server_rate,
                    "fed_be.final_learning_rate": 0.4 * server_rate,
                }  # fmt: skip
                out = folder / f"run-{len(rows)}"
                result = run(Config(**values), out=out, progress=False)
                curve = result.curve("accuracy")
                last = float(curve.iloc[-LAST:].mean())
                rows.append({
                    "data": name, "part": part, "method": method, "seed": seed,
                    "client-rate": client_rate, "server-rate": server_rate,
                    "last": float(curve.iloc[-1]), "mean of last 5": last,
                })  # fmt: skip
                print(rows[-1], flush=True)
                return last

            def best(
                method: str, over: tuple[float, ...], client: float | None = None,
                accuracy: Any = accuracy,
            ) -> float:  # fmt: skip
                """Return the rate that is the best on the examples to choose by."""
                means = [
                    np.mean([
                        accuracy("choice", method, seed, client or rate, rate)
                        for seed in CHOICE_SEEDS
                    ])
                    for rate in over
                ]  # fmt: skip
                return over[int(np.argmax(means))]

            client_rate = best("FedAvg", CLIENT_RATES)
            server_rate = best("FedBE, Gaussian, distilled", SERVER_RATES, client_rate)
            rates[name] = {"clients": client_rate, "distillation": server_rate}
            for method in METHODS:
                for seed in SEEDS:
                    accuracy("test", method, seed, client_rate, server_rate)
    tested = pd.DataFrame(rows)
    tested = tested[tested["part"] == "test"]
    summary = {
        "chosen learning rates": rates,
        "accuracy in %, mean of the last 5 rounds, by seed": {
            data: {
                method: [round(100 * a, 2) for a in own["mean of last 5"]]
                for method, own in group.groupby("method", sort=False)
            }
            for data, group in tested.groupby("data", sort=False)
        },
    }
    write("fed_be", rows, summary)


if __name__ == "__main__":
    main()
