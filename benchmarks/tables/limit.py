"""Models of Fed-ensemble and the Gaussian process of Shi et al. 2021, theorem 4.2.

A network with one hidden layer of l ReLU units, f(x) = a . relu(U z) / sqrt(l) with z = (x, 1) and
all weights of N(0, 1), learns six points by gradient descent on four clients, four models a run.
The theorem says what the models become as l grows, with Theta the tangent kernel at infinite width
and K0 the covariance of f at the first weights (both in closed form, Cho and Saul 2009):

    each model:     f0(x) + Theta(x, X) Theta^-1 (Y - f0(X))
    all of them:    mean Theta(x, X) Theta^-1 Y, and the covariance k of theorem 4.2
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import jacobian
from fedntk.simulations.config.importing import import_named
from fedntk.simulations.reproduction.declaration import TABLES

TOY = TABLES / "fed-ensemble" / "toy.py"
trained_ensemble = import_named("program", f"{TOY}:trained_ensemble")
Floats = NDArray[np.float64]
MODELS, LOCAL_STEPS, RATE = 4, 10, 0.5
POINTS_OF = ((0, 3), (1, 4), (2,), (5,))  # each client's

angles = 2 * np.pi * np.arange(6) / 6
X = np.stack([np.cos(angles), np.sin(angles), np.ones(6)], 1)
Y = np.array([1.0, -0.5, 0.3, -1.0, 0.8, 0.0])
between = 2 * np.pi * (np.arange(24) + 0.25) / 24
TEST = np.stack([0.9 * np.cos(between), 0.9 * np.sin(between), np.ones(24)], 1)


class Network(nn.Module):
    """The network, for points z of shape (n, 3): outputs (n, 1)."""

    def __init__(self, first: Floats, last: Floats) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.from_numpy(w)) for w in (first, last))

    def forward(self, z: Tensor) -> Tensor:
        """Return f(z)."""
        return (torch.relu(z @ self.first.T) @ self.last / len(self.last) ** 0.5)[:, None]


def outputs(first: Floats, last: Floats, z: Floats) -> Floats:
    """Return the network's outputs at points z (n, 3)."""
    return np.maximum(z @ first.T, 0) @ last / np.sqrt(len(last))


def descended(
    first: Floats, last: Floats, z: Floats, y: Floats, steps: int, rate: float
) -> tuple[Floats, Floats]:
    """Return the weights after steps of gradient descent on half the mean squared error."""
    first, last = first.copy(), last.copy()
    for _ in range(steps):
        hidden = z @ first.T
        error = rate / len(y) / np.sqrt(len(last)) * (outputs(first, last, z) - y)
        step = ((error[:, None] * (hidden > 0)) * last).T @ z
        last -= error @ np.maximum(hidden, 0)
        first -= step
    return first, last


class RegressionClient(NumPyClient):
    """Gradient descent on a client's points."""

    def __init__(self, number: int) -> None:
        points = list(POINTS_OF[number])
        self.z, self.y = X[points], Y[points]

    def fit(self, parameters: list[Floats], config: dict[str, Any]) -> Any:
        """Take the local steps."""
        learned = descended(*parameters, self.z, self.y, LOCAL_STEPS, RATE)
        return list(learned), len(self.y), {"train-loss": 0.0}


def limit_kernels(z: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Return K0 and Theta at infinite width, shape (n, m) each (arc-cosine kernels)."""
    norms = np.linalg.norm(z, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    cosine = np.clip(z @ other.T / norms, -1, 1)
    angle = np.arccos(cosine)
    covariance = norms / (2 * np.pi) * (np.sin(angle) + (np.pi - angle) * cosine)
    return covariance, covariance + z @ other.T * (np.pi - angle) / (2 * np.pi)


def gaussian_process() -> tuple[Floats, Floats]:
    """Return mean and standard deviation of theorem 4.2 at the test points."""
    inner, theta = limit_kernels(X, X)
    across, theta_across = limit_kernels(TEST, X)
    weights = theta_across @ np.linalg.inv(theta)
    covariance = (
        limit_kernels(TEST, TEST)[0]
        + weights @ inner @ weights.T
        - weights @ across.T
        - across @ weights.T
    )
    return weights @ Y, np.sqrt(np.diag(covariance))


def own_limit(first: Floats, last: Floats) -> tuple[Floats, float]:
    """Return a model's own limit at the test points, and how far its kernel is from Theta."""
    points, n = np.concatenate([X, TEST]), len(X)
    kernel = jacobian(Network(first, last), torch.from_numpy(points)).gram().numpy()
    limit = limit_kernels(points, X)[1]
    weights = kernel[n:, :n] @ np.linalg.inv(kernel[:n, :n])
    distance = np.linalg.norm(kernel[:, :n] - limit) / np.linalg.norm(limit)
    start = outputs(first, last, TEST) + weights @ (Y - outputs(first, last, X))
    return start, float(distance)


def distances(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, int | None, float]]:
    """Yield how far trained models, their kernels, mean and deviation are from their limits."""
    width, trained, residuals = settings["width"], [], []
    limits, central, kernels = [], [], []
    for run in range(seed, seed + settings["runs"]):
        generator = np.random.default_rng([run, width])
        first = [
            {"first": generator.normal(size=(width, 3)), "last": generator.normal(size=width)}
            for _ in range(MODELS)
        ]
        clients, rounds = len(POINTS_OF), settings["rounds"]
        models = trained_ensemble(
            RegressionClient, first, clients, rounds, run, schedule="balanced"
        )
        trained += [outputs(**model, z=TEST) for model in models]
        residuals += [np.abs(outputs(**model, z=X) - Y).max() for model in models]
        for weights in first:
            limit, kernel = own_limit(**weights)
            limits.append(limit)
            kernels.append(kernel)
            alone = descended(**weights, z=X, y=Y, steps=settings["central-steps"], rate=0.3)
            central.append(outputs(*alone, TEST))
    mean, deviation = gaussian_process()
    predictions = np.stack(trained)
    differences = {
        "own-limit": predictions - np.stack(limits),
        "central": np.stack(central) - np.stack(limits),
        "mean": predictions.mean(0) - mean,
        "deviation": predictions.std(0, ddof=1) - deviation,
        "mean-by-chance": deviation / np.sqrt(len(predictions)),
        "deviation-by-chance": deviation / np.sqrt(2 * len(predictions)),
    }
    for name, difference in differences.items():
        yield name, None, float(np.sqrt(np.mean(difference**2)))
    yield "kernel", None, float(np.mean(kernels))
    yield "residual", None, float(np.max(residuals))
