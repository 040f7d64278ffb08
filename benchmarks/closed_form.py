"""AFL, Fed3R and FedNCM on frozen features of one network, beside TCT's sums of such features.

10 clients with one class of Fashion-MNIST each, 60,000 images, SimpleCNN, test accuracy on all
10,000 images after one exchange. The network is as it is drawn ("random"), or comes from 15 rounds
of FedAvg with two classes a client ("trained"), as in ``tct_statistics.py``. The three methods have
all images; TCT (by sums, with the inputs of the last layer or random Fourier
features of them, in 8 bits) has 58,000 and chooses its ridge on the other 2,000. Fed3R's ridge is
chosen in the same way from sums of the 58,000, by the squared error; then Fed3R has all images.
Nothing is chosen on the test set. Also with ten clients of all classes, which must make no
difference.

    python benchmarks/closed_form.py --data-dir FOLDER [--networks random,trained] [--seeds 0,1,2]
        [--fourier 0] [--out FOLDER]

FedAvg's runs in --out are continued.
"""

import argparse
import shutil
from typing import Any

import numpy as np
import torch
from common import keep_rows, parse_options, write
from tct_statistics import Settings, bootstrapped, percent, settled

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations, best_ridge
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config, run
from fedntk.simulations.engine.building import load_setup

SPLITS: dict[str, Settings] = {"one class a client": {}, "IID": {"partition": "iid"}}
METHODS: dict[str, Settings] = {
    "AFL": {"method": "afl", "validation_examples": 0},
    "Fed3R": {"method": "fed3r", "validation_examples": 0},
    "FedNCM": {"method": "fed-ncm", "validation_examples": 0},
    "AFL, fourier": {"method": "afl", "validation_examples": 0, "random_features": 4000},
    "TCT, last-layer": {"tct.features": "last-layer"},
    "TCT, fourier": {"tct.features": "fourier", "tct.num_features": 4000},
}
CASE = ["network", "method", "split"]
KEYS = [*CASE, "seed"]


def chosen_ridge(config: Config) -> float:
    """Return the ridge of Fed3R with the least squared error on the validation examples."""
    setup = load_setup(config)
    extract = FeatureMap("last-layer").extractor(setup.network)

    def equations(indices: np.ndarray) -> NormalEquations:
        x, y = setup.data.train(indices)
        sums = FeatureStatistics.of(map(extract, x.split(2048)), y, setup.data.num_classes)
        identity = Normaliser.identity(sums.width)
        return NormalEquations.of(sums, identity, bias=True, centred=False)

    training = np.concatenate(setup.split.clients)
    return best_ridge(equations(training), equations(setup.split.validation))


def exchanged(
    options: argparse.Namespace, network: str, seed: int, method: str, split: str
) -> dict[str, Any]:
    more: Settings = {"rounds": 1, "tct.bootstrap_rounds": 0, **SPLITS[split]}
    row: dict[str, Any] = {"network": network, "method": method, "split": split, "seed": seed}
    row |= {"network's own accuracy": None, "ridge": None}
    if network == "trained":
        trained = bootstrapped(options, "#C=2", seed)
        more["weights"] = str(trained.folder / "model.safetensors")
        row["network's own accuracy"] = percent(trained.curve().iloc[-1])
    name = f"{network} {method} {split}"
    if method == "Fed3R":
        row["ridge"] = chosen_ridge(settled(options, "#C=1", seed, name, **more))
        more["fed3r.ridge"] = row["ridge"]
    config = settled(options, "#C=1", seed, name, **more, **METHODS[method])
    done = run(config, progress=False)
    if method.startswith("TCT"):
        row["ridge"] = float(done.curve("ridge").loc[1])
    shutil.rmtree(config.folder)
    return row | {
        "accuracy": percent(done.curve().loc[1]),
        "MB up, a client": round(
            float(done.curve("bytes-up").loc[1]) / config.num_clients / 1e6, 3
        ),
    }


def keep(rows: list[dict[str, Any]]) -> None:
    table = keep_rows("closed_form", rows, KEYS)
    cases = [
        {
            **dict(zip(CASE, case, strict=True)),
            "seeds": sorted(part.seed.tolist()),
            "accuracy in %": round(float(part.accuracy.mean()), 2),
            "by seed": part.accuracy.tolist(),
            "network's own accuracy in %": part["network's own accuracy"].dropna().tolist(),
            "MB up, a client": round(float(part["MB up, a client"].mean()), 3),
        }
        for case, part in table.groupby(CASE, sort=False)
    ]
    summary = {
        "size": "60,000 training images on 10 clients (TCT: 58,000, and 2,000 on the server) and "
        "10,000 test images; SimpleCNN, 128 features before the last layer",
        "cases": cases,
    }
    write("closed_form", summary=summary)


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, networks=("random", "trained"), seeds=(0, 1, 2), fourier=(0,),
        rounds=15, rate=0.03, out="runs/closed-form",
    )  # fmt: skip
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for network in options.networks:
        for seed in options.seeds:
            for method in METHODS:
                if method.endswith("fourier") and seed not in options.fourier:
                    continue
                both = seed == 0 and method in ("AFL", "Fed3R", "FedNCM")
                for split in [*SPLITS][: 2 if both else 1]:
                    rows.append(exchanged(options, network, seed, method, split))
                    print(rows[-1], flush=True)
                    keep(rows)


if __name__ == "__main__":
    main()
