"""Bias and variance of Fed-ensemble on the toy of Shi et al. 2021, section 5."""

from collections.abc import Callable, Iterator
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedntk.clients import client_app
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.simulations.engine._flower import log_from
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import FedEnsemble, Sampling, Screening, SeededFedAvg

Floats = NDArray[np.float64]
Values = Iterator[tuple[str, int | None, float]]
CLIENTS, FEATURES, WIDTH = 50, 100, 0.08
GRID = np.linspace(-1, 1, 401)
EVERY = 2  # points of the grid that a picture shows


class Data:
    """The fixed data: 50 clients with two points each, and the centres of the features."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.centres = generator.uniform(-1, 1, FEATURES)
        self.x = generator.uniform(-1, 1, (CLIENTS, 2))
        amplitudes = generator.normal(1, 0.2, (CLIENTS, 1))
        noise = generator.normal(0, 0.2, self.x.shape)
        self.y = amplitudes * np.sin(2 * np.pi * self.x) + noise

    def features(self, x: Floats) -> Floats:
        """Return the features (..., 100) of points x."""
        return np.exp(-((x[..., None] - self.centres) ** 2) / (2 * WIDTH**2))


class ToyClient(NumPyClient):
    """Gradient descent on half the mean squared error of two points."""

    def __init__(self, features: Floats, y: Floats, steps: int, rate: float) -> None:
        self.features, self.y, self.steps, self.rate = features, y, steps, rate

    def fit(self, parameters: list[Floats], config: dict[str, Any]) -> Any:
        """Take the local steps."""
        del config
        w = parameters[0].copy()
        for _ in range(self.steps):
            w -= self.rate * self.features.T @ (self.features @ w - self.y) / len(self.y)
        return [w], len(self.y), {"train-loss": 0.0}


def trained_ensemble(
    client: Callable[[int], NumPyClient],
    first: list[dict[str, Floats]],
    clients: int,
    rounds: int,
    seed: int,
    **options: Any,
) -> list[dict[str, Floats]]:
    """Train models from their first weights by the strategy, with the client of each number."""
    strategy = FedEnsemble(
        inner=lambda: SeededFedAvg(fraction_evaluate=0.0), num_models=len(first),
        sampling=Sampling(seed=seed), min_available_nodes=clients, fraction_evaluate=0.0,
        screening=Screening(outlier_factor=np.inf), **options,
    )  # fmt: skip
    models = EnsembleArrays(tuple({n: Array(w) for n, w in weights.items()} for weights in first))
    app = client_app(lambda context: client(int(context.node_config["partition-id"])))
    with log_from(ERROR):
        grid = LocalGrid(app, clients, {})
        result = strategy.start(grid, ArrayRecord(models.to_arrays()), num_rounds=rounds)
    learned = EnsembleArrays.from_arrays(result.arrays).models
    return [{name: array.numpy() for name, array in model.items()} for model in learned]


def predictions_of(data: Data, settings: dict[str, Any], run: int) -> Floats:
    """Return the predictions (K, points) of the models that one run learns."""
    generator = np.random.default_rng([run, *b"first weights"])
    features, num_models = data.features(data.x), settings["models"]
    first = [{"w": generator.normal(size=FEATURES)} for _ in range(num_models)]
    learned = trained_ensemble(
        lambda k: ToyClient(features[k], data.y[k], settings["steps"], settings["rate"]),
        first, CLIENTS, settings.get("ages", 0) * num_models or settings["rounds"], run,
        num_strata=min(num_models, settings["sampled"]),
        fraction_train=settings["sampled"] / CLIENTS,
    )  # fmt: skip
    return np.stack([model["w"] for model in learned]) @ data.features(GRID).T


def bias_and_variance(settings: dict[str, Any], seed: int) -> Values:
    """Yield both over runs from other first weights, and what the first run predicts."""
    sine = np.sin(2 * np.pi * GRID)
    if settings["models"] == 0:
        yield from ((name, None, np.nan) for name in ("bias", "variance", "deviation"))
        yield from (("prediction", i, y) for i, y in enumerate(sine[::EVERY]))
        return
    data = Data(seed)
    runs = [predictions_of(data, settings, run) for run in range(settings["runs"])]
    means = np.stack([models.mean(0) for models in runs])
    yield "bias", None, np.mean((sine - means.mean(0)) ** 2)
    yield "variance", None, np.mean((means - means.mean(0)) ** 2)
    yield from (("prediction", i, y) for i, y in enumerate(means[0, ::EVERY]))
    yield from (("deviation", i, y) for i, y in enumerate(runs[0].std(0)[::EVERY]))
