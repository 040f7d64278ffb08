"""Features that nobody trains: two ways to expand them, and a trained CNN beside them.

    python benchmarks/features.py --data-dir FOLDER [--parts expand,cifar10]

- expand: ridge regression on scattering of 10,000 training images of Fashion-MNIST, as it is, with
  random Fourier features and with bucket features. Accuracy is on 5,000 other training images,
  which also choose the ridge by the squared error. Buckets are compared in several sizes.
- cifar10: the CIFAR-10 JPEG subset, 10,000 training images. Ridge regression on scattering with
  p = 4,000 cosines, and SimpleCNN trained on the same images in one place (SGD, momentum 0.9,
  batches of 32). 2,000 training images choose ridge and bandwidth, or rate and epochs, by accuracy;
  then all 10,000 are fitted. Only the last accuracy is on the test images. Three seeds.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import keep_rows, parse_options
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.layers import BucketFeatures, FourierFeatures
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.methods.method import Setup

KEYS = ["part", "dataset", "case", "features", "seed"]
RIDGES = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BANDWIDTHS = (0.4, 0.8, 1.6)
RATES = (0.003, 0.01, 0.03)
EPOCHS = 12
SEEDS = (0, 1, 2)
SIZES = [(2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2)]  # buckets, inputs of a group


def loaded(options: argparse.Namespace, dataset: str, model: str, seed: int = 0) -> Setup:
    """Return data and network; scattering has images as they are, the CNN standardised ones."""
    return load_setup(
        Config(
            method="afl", dataset=dataset, data_dir=options.data_dir, model=model, seed=seed,
            standardise=model != "scattering", num_clients=1, partition="iid",
        )
    )  # fmt: skip


def sums_of(module: nn.Module, z: Tensor, y: Tensor) -> FeatureStatistics:
    return FeatureStatistics.of(map(module, z.split(1000)), y, 10)


def normal(sums: FeatureStatistics) -> NormalEquations:
    return NormalEquations.of(sums, Normaliser.identity(sums.width), bias=True)


def accuracy(module: nn.Module, linear: Tensor, z: Tensor, y: Tensor) -> float:
    linear = linear.float()
    scores = [module(part) @ linear[:-1] + linear[-1] for part in z.split(1000)]
    return float((torch.cat(scores).argmax(1) == y).float().mean())


def expand(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    setup = loaded(options, "fashion-mnist", "scattering")
    extract = FeatureMap("last-layer").extractor(setup.network)
    drawn = np.random.default_rng(0).permutation(len(setup.data.y_train))[:15_000]
    x, y = setup.data.train(drawn)
    z = torch.cat([extract(part) for part in x.split(500)])
    size, fit, held = z.shape[1], slice(10_000), slice(10_000, None)
    cases: list[tuple[str, int, nn.Module]] = [("as it is", 0, nn.Identity())]
    for seed in SEEDS:
        for p in (2000, 4000):
            cases += [
                ("fourier", seed, FourierFeatures(size, p, seed, 1.6)),
                ("buckets 2^2", seed, BucketFeatures(size, p, seed)),
            ]
    for buckets, group in SIZES:
        p = 2000 // buckets**group * buckets**group
        own = BucketFeatures(size, p, 0, buckets, group)
        cases.append((f"buckets {buckets}^{group}", 0, own))
    for case, seed, module in cases:
        sums = sums_of(module, z[fit], y[fit])
        validation = normal(sums_of(module, z[held], y[held]))
        linear = min(map(normal(sums).solve, RIDGES), key=validation.loss)
        row = {"dataset": "fashion-mnist", "case": case, "seed": seed, "features": sums.width}
        yield row | {"accuracy": accuracy(module, linear, z[held], y[held])}


def cifar10(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for seed in SEEDS:
        for case, learn in (("scattering, fourier", closed_form), ("SimpleCNN", trained)):
            row = {"dataset": "CIFAR-10, JPEG subset", "case": case, "seed": seed}
            yield row | learn(options, seed)


def closed_form(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    setup = loaded(options, options.cifar10, "scattering")
    extract = FeatureMap("last-layer").extractor(setup.network)
    (x, y), (x_test, y_test) = _shuffled(setup, seed), setup.data.test()
    z, z_test = (torch.cat([extract(p) for p in own.split(500)]) for own in (x, x_test))
    best: tuple[float, ...] = (0.0,)
    for bandwidth in BANDWIDTHS:
        module = FourierFeatures(z.shape[1], 4000, seed, bandwidth)
        sums, rest = sums_of(module, z[2000:], y[2000:]), sums_of(module, z[:2000], y[:2000])
        training = normal(sums)
        for ridge in RIDGES:
            reached = accuracy(module, training.solve(ridge), z[:2000], y[:2000])
            if reached > best[0]:
                best, kept, total = (reached, bandwidth, ridge), module, sums + rest
    linear = normal(total).solve(best[2])
    chosen = f"bandwidth {best[1]:g}, ridge {best[2]:g}"
    reached = accuracy(kept, linear, z_test, y_test)
    return {"features": 4000, "accuracy": reached, "validation": best[0], "chosen": chosen}


def trained(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    setup = loaded(options, options.cifar10, "simple-cnn", seed)
    x, y = _shuffled(setup, seed)
    curves = {
        rate: train(setup, x[2000:], y[2000:], rate, EPOCHS, seed, (x[:2000], y[:2000]))
        for rate in RATES
    }
    rate = max(curves, key=lambda own: max(curves[own]))
    epochs = 1 + int(np.argmax(curves[rate]))
    reached = train(setup, x, y, rate, epochs, seed, setup.data.test())[-1]
    chosen = f"rate {rate:g}, {epochs} epochs"
    return {"accuracy": reached, "validation": max(curves[rate]), "chosen": chosen}


def train(
    setup: Setup,
    x: Tensor,
    y: Tensor,
    rate: float,
    epochs: int,
    seed: int,
    others: tuple[Tensor, Tensor],
) -> list[float]:
    """Train a CNN; return the accuracy on other examples after each epoch."""
    network = copy.deepcopy(setup.network)
    optimiser = torch.optim.SGD(network.parameters(), rate, momentum=0.9)
    generator, curve = torch.Generator().manual_seed(seed), []
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(32):
            optimiser.zero_grad()
            cross_entropy(network(x[batch]), y[batch]).backward()
            optimiser.step()
        with torch.no_grad():
            scores = torch.cat([network(part) for part in others[0].split(500)])
        curve.append(float((scores.argmax(1) == others[1]).float().mean()))
    return curve


def _shuffled(setup: Setup, seed: int) -> tuple[Tensor, Tensor]:
    return setup.data.train(np.random.default_rng(seed).permutation(len(setup.data.y_train)))


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "expand": expand,
    "cifar10": cifar10,
}


def main() -> None:
    options = parse_options(__doc__, data_dir=True, parts=tuple(PARTS))
    options.cifar10 = f"hf:{options.data_dir}/CIFAR10-jpeg"
    torch.set_num_threads(1)
    for part in options.parts:
        for found in PARTS[part](options):
            row = {"part": part, "features": 0, "seed": 0, **found}
            row["dataset"] = row["dataset"].replace(options.cifar10, "CIFAR-10, JPEG subset")
            print(row, flush=True)
            keep_rows("features", [row], KEYS)


if __name__ == "__main__":
    main()
