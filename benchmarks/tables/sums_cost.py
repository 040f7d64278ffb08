"""What an example costs in sums of tangent features, and how exact sums in float32 would be."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fedntk.ntk import FeatureMap
from fedntk.ntk.convex.pooled_statistics import normaliser_of
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import build_model


def measure(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield milliseconds an example, and errors of products of 256 examples in float32."""
    options = dict(settings)
    examples, width = options.pop("examples"), options.pop("features")
    config = Config(options)
    data = load_data(config)
    network = build_model(config, data.input_shape, data.num_classes)
    x, y = data.train(np.random.default_rng(seed).permutation(len(data.y_train))[:examples])

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        return work(), 1e3 * (time.perf_counter() - start) / len(x)

    for kind in ("entk-sketch", "entk"):
        extract = FeatureMap(kind, width).extractor(network)
        z, each = timed(lambda extract=extract: torch.cat([*map(extract, x.split(2048))]))
        yield kind, None, each
    sums, each = timed(lambda: FeatureStatistics.of([z], y, data.num_classes))
    yield "float64", None, each
    fixed = FixedPoint.of(z, 8)
    _, each = timed(lambda: FeatureStatistics.of([z], y, data.num_classes, fixed_point=fixed))
    yield "bits-8", None, each
    exact, rounded = torch.from_numpy(sums.matrix()), torch.zeros(width, width).double()
    for part in z.split(256):
        rounded += part.T @ part
    sizes = exact.diagonal().sqrt().clamp(min=1e-30)
    yield "error", None, ((rounded - exact).abs() / (sizes[:, None] * sizes)).max()
    mean = torch.from_numpy(sums.class_sums.sum(0) / len(x))
    inv_std = torch.from_numpy(normaliser_of(sums).inv_std.astype(float))
    for name, matrix in (("least-32", rounded), ("least-64", exact)):
        centred = (matrix - len(x) * torch.outer(mean, mean)) * inv_std * inv_std[:, None]
        yield name, None, torch.linalg.eigvalsh(centred)[0] / centred.diagonal().mean()
