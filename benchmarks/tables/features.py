"""Ridge regression on scattering coefficients, as they are or expanded by random features."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.layers import BucketFeatures, FourierFeatures
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup

RIDGES = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def accuracy(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield the accuracy in % on other training images, whose squared error chooses the ridge."""
    place = {"data-dir": settings["data-dir"] or "data", "dataset": settings["dataset"]}
    setup = load_setup(Config(place, method="afl", model="scattering", standardise=False))
    extract = FeatureMap("last-layer").extractor(setup.network)
    drawn = np.random.default_rng(0).permutation(len(setup.data.y_train))
    x, labels = setup.data.train(drawn[: settings["examples"] + settings["validation"]])
    inputs = torch.cat([extract(part) for part in x.split(500)])
    expand: nn.Module = nn.Identity()
    if settings["expand"] == "fourier":
        expand = FourierFeatures(inputs.shape[1], settings["features"], seed, 1.6)
    elif settings["expand"] == "buckets":
        size = settings["buckets"], settings["group"]
        number = settings["features"] // size[0] ** size[1] * size[0] ** size[1]
        expand = BucketFeatures(inputs.shape[1], number, seed, *size)

    def equations(z: Tensor, y: Tensor) -> NormalEquations:
        sums = FeatureStatistics.of(map(expand, z.split(1000)), y, setup.data.num_classes)
        return NormalEquations.of(sums, Normaliser.identity(sums.width), bias=True)

    (z, others), (y, y_others) = (t.tensor_split([settings["examples"]]) for t in (inputs, labels))
    candidates = map(equations(z, y).solve, RIDGES)
    linear = min(candidates, key=equations(others, y_others).loss).float()
    scores = torch.cat([expand(part) @ linear[:-1] + linear[-1] for part in others.split(1000)])
    yield "accuracy", None, 100 * float((scores.argmax(1) == y_others).double().mean())
