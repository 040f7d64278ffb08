"""TCT in the small federation, and its convex problem in float64."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp import ClientApp
from torch import Tensor

from fedntk.clients import BootstrapSGD, TCTClient
from fedntk.ntk import FeatureMap, one_hot
from fedntk.ntk.convex.pooled_statistics import RIDGES
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.strategies import TCT, FeatureSums

from .federation import app, examples, network

LINEAR = "tct.linear"
OPTIONS: dict[str, Any] = {
    "fraction_train": 1.0, "fraction_evaluate": 0.0, "num_features": 12, "learning_rate": 0.02,
    "local_steps": 20,
}  # fmt: skip


def make(clients: int = 6, **options: Any) -> TCT:
    return TCT(network=network(), **OPTIONS | {"min_available_nodes": clients} | options)


def sums(clients: int = 6, **options: Any) -> TCT:
    """Solve from float64 sums; options of the sums may stand beside the strategy's."""
    of_sums = {"bits": UNQUANTISED, "validation_share": 0.0, "auto_ridge": False}
    of_sums |= {name: options.pop(name) for name in FeatureSums.options().keys() & options.keys()}
    return make(clients, sums=FeatureSums(**of_sums), **options)


def served(cache: Path, kind: type[TCTClient] = TCTClient, **options: Any) -> ClientApp:
    sgd = BootstrapSGD(epochs=1, learning_rate=0.1, batch_size=4)
    return app(kind, cache=cache, sgd=sgd, **options)


def pooled(partitions: Iterable[int] = range(6)) -> tuple[Tensor, Tensor]:
    x, y = (torch.cat(parts) for parts in zip(*map(examples, partitions), strict=True))
    return x, y


def held() -> tuple[Tensor, Tensor]:
    """Examples that no client has."""
    return pooled(range(10, 14))


FIXED: dict[str, Any] = {"bits": 8, "validation": held()}


def rows(x: Tensor) -> Tensor:
    """Features of the first weights."""
    return FeatureMap(num_features=12).extractor(network())(x).double()


def targets(y: Tensor) -> Tensor:
    return one_hot(y, 3).double() - 1 / 3


def normalised(z: Tensor, by: Tensor, weights: Tensor | None = None) -> Tensor:
    w = torch.ones(len(by)).double() if weights is None else weights
    mean = w @ by / w.sum()
    std = (w @ (by - mean) ** 2 / w.sum()).sqrt()
    std[std < 1e-6] = torch.inf
    return (z - mean) / std


def with_ones(z: Tensor) -> Tensor:
    return torch.cat([z, torch.ones(len(z), 1).double()], 1)


def features(partitions: int = 6, *, normalise: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Z_k, the bias's 1 last, and centred Y_k of each client, normalised over all at once."""
    by, found = rows(pooled(range(partitions))[0]), []
    for x, y in map(examples, range(partitions)):
        z = normalised(rows(x), by) if normalise else rows(x)
        found.append((with_ones(z), targets(y)))
    return found


def first(partitions: int = 6, *, normalise: bool = True) -> Tensor:
    """The model that stage 2 begins with: the bias is the classes' shares minus 1/C."""
    theta = torch.zeros(13, 3).double()
    theta[12] = targets(pooled(range(partitions))[1]).mean(0) * normalise
    return theta


def solved(
    ridge: float = 1e-2,
    *,
    bias: bool = True,
    normalise: bool = True,
    weights: Tensor | None = None,
    data: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Weighted ridge regression on all clients' rows; the ridge is over the mean of |z_i|^2.

    It leaves the bias out, and grows with the weights' own mean by weight.
    """
    x, y = data or pooled()
    w = torch.ones(len(y)).double() if weights is None else weights
    z = normalised(rows(x), rows(x), w) if normalise else rows(x)
    rho = ridge * (w @ z.square().sum(1) / w.sum()) * (w @ w / w.sum())
    z = with_ones(z) if bias else z
    gram = z.T @ (w[:, None] * z)
    gram[:12, :12] += rho * torch.eye(12).double()
    return torch.linalg.solve(gram, z.T @ (w[:, None] * targets(y)))


def errors(
    fit: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], of_class: Tensor
) -> dict[float, float]:
    """Weighted squared errors on other examples of each ridge's solution, in float64."""
    weights, found = of_class[fit[1]], {}
    z = normalised(rows(others[0]), rows(fit[0]), weights)
    for ridge in RIDGES:
        misses = with_ones(z) @ solved(ridge, weights=weights, data=fit) - targets(others[1])
        found[ridge] = float((of_class[others[1], None] * misses.square()).sum())
    return found


def distance(found: Any, reference: Any) -> float:
    return float(np.linalg.norm(found - np.asarray(reference)) / np.linalg.norm(reference))
