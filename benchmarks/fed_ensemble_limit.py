"""Models of Fed-ensemble against the Gaussian process of Shi et al. 2021, theorem 4.2, by width.

A network with one hidden layer of l ReLU units, f(x) = a . relu(U z) / sqrt(l) with z = (x, 1) and
all weights of N(0, 1), learns six points by gradient descent on four clients, four models a run.
The theorem says what the models become as l grows, with Theta the tangent kernel at infinite width
and K0 the covariance of f at the first weights (both in closed form, Cho and Saul 2009):

    each model:     f0(x) + Theta(x, X) Theta^-1 (Y - f0(X))
    all of them:    mean Theta(x, X) Theta^-1 Y, and the covariance k of theorem 4.2

    python benchmarks/fed_ensemble_limit.py [--runs 25]

Reported for each width, over test points x: the distance of each trained model from its own limit
(by the kernel at its first weights, from ``fedntk.ntk``), and that of the same model trained on all
points together; the distance of that kernel from Theta; and the distances of the models' mean and
standard deviation from the Gaussian process's, beside what chance makes of so many models.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, parse_options, write
from fed_ensemble_toy import trained_ensemble
from matplotlib import pyplot
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import jacobian
from fedntk.simulations.report.figures import COLOURS

WIDTHS = (64, 256, 1024, 4096)
CLIENTS, MODELS, LOCAL_STEPS, RATE = 4, 4, 10, 0.5
Floats = NDArray[np.float64]

angles = 2 * np.pi * np.arange(6) / 6
X = np.stack([np.cos(angles), np.sin(angles), np.ones(6)], 1)
Y = np.array([1.0, -0.5, 0.3, -1.0, 0.8, 0.0])
OWN = ((0, 3), (1, 4), (2,), (5,))  # which points each client has
_between = 2 * np.pi * (np.arange(24) + 0.25) / 24
TEST = np.stack([0.9 * np.cos(_between), 0.9 * np.sin(_between), np.ones(24)], 1)


class Network(nn.Module):
    """The network, for points z of shape (n, 3): outputs (n, 1)."""

    def __init__(self, first: Floats, last: Floats) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.from_numpy(w)) for w in (first, last))

    def forward(self, z: Tensor) -> Tensor:
        """Return f(z)."""
        return (torch.relu(z @ self.first.T) @ self.last / len(self.last) ** 0.5)[:, None]


def outputs(first: Floats, last: Floats, z: Floats) -> Floats:
    return np.maximum(z @ first.T, 0) @ last / np.sqrt(len(last))


class RegressionClient(NumPyClient):
    """Gradient descent on half the mean squared error of a client's points."""

    def __init__(self, own: tuple[int, ...]) -> None:
        self.z, self.y = X[list(own)], Y[list(own)]

    def fit(self, parameters: list[Floats], config: dict[str, Any]) -> Any:
        """Take the local steps."""
        learned = descended(*parameters, self.z, self.y, LOCAL_STEPS, RATE)
        return list(learned), len(self.y), {"train-loss": 0.0}


def descended(
    first: Floats, last: Floats, z: Floats, y: Floats, steps: int, rate: float
) -> tuple[Floats, Floats]:
    """Return the weights after some steps of gradient descent on points z (n, 3)."""
    first, last = first.copy(), last.copy()
    for _ in range(steps):
        hidden = z @ first.T
        error = rate / len(y) / np.sqrt(len(last)) * (outputs(first, last, z) - y)
        step = ((error[:, None] * (hidden > 0)) * last).T @ z
        last -= error @ np.maximum(hidden, 0)
        first -= step
    return first, last


def first_weights(width: int, seed: int) -> list[dict[str, Floats]]:
    generator = np.random.default_rng([seed, width])
    return [
        {"first": generator.normal(size=(width, 3)), "last": generator.normal(size=width)}
        for _ in range(MODELS)
    ]


def trained(begun: list[dict[str, Floats]], seed: int, rounds: int) -> list[dict[str, Floats]]:
    def client(k: int) -> RegressionClient:
        return RegressionClient(OWN[k])

    return trained_ensemble(client, begun, CLIENTS, rounds, seed, schedule="balanced")


def limit_kernels(z: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Return K0 and Theta at infinite width, shape (n, m) each (arc-cosine kernels)."""
    norms = np.linalg.norm(z, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    cosine = np.clip(z @ other.T / norms, -1, 1)
    angle = np.arccos(cosine)
    covariance = norms / (2 * np.pi) * (np.sin(angle) + (np.pi - angle) * cosine)
    return covariance, covariance + z @ other.T * (np.pi - angle) / (2 * np.pi)


def gaussian_process() -> tuple[Floats, Floats]:
    """Return mean and standard deviation of theorem 4.2 at the test points."""
    own, theta = limit_kernels(X, X)
    across, theta_across = limit_kernels(TEST, X)
    weights = theta_across @ np.linalg.inv(theta)
    covariance = (
        limit_kernels(TEST, TEST)[0]
        + weights @ own @ weights.T
        - weights @ across.T
        - across @ weights.T
    )
    return weights @ Y, np.sqrt(np.diag(covariance))


def own_limit(begun: dict[str, Floats]) -> tuple[Floats, float]:
    """Return a model's own limit at the test points, and how far its kernel is from Theta."""
    points = torch.from_numpy(np.concatenate([X, TEST]))
    kernel = jacobian(Network(**begun), points).gram().numpy()
    limit = limit_kernels(np.concatenate([X, TEST]), X)[1]
    n = len(X)
    weights = kernel[n:, :n] @ np.linalg.inv(kernel[:n, :n])
    at_first = outputs(begun["first"], begun["last"], X)
    start = outputs(begun["first"], begun["last"], TEST)
    distance = np.linalg.norm(kernel[:, :n] - limit) / np.linalg.norm(limit)
    return start + weights @ (Y - at_first), float(distance)


def distances(width: int, runs: int, rounds: int, *, compared: bool = False) -> dict[str, float]:
    found, own, central, kernels, residuals = [], [], [], [], []
    for seed in range(runs):
        begun = first_weights(width, seed)
        for model, start in zip(trained(begun, seed, rounds), begun, strict=True):
            found.append(outputs(model["first"], model["last"], TEST))
            residuals.append(np.abs(outputs(model["first"], model["last"], X) - Y).max())
            limit, kernel = own_limit(start)
            own.append(limit)
            if compared:
                centrally = descended(**start, z=X, y=Y, steps=1500, rate=0.3)
                central.append(outputs(*centrally, TEST) - limit)
            kernels.append(kernel)
    mean, std = gaussian_process()
    predictions = np.stack(found)
    alone = {"own-limit-central": float(np.sqrt(np.mean(np.square(central))))} if central else {}
    return {
        "width": width,
        "models": len(found),
        "own-limit": float(np.sqrt(np.mean((predictions - np.stack(own)) ** 2))),
        "kernel": float(np.mean(kernels)),
        "mean": float(np.sqrt(np.mean((predictions.mean(0) - mean) ** 2))),
        "std": float(np.sqrt(np.mean((predictions.std(0, ddof=1) - std) ** 2))),
        "mean-by-chance": float(np.sqrt(np.mean(std**2) / len(found))),
        "std-by-chance": float(np.sqrt(np.mean(std**2) / (2 * len(found)))),
        "largest-residual": float(np.max(residuals)),
        **alone,
    }


def draw(rows: list[dict[str, float]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.6), layout="constrained")
    widths = [row["width"] for row in rows]
    for i, (key, label) in enumerate(
        (
            ("own-limit", "trained models from their own limits"),
            ("own-limit-central", "the same, trained on all points together"),
            ("kernel", "kernel from its limit (relative)"),
            ("mean", "mean of the models from the process's"),
            ("std", "their standard deviation from the process's"),
        )
    ):
        style = "x--" if key == "own-limit-central" else "o-"
        axes.loglog(widths, [row[key] for row in rows], style, color=COLOURS[i], label=label)
    axes.loglog(widths, [2 / w**0.5 for w in widths], ":", color="0.5", label="2 / sqrt(width)")
    axes.set(xlabel="width", ylabel="distance", title="Fed-ensemble and its Gaussian process")
    figure.legend(fontsize=8, ncols=2, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    options = parse_options(__doc__, runs=25, rounds=400)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = []
    for width in WIDTHS:
        rows.append(distances(width, options.runs, options.rounds, compared=True))
        print(rows[-1], flush=True)
    draw(rows, RESULTS / "fed_ensemble_limit.png")
    write("fed_ensemble_limit", summary={"settings": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
