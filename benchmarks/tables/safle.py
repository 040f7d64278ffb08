"""Ridge regression on frozen features, on random cosines of them, and on SAFLe's codes of them."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from fedntk.ntk import Moments, Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.layers import FourierFeatures, OverlapCodes
from fedntk.ntk.features.scattering import LogStandardise, Scattering
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup

RIDGES = (1e-3, 0.01, 0.1, 0.3, 1.0, 3.0)
GROUP = 5  # V = 32


def accuracy(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield the test accuracy in % of what has the highest on validation images."""
    images = settings["examples"], settings["validation"], settings["positions"]
    training, validation, test = _examples(settings["data-dir"], settings["dataset"], *images)
    size = training[0].shape[1]
    most = _codes(size, GROUP, settings["features"], seed).num_features
    if settings["expand"] == "cosines":
        widths = settings["bandwidths"]
        layers: list[nn.Module] = [FourierFeatures(size, most, seed, width) for width in widths]
    elif settings["expand"] == "codes":
        codes = [_codes(size, group, most, seed) for group in settings["groups"]]
        for layer in codes:
            _move_limits(layer, training[0], settings["limits"])
        layers = [*codes]
    else:
        layers = [nn.Identity()]
    chosen = max((_best(layer, training, validation, test) for layer in layers), key=lambda b: b[0])
    yield "accuracy", None, 100 * chosen[1]


@functools.lru_cache(3)
def _examples(
    folder: str, dataset: str, examples: int, validation: int, positions: int
) -> list[tuple[Tensor, Tensor]]:
    """Return features (n, d) and labels of images for training, validation and test."""
    place = {"data-dir": folder or "data", "dataset": dataset.replace("{data}", folder or "data")}
    data = load_setup(Config(place, method="afl", model="scattering", standardise=False)).data
    drawn = torch.randperm(len(data.y_train), generator=torch.Generator().manual_seed(0)).numpy()
    sets = [drawn[:examples], drawn[examples : examples + validation]]
    pairs = [*map(data.train, sets), data.test(slice(2000))]
    scatter, standardise = Scattering(pairs[0][0].shape[2:]), LogStandardise()

    def features(x: Tensor) -> Tensor:
        planes = scatter(x).flatten(1, 2)
        return standardise(adaptive_avg_pool2d(planes, positions))

    return [(torch.cat([*map(features, x.split(500))]), y) for x, y in pairs]


def _codes(size: int, group: int, most: int, seed: int) -> OverlapCodes:
    """Return codes with as many limits as `most` features allow, and one at least."""
    limits = 1
    while (size * (limits + 1) // group + 1) << group <= most + (1 << group):
        limits += 1
    return OverlapCodes(size, limits, group, seed)


def _move_limits(codes: OverlapCodes, z: Tensor, limits: str) -> None:
    if limits == "fitted":
        moments = Moments.of(z)
        mean, squares = torch.from_numpy(moments.mean), torch.from_numpy(moments.sum_sq_dev)
        codes.limits.copy_(codes.limits_at(mean, (squares / moments.count).sqrt()))
    elif limits == "quantiles":
        count = codes.limits.shape[1]
        codes.limits.copy_(z.quantile(torch.arange(1.0, count + 1) / (count + 1), dim=0).T)


def _best(layer: nn.Module, *sets: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the accuracies on validation and test images of the ridge that has the first."""
    (z, y), *others = ((layer(x), labels) for x, labels in sets)
    sums = FeatureStatistics.of(z.split(1000), y, 10)
    equations = NormalEquations.of(sums, Normaliser.identity(sums.width), bias=True)
    accuracies = []
    for ridge in RIDGES:
        linear = equations.solve(ridge).float()
        scores = [(part @ linear[:-1] + linear[-1], labels) for part, labels in others]
        hits = [(s.argmax(1) == labels).double().mean() for s, labels in scores]
        accuracies.append((float(hits[0]), float(hits[1])))
    return max(accuracies, key=lambda pair: pair[0])
