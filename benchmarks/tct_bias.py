"""Where the bias of TCT's linear model starts, and what `balanced` does, on validation examples.

Yu et al. 2022, algorithm 2, has a bias b that starts at 0; their eq. (1) has none. Here it may also
start at the classes' shares. Ten clients by Dirichlet(0.5), an mlp, ten rounds of FedAvg; then ten
of stage 2, or one exchange of sums, with 1,500 features. All is measured on training examples that
stay on the server; the test set is not used.

    python benchmarks/tct_bias.py --data-dir FOLDER
"""

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import parse_options, write
from sklearn.datasets import load_digits, make_classification

from fedntk.ntk.convex.pooled_statistics import class_weights
from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data
from fedntk.strategies.tct import tct as strategy

SUMS = {"sums": {"bits": 32, "auto_ridge": False, "validation_share": 0.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "rounds, no bias": {"bias": False},
    "rounds, bias from 0": {},
    "rounds, bias from the shares": {},
    "sums, no bias": {**SUMS, "bias": False},
    "sums, bias": SUMS,
    "sums, no bias, balanced": {**SUMS, "bias": False, "balanced": True},
    "sums, balanced, ridge as without weights": {**SUMS, "balanced": True},
    "sums, balanced": {**SUMS, "balanced": True},
    "sums, balanced, auto-ridge": {
        "sums": {"bits": 32, "validation_share": 0.1}, "balanced": True,
    },
}  # fmt: skip


def data_sets(folder: Path, data_dir: str) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    digits = load_digits()
    tables = {"digits": (digits.data, digits.target), "digit 8 or not": (digits.data,)}
    tables["digit 8 or not"] += (digits.target == 8,)
    for name, share, apart in (("table 50:50", 0.5, 0.5), ("table 94:6", 0.94, 0.5)):
        tables[name] = make_classification(
            2500, 20, n_informative=8, n_redundant=4, weights=[share], class_sep=apart,
            flip_y=0.01, random_state=3,
        )  # fmt: skip
    for name, (x, y) in tables.items():
        path = folder / f"{name.replace(' ', '-').replace(':', '-')}.npz"
        np.savez(path, x_train=x.astype(np.float32), y_train=y.astype(np.int64))
        settings[name] = {"dataset": f"npz:{path}", "validation_examples": len(x) // 5}
    settings["Fashion-MNIST"] = {
        "dataset": "fashion-mnist", "data_dir": data_dir, "train_examples": 1500,
        "validation_examples": 1000,
    }  # fmt: skip
    return settings


def measure(name: str, settings: dict[str, Any], variant: str, seed: int) -> dict[str, Any]:
    options = VARIANTS[variant]
    tct = {"num_features": 1500, **options}
    rounds = 11 + tct.get("balanced", False) if "sums" in tct else 21
    config = Config(
        **settings, tct=tct, method="tct", seed=seed, num_clients=10, alpha=0.5,
        rounds=rounds, evaluate_every=100, clients_per_evaluation=0, evaluate_on="validation",
        metrics="balanced-accuracy",
    )  # fmt: skip
    labels = load_data(config).y_train
    if "as without" in variant:  # the ridge that the weights do not multiply
        counts = np.bincount(labels)
        weights = class_weights(counts)
        ridge = 1e-2 / float((counts * weights**2).sum() / (counts * weights).sum())
        tct["sums"] = {**tct["sums"], "ridge": ridge}
        config = config.replace(tct=tct)
    zero = mock.patch.object(strategy, "best_bias", lambda counts, _: np.zeros(len(counts)))
    with tempfile.TemporaryDirectory() as out:
        if variant == "rounds, bias from 0":
            with zero:
                result = run(config, out=out + "/run", progress=False)
        else:
            result = run(config, out=out + "/run", progress=False)
        last = result.rounds.groupby("metric")["value"].last()
    return {
        "data": name,
        "largest class in %": round(100 * float(np.bincount(labels).max() / len(labels)), 1),
        "variant": variant,
        "seed": seed,
        "accuracy in %": round(100 * float(last["accuracy"]), 1),
        "balanced accuracy in %": round(100 * float(last["balanced-accuracy"]), 1),
    }


def main() -> None:
    options = parse_options(__doc__, data_dir="", seeds=(0, 1))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in data_sets(Path(folder), options.data_dir).items():
            for variant in VARIANTS:
                if "balanced" in variant and name in ("digits", "Fashion-MNIST", "table 50:50"):
                    continue
                for seed in options.seeds:
                    rows.append(measure(name, settings, variant, seed))
                    print(rows[-1], flush=True)
    write("tct_bias", rows)


if __name__ == "__main__":
    main()
