"""TCT in one exchange of sums over whole data sets: accuracy, time, bytes and memory.

Yu et al. 2022, section 5, on all images, as in the paper: 10 clients, SimpleCNN. From a
network after some rounds of FedAvg with one local epoch, or from one that was never trained, one
exchange of sums over tangent features (`sums`). 2,000 training images are kept on
the server, on which the ridge and the steps of fixed-point numbers are chosen; nothing is chosen on
the test set, which is whole. "long-tailed": all Fashion-MNIST images of class 0, 100 times fewer of
class 9; with equal weights for all images, or for all classes.

    python benchmarks/tct_statistics.py --data-dir FOLDER [--data "#C=1;random"] [--features entk]
        [--widths 2000,4000] [--bits 8] [--seeds 0] [--rounds 15] [--out FOLDER]

Runs in FOLDER are continued. With ``--sums`` it measures instead what an image costs, and how exact
sums of float32 products would be.
"""

import argparse
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import keep_rows, parse_options, write

from fedntk.ntk import FeatureMap
from fedntk.ntk.convex.pooled_statistics import normaliser_of
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model
from fedntk.simulations.report.results import Run
from fedntk.trust import MaskedSum, Masker, Roster, new_key, public_bytes

CONFIGURATION = Path(__file__).parent.parent / "simulations" / "conf" / "tct_fmnist_statistics.toml"
Settings = dict[str, Any]

PARTITIONS: dict[str, Settings] = {
    "#C=1": {"partition": "pathological", "classes_per_client": 1},
    "#C=2": {"partition": "pathological", "classes_per_client": 2},
    "Dirichlet(0.1)": {"partition": "dirichlet", "alpha": 0.1},
    "Dirichlet(0.5)": {"partition": "dirichlet", "alpha": 0.5},
}
LONG_TAILED = "npz:{out}/long-tailed.npz"
# the sums are the same for every split of the examples, so that one split does without training
UNTRAINED: dict[str, Settings] = {
    "random": PARTITIONS["#C=1"],
    "MNIST, random": {**PARTITIONS["#C=1"], "dataset": "mnist"},
    "CIFAR-10 subset, random": {**PARTITIONS["#C=1"], "dataset": "hf:{data_dir}/CIFAR10-jpeg"},
    "long-tailed, random": {**PARTITIONS["#C=1"], "dataset": LONG_TAILED},
    "long-tailed, random, balanced": {
        **PARTITIONS["#C=1"],
        "dataset": LONG_TAILED,
        "tct.balanced": True,
    },
}
IMBALANCE = 100  # of the long-tailed set: the most common class's images over the rarest's
PAPER = {"#C=1": 86.32, "#C=2": 90.33, "Dirichlet(0.1)": 90.78, "Dirichlet(0.5)": 91.13}  # Table 2
CASE = ["data", "rounds of FedAvg", "features", "p", "bits"]
KEYS = [*CASE, "seed"]


def settled(options: argparse.Namespace, data: str, seed: int, name: str, **more: Any) -> Config:
    own = {**PARTITIONS, **UNTRAINED}[data]
    if own.get("dataset") == LONG_TAILED:
        long_tailed(options)
    places = {"data_dir": options.data_dir, "out": Path(options.out).absolute()}
    own = {k: v.format(**places) if k == "dataset" else v for k, v in own.items()}
    folder = "".join(letter if letter.isalnum() else "-" for letter in f"{data} {seed} {name}")
    return Config.load(
        CONFIGURATION,
        **{
            **own, "data_dir": options.data_dir, "seed": seed, "server_threads": 1,
            "out": str(Path(options.out).absolute() / folder), **more,
        },
    )  # fmt: skip


def long_tailed(options: argparse.Namespace) -> None:
    """Write Fashion-MNIST with ever fewer training images of a class, by one factor from class 0.

    As the long-tailed sets of Cui et al., *Class-Balanced Loss Based on Effective Number of
    Samples*, CVPR 2019. All test images stay.
    """
    path = Path(options.out) / "long-tailed.npz"
    if not path.exists():
        data = load_data(Config(dataset="fashion-mnist", data_dir=options.data_dir))
        counts = np.bincount(data.y_train)
        shares = IMBALANCE ** (-np.arange(len(counts)) / (len(counts) - 1))
        kept = [
            np.flatnonzero(data.y_train == c)[: round(count * share)]
            for c, (count, share) in enumerate(zip(counts, shares, strict=True))
        ]
        chosen = np.sort(np.concatenate(kept))
        path.parent.mkdir(parents=True, exist_ok=True)
        train = {"x_train": data.x_train[chosen], "y_train": data.y_train[chosen]}
        np.savez(path, **train, x_test=data.x_test, y_test=data.y_test)


def bootstrapped(options: argparse.Namespace, data: str, seed: int) -> Run:
    settings = {"method": "fedavg", "rounds": options.rounds, "learning_rate": options.rate}
    name = f"fedavg {options.rounds} {options.rate}"
    return run(settled(options, data, seed, name, **settings), progress=False)


def exchanged(
    options: argparse.Namespace, data: str, seed: int, kind: str, width: int
) -> dict[str, Any]:
    balanced = data.endswith("balanced")  # counts come first, and fixed-point numbers do not go
    bits, rounds = (32, 2) if balanced else (options.bits, 1)
    settings: Settings = {"rounds": rounds, "tct.bootstrap_rounds": 0, "tct.sums.bits": bits}
    settings |= {"tct.features": kind, "tct.num_features": width}
    row: dict[str, Any] = {
        "data": data, "features": kind, "p": width, "bits": bits, "seed": seed,
        "rounds of FedAvg": options.rounds if data in PARTITIONS else 0, "network": None,
    }  # fmt: skip
    if data in PARTITIONS:
        trained = bootstrapped(options, data, seed)
        settings["weights"] = str(trained.folder / "model.safetensors")
        row["network"] = percent(trained.curve().iloc[-1])
    name = f"{kind} {width} {options.bits} {options.rounds}"
    config = settled(options, data, seed, name, **settings)
    done = run(config, progress=False)
    value = {name: float(done.curve(name).loc[rounds]) for name in (
        "accuracy", "ridge", "seconds-clients", "seconds-server", "bytes-up", "peak-memory",
    )}  # fmt: skip
    shutil.rmtree(config.folder)
    return row | {
        "accuracy": percent(value["accuracy"]),
        "ridge": value["ridge"],
        "seconds of all clients": round(value["seconds-clients"], 1),
        "seconds of the server": round(value["seconds-server"], 1),
        "MB up, a client": round(value["bytes-up"] / config.num_clients / 1e6, 1),
        "peak memory, MB": round(value["peak-memory"]),
    }


def sums(options: argparse.Namespace, *, images: int = 8192, width: int = 4000) -> None:
    config = Config(dataset="fashion-mnist", model="simple-cnn", data_dir=options.data_dir)
    data = load_data(config)
    network = build_model(config, data.input_shape, data.num_classes)
    x, y = data.train(np.random.default_rng(0).permutation(len(data.y_train))[:images])
    found: dict[str, Any] = {"images": images, "p": width}
    for kind in ("entk-sketch", "entk"):
        extract = FeatureMap(kind, width).extractor(network)
        start = time.perf_counter()
        z = torch.cat([extract(part) for part in x.split(2048)])
        found[f"ms an image, {kind}"] = _each(start, images)
    start = time.perf_counter()
    exact = FeatureStatistics.of([z], y, data.num_classes)
    found["ms an image, float64 sums"] = _each(start, images)
    fixed, start = FixedPoint.of(z, 8), time.perf_counter()
    FeatureStatistics.of([z], y, data.num_classes, fixed_point=fixed)
    found["ms an image, sums of 8 bits"] = _each(start, images)
    gram, rounded = torch.from_numpy(exact.matrix()), torch.zeros(width, width).double()
    for part in z.split(256):
        rounded += part.T @ part
    sizes = gram.diagonal().sqrt().clamp(min=1e-30)
    error = (rounded - gram).abs() / (sizes[:, None] * sizes)
    found["float32 products of 256 rows, largest error over |z_i| |z_j|"] = float(error.max())
    mean = torch.from_numpy(exact.class_sums.sum(0) / images)
    inv_std = torch.from_numpy(normaliser_of(exact).inv_std.astype(float))
    words = FeatureStatistics.of([z], y, data.num_classes, fixed_point=fixed).to_words(np.uint32)
    found |= masked(words)
    for name, matrix in (("float32", rounded), ("float64", gram)):
        centred = (matrix - images * torch.outer(mean, mean)) * inv_std * inv_std[:, None]
        values = torch.linalg.eigvalsh(centred)
        least = float(values[0] / centred.diagonal().mean())
        found[f"{name}: least eigenvalue of normalised features over the mean diagonal"] = least
    write("tct_statistics_sums", summary=found)


def masked(words: np.ndarray, *, clients: int = 10) -> dict[str, Any]:
    keys = [new_key() for _ in range(clients)]
    threshold, public = math.ceil(2 * clients / 3), tuple(map(public_bytes, keys))
    roster = Roster(bytes(16), tuple(range(clients)), public, threshold)
    maskers = [Masker(roster, k, key) for k, key in enumerate(keys)]
    parcels = [masker.parcels() for masker in maskers]
    for k, masker in enumerate(maskers):
        masker.receive({j: parcels[j][k] for j in range(clients) if j != k})
    start = time.perf_counter()
    total = maskers[0].mask(words)
    found = {f"s of a client for masks, {clients} clients": round(time.perf_counter() - start, 3)}
    for masker in maskers[1:-1]:
        total += masker.mask(words)
    arrived = range(clients - 1)
    tags = {k: maskers[k].confirm(arrived) for k in arrived}
    shares = {k: maskers[k].reveal({j: tags[j][k] for j in arrived if j != k}) for k in arrived}
    start = time.perf_counter()
    server = MaskedSum(roster, {k: masker.promise for k, masker in enumerate(maskers)})
    opened = server.unmask(total, arrived, shares)
    found["s of the server to open the sum of 9, 1 dropped out"] = round(
        time.perf_counter() - start, 3
    )
    if not np.array_equal(opened, words * np.uint32(clients - 1)):
        raise RuntimeError("the opened sum is not the sum")
    return found


def _each(start: float, images: int) -> float:
    return round(1e3 * (time.perf_counter() - start) / images, 3)


def percent(share: float) -> float:
    return round(100 * float(share), 2)


def keep(rows: list[dict[str, Any]]) -> None:
    """Join the rows with those of other cases; write all, and the means over seeds."""
    table = keep_rows("tct_statistics", rows, KEYS)
    means = [
        {
            **dict(zip(CASE, case, strict=True)),
            "seeds": sorted(part.seed.tolist()),
            "accuracy in %": round(float(part.accuracy.mean()), 2),
            "network's own accuracy in %": _mean(part, "network"),
            "seconds of all clients": _mean(part, "seconds of all clients"),
            "seconds of the server": _mean(part, "seconds of the server"),
            "MB up, a client": _mean(part, "MB up, a client"),
        }
        for case, part in table.groupby(CASE, sort=False)
    ]
    summary = {
        "size": "58,000 training images on 10 clients (CIFAR-10 subset: 8,000 JPEG images), 2,000 "
        "on the server; SimpleCNN; one thread; seconds while other programs ran, too",
        "paper's TCT in % after 200 rounds (Yu et al. 2022, Table 2)": PAPER,
        "cases": means,
    }
    write("tct_statistics", summary=summary)


def _mean(table: pd.DataFrame, column: str) -> float | None:
    values = table[column].dropna()
    return round(float(values.mean()), 2) if len(values) else None


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, data=(*PARTITIONS, *UNTRAINED), features=("entk", "entk-sketch"),
        widths=(2000, 4000, 8000), bits=8, seeds=(0,), rounds=15, rate=0.03,
        out="runs/tct-statistics", sums=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    if options.sums:
        sums(options)
        return
    rows: list[dict[str, Any]] = []
    for data in options.data:
        for seed in options.seeds:
            for width in options.widths:
                for kind in options.features:
                    rows.append(exchanged(options, data, seed, kind, width))
                    print(rows[-1], flush=True)
                    keep(rows)


if __name__ == "__main__":
    main()
