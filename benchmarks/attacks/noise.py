"""One release of sums with noise, of features that nobody trains: accuracy, members, losses.

docs/results/privacy.md says what is released and measured. Scattering has J = 2 and L = 8; the
logarithms are standardised within the image. LiRA fits a normal law to an image's margin, the score
of its class minus the largest other one, over models with it, and another over models without it.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import CONF, RESULTS
from flwr.app import ArrayRecord, Message
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from fedntk.ntk.convex.private_sums import SumNoise, bound_rows, solve_noisy
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.scattering import ScatteringFrequencies
from fedntk.ntk.options import read_task
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.simulations import Config
from fedntk.simulations.check import failed
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.engines import LocalGrid, MeteredGrid

from . import Row, grid

DELTA, RADIUS, CLASSES, CHUNK = 1e-5, 127, 10, 500
POOL, WIDTH, MODELS, JUDGED, LOST = 4000, 1000, 48, 8, 10
MEMBERS = grid(epsilon=(0.0, 100.0, 8.0, 3.0, 1.0))
LOSSES = grid(seed=(0,))
SETTINGS = (  # data set, p, clients, Dirichlet's alpha, most examples of a client
    ("mnist", 2000, 100, 0.1, 0), ("fashion-mnist", 2000, 100, 0.1, 0),
    ("fashion-mnist", 400, 100, 0.1, 20), ("fashion-mnist", 400, 1000, 0.5, 20),
)  # fmt: skip
NAMES = ("dataset", "p", "clients", "alpha", "client_examples")
SUMS = [dict(zip(NAMES, some, strict=True)) | {"seed": k} for some in SETTINGS for k in range(5)]


def setup_of(
    dataset: str, data_dir: str, clients: int = 100, alpha: float = 0.1, **more: int
) -> Any:
    return load_setup(Config(
        method="one-exchange", dataset=dataset, data_dir=data_dir, model="scattering", rounds=1,
        standardise=False, num_clients=clients, partition="dirichlet", alpha=alpha,
        one_exchange={"sums": {"auto_ridge": False, "validation_share": 0.0}},
        clients_per_round=clients, random_features=1000, **more,
    ))  # fmt: skip


@functools.cache
def numbers(dataset: str, data_dir: str, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return whole numbers of training and test images, int8 (n, p), each with their labels."""
    setup = setup_of(dataset, data_dir)
    scattering, logarithms = setup.network[0], setup.network[1]
    size = scattering.num_channels * math.prod(scattering.map_size)
    frequencies = ScatteringFrequencies(scattering, size, width)

    def rows(x: Tensor) -> Tensor:
        coefficients = scattering(x).flatten(3).squeeze(1).half().float()
        return bound_rows(frequencies(logarithms(coefficients)), RADIUS).to(torch.int8)

    parts = setup.data.train(np.arange(len(setup.data.y_train))), setup.data.test()
    with torch.no_grad():
        z, test = (torch.cat([rows(part) for part in x.split(CHUNK)]) for x, _ in parts)
    return z, parts[0][1], test, parts[1][1]


def accuracies(
    data_dir: str, dataset: str, p: int, clients: int, alpha: float, client_examples: int, seed: int
) -> Iterator[Row]:
    z, y, test, y_test = numbers(dataset, data_dir, p)
    split = setup_of(dataset, data_dir, clients, alpha, seed=seed).split.clients
    survivors = clients * 9 // 10
    order = np.random.default_rng([seed, *b"lost"]).permutation(clients)[:survivors]
    rng = np.random.default_rng([seed, *b"drawn"])
    drawn = (rng.permutation(split[k])[:client_examples] for k in order)
    places = np.concatenate([*drawn] if client_examples else [split[k] for k in order])
    sums = FeatureStatistics.of(
        (part.float() for part in z[places].split(CHUNK)), y[places], CLASSES,
        fixed_point=FixedPoint(np.ones(p, np.float32), 8),
    )  # fmt: skip
    for epsilon, trust in [(0.0, "none"), *product((8.0, 3.0, 1.0), ("server", "clients"))]:
        noise = SumNoise(
            radius=RADIUS, width=p, num_classes=CLASSES, examples=max(1, client_examples),
            fewest=survivors if trust == "clients" else 0,
        )  # fmt: skip
        noisy = sums
        if epsilon:
            noise = noise.calibrated(epsilon, DELTA)
            # the sum of all shares is Skellam noise itself, of the sum of the variances
            whole = replace(noise, fewest=min(noise.fewest, 1), examples=1,
                            noise_multiplier=noise.noise_multiplier * noise.examples)  # fmt: skip
            try:
                noisy = whole.add(sums, np.random.default_rng([seed, *b"noise"]))
            except ValueError:  # too large to be drawn
                continue
        gram, cross = map(torch.from_numpy, (noisy.matrix(), noisy.class_sums.T.copy()))
        if epsilon:
            linear = solve_noisy(gram, cross, float(noise.variances()[0]))
        else:
            ridge = 1e-6 * float(gram.diagonal().sum())
            linear = torch.linalg.solve(gram + ridge * torch.eye(p).double(), cross.double())
        scores = torch.cat([part.float() @ linear.float() for part in test.split(CHUNK)])
        accuracy = float((scores.argmax(1) == y_test).float().mean())
        yield {"trust": trust, "epsilon": epsilon, "accuracy": accuracy}


def members(data_dir: str, epsilon: float) -> Iterator[Row]:
    z, y, test, y_test = numbers("fashion-mnist", data_dir, WIDTH)
    z, y, test = z[:POOL].double(), y[:POOL], test.double()
    targets = torch.nn.functional.one_hot(y, CLASSES).double()
    members = np.random.default_rng(0).random((MODELS, POOL)) < 0.5
    noise = SumNoise(radius=RADIUS, width=WIDTH, num_classes=CLASSES)
    v, s = (noise.calibrated(epsilon, DELTA) if epsilon else noise).variances()
    seen, accuracies = np.empty((MODELS, POOL)), []
    for k, chosen in enumerate(members):
        generator = torch.Generator().manual_seed(k)
        gram, cross = z[chosen].T @ z[chosen], z[chosen].T @ targets[chosen]
        if epsilon:
            drawn = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
            upper = drawn.triu(1) / 2**0.5
            gram += v**0.5 * (upper + upper.T + drawn.diag().diag())
            drawn = torch.randn(WIDTH, CLASSES, generator=generator, dtype=torch.float64)
            linear = solve_noisy(gram, cross + s**0.5 * drawn, v)
        else:
            ridge = 1e-4 * gram.trace() / WIDTH
            linear = torch.linalg.solve(gram + ridge * torch.eye(WIDTH).double(), cross)
        scores = z @ linear  # of a class; the margin is above the largest other one
        right = scores.gather(1, y[:, None]).squeeze(1)
        seen[k] = (right - scores.scatter(1, y[:, None], -torch.inf).amax(1)).numpy()
        accuracies.append(float(((test @ linear).argmax(1) == y_test).double().mean()))
    ratios = np.empty((JUDGED, POOL))
    for k in range(JUDGED):
        others, laws = np.arange(MODELS) != k, []
        for inside in (True, False):
            among = np.where((members == inside) & others[:, None], seen, np.nan)
            mean, std = np.nanmean(among, 0), np.nanstd(among, 0) + 1e-12
            laws.append(-0.5 * ((seen[k] - mean) / std) ** 2 - np.log(std))
        ratios[k] = laws[0] - laws[1]
    row: Row = {"accuracy": float(np.mean(accuracies))}
    judged = members[:JUDGED].ravel()
    for name, scores in (("threshold", seen[:JUDGED].ravel()), ("lira", ratios.ravel())):
        false, true, _ = roc_curve(judged, scores)
        row[f"{name}-auc"] = float(roc_auc_score(judged, scores))
        row[f"{name}-tpr-at-1-percent"] = float(np.interp(0.01, false, true))
    label = f"epsilon {epsilon:g}" if epsilon else "no noise"
    yield row | {"picture": {f"{label} ({row['accuracy']:.0%} right)": (false, true)}}


def draw(_: Any, curves: dict[str, Any], stem: str) -> None:
    figure, axis = plt.subplots(figsize=(5, 4.2), layout="constrained")
    for label, curve in curves.items():
        axis.loglog(*curve, label=label)
    axis.loglog([1e-3, 1], [1e-3, 1], "k:", label="guessing")
    axis.set(xlim=(1e-3, 1), ylim=(1e-3, 1.1), title="Membership attack on released models")
    axis.set(xlabel="share of others taken for members", ylabel="share of members found")
    axis.legend(loc="lower right", frameon=False)
    figure.savefig(RESULTS / f"{stem}.png", dpi=120)


class LossyGrid(LocalGrid):
    """A grid whose last clients are lost when they are asked for masked sums."""

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        task = read_task(SumTask, dict(message.content.get("config", {})))
        late = message.metadata.dst_node_id > len(self.contexts) - LOST
        return failed(reply) if late and task is not None and task.step == "masked" else reply


def losses(data_dir: str, seed: int, **more: Any) -> Iterator[Row]:
    path = CONF / "one_exchange_fmnist_private.toml"  # but the last clients answer with an error
    setup = load_setup(Config.load(path, data_dir=data_dir, seed=seed, **more))
    strategy, config = make_strategy(setup), setup.config
    grid = LossyGrid(app, config.num_clients, config.run_config())
    result = strategy.start(MeteredGrid(grid), ArrayRecord(setup.network.state_dict()), 1)
    predictor, (x, y) = strategy.predictor(result.arrays), setup.data.test()
    classes = torch.cat([predictor.predict(part).argmax(1) for part in x.split(CHUNK)])
    accuracy = float(classes.eq(y).double().mean())
    yield {"accuracy": accuracy, **dict(result.train_metrics_clientapp[1])}
