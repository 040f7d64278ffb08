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
standard deviation from the Gaussian process's, beside what chance makes of so many models. Writes
beside this file results/fed_ensemble_limit.json and .png.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from matplotlib import pyplot
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.clients import client_app
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import jacobian
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.report.figures import COLOURS
from fedntk.simulations.report.results import machine
from fedntk.strategies import FedEnsemble, Sampling, Screening, SeededFedAvg

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
    """Return f of points z (n, 3)."""
    return np.maximum(z @ first.T, 0) @ last / np.sqrt(len(last))


class RegressionClient(NumPyClient):
    """Gradient descent on half the mean squared error of a client's points."""

    def __init__(self, own: tuple[int, ...]) -> None:
        self.z, self.y = X[list(own)], Y[list(own)]

    def fit(self, parameters: list[Floats], config: dict[str, Any]) -> Any:
        """Take the local steps."""
        del config
        first, last = (w.copy() for w in parameters)
        for _ in range(LOCAL_STEPS):
            hidden = self.z @ first.T
            error = (
                RATE / len(self.y) / np.sqrt(len(last)) * (outputs(first, last, self.z) - self.y)
            )
            step = ((error[:, None] * (hidden > 0)) * last).T @ self.z
            last -= error @ np.maximum(hidden, 0)
            first -= step
        return [first, last], len(self.y), {"train-loss": 0.0}


def first_weights(width: int, seed: int) -> list[dict[str, Floats]]:
    """Draw the first weights of the models of one run."""
    generator = np.random.default_rng([seed, width])
    return [
        {"first": generator.normal(size=(width, 3)), "last": generator.normal(size=width)}
        for _ in range(MODELS)
    ]


def trained(begun: list[dict[str, Floats]], seed: int, rounds: int) -> list[dict[str, Floats]]:
    """Train the models by the strategy."""

    def client_fn(context: Context) -> RegressionClient:
        return RegressionClient(OWN[int(context.node_config["partition-id"])])

    strategy = FedEnsemble(
        inner=lambda: SeededFedAvg(fraction_evaluate=0.0),
        num_models=MODELS,
        schedule="balanced",
        sampling=Sampling(seed=seed),
        min_available_nodes=CLIENTS,
        fraction_evaluate=0.0,
        screening=Screening(outlier_factor=np.inf),
    )
    models = EnsembleArrays(tuple({n: Array(w) for n, w in own.items()} for own in begun))
    grid = LocalGrid(client_app(client_fn), CLIENTS, {})
    result = strategy.start(grid, ArrayRecord(models.to_arrays()), num_rounds=rounds)
    learned = EnsembleArrays.from_arrays(result.arrays).models
    return [{name: array.numpy() for name, array in own.items()} for own in learned]


def trained_centrally(begun: dict[str, Floats], steps: int = 1500) -> Floats:
    """Return the predictions at the test points after gradient descent on all points together."""
    first, last = begun["first"].copy(), begun["last"].copy()
    for _ in range(steps):
        hidden = X @ first.T
        error = 0.3 / len(Y) / np.sqrt(len(last)) * (outputs(first, last, X) - Y)
        step = ((error[:, None] * (hidden > 0)) * last).T @ X
        last -= error @ np.maximum(hidden, 0)
        first -= step
    return outputs(first, last, TEST)


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
    """Train, and compare with the limit; if `compared`, also with training on all points."""
    found, own, central, kernels, residuals = [], [], [], [], []
    for seed in range(runs):
        begun = first_weights(width, seed)
        for model, start in zip(trained(begun, seed, rounds), begun, strict=True):
            found.append(outputs(model["first"], model["last"], TEST))
            residuals.append(np.abs(outputs(model["first"], model["last"], X) - Y).max())
            limit, kernel = own_limit(start)
            own.append(limit)
            if compared:
                central.append(trained_centrally(start) - limit)
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
    """Draw all distances against the width."""
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = []
    for width in WIDTHS:
        rows.append(distances(width, options.runs, options.rounds, compared=True))
        print(rows[-1], flush=True)
    results = Path(__file__).parent / "results"
    draw(rows, results / "fed_ensemble_limit.png")
    text = json.dumps({"machine": machine(), "settings": vars(options), "rows": rows}, indent=2)
    (results / "fed_ensemble_limit.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
