"""What sums over features and class prototypes give away: who is in them, and what they look like.

docs/results/privacy.md has the attacks. Members and public images are drawn from all 70,000 images.
In G + eps, eps is 1e-8 of the mean diagonal, and 1e-4 in public images' sums by which leverages are
divided (calibration, as in Carlini et al., *Membership Inference Attacks From First Principles*,
S&P 2022), the best for the attacker of 1e-8, 1e-4 and 1e-2 on two of the ten clients.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from common import trained
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.data.load import Data
from fedntk.simulations.engine.building import load_setup

from . import Row, grid
from .images import ssim

COUNTS = (1, 10, 100, 1000, 5800)
DRAWS = {1: 2}  # of ten clients; one draw for larger counts
PUBLIC, MANY = 1_000, 5_800  # public images of each class; images of a client with many
MEANS = (1, 2, 10)  # images in the means that are rebuilt
POOL, PROTOTYPE_DRAWS = 1_000, 200
EPS, EPS_PUBLIC = 1e-8, 1e-4
MAPS = {"last-layer": FeatureMap("last-layer"), "entk": FeatureMap("entk", 1000)}
PROTOTYPES = grid(weights=("first", "trained"), features=MAPS)
SUMS = grid(weights=("first", "trained"), features=MAPS, bits=(32, 8))


@functools.cache
def network_of(model: str, data_dir: str, weights: str) -> tuple[Data, nn.Module]:
    """Return Fashion-MNIST, and a network at its first weights or after its rounds."""
    config = Config(
        method="fedavg", dataset="fashion-mnist", data_dir=data_dir, model=model,
        num_clients=20, clients_per_round=10, clients_per_evaluation=0, train_examples=10_000,
        partition="dirichlet", alpha=0.8, learning_rate=0.1, rounds=10, test_examples=1_000,
    )  # fmt: skip
    setup = load_setup(config)
    return setup.data, trained(config) if weights == "trained" else setup.network


class Features(NamedTuple):
    """Features of those that clients draw from, (C, m, p), and of public ones, sorted by class."""

    classes: Tensor
    public: Tensor
    fixed_point: FixedPoint | None  # None: not rounded

    def compared(self, z: Tensor) -> Tensor:
        """Return the server's own features (n, p), rounded as clients round theirs, float64."""
        return (z if self.fixed_point is None else self.fixed_point(z)).double()

    def sums(self, label: int, members: NDArray[np.int64]) -> FeatureStatistics:
        """Return what a client sends that has some images of one class."""
        labels = torch.full((len(members),), label)
        z = self.classes[label][torch.from_numpy(members)]
        return FeatureStatistics.of([z], labels, len(self.classes), fixed_point=self.fixed_point)


def leverages(gram: NDArray[np.float64], z: Tensor, eps: float = EPS) -> Tensor:
    """Return z^T (G + eps)^-1 z of each row of z (m, p), float64, shape (m,)."""
    matrix = torch.from_numpy(gram).clone()
    matrix.diagonal().add_(eps * float(matrix.diagonal().mean()))
    factor = torch.linalg.cholesky(matrix)
    return torch.linalg.solve_triangular(factor, z.T, upper=False).square().sum(0)


def told_apart(leverage: Tensor, calibration: Tensor, members: NDArray[np.int64]) -> Row:
    """Compare members' leverages with all others'; `calibration` has those in public sums (m,)."""
    member = np.zeros(len(leverage), bool)
    member[members] = True
    plain, relative = (-s.log().numpy() for s in (leverage, leverage / calibration))
    strict = np.quantile(relative[~member], 0.99)
    return {
        "auc": float(roc_auc_score(member, plain)),
        "auc-calibrated": float(roc_auc_score(member, relative)),
        "members-found-at-1%-false": float((relative[member] > strict).mean()),
        "others-ruled-out": float((leverage.numpy()[~member] > 1 + 1e-6).mean()),
    }


def membership(features: Features, count: int, draws: int) -> Iterator[Row]:
    """Attack clients with `count` images each, by their own sums and by the sum of all."""
    rng = np.random.default_rng([count, 0])
    z = [features.compared(rows) for rows in features.classes]
    public = features.compared(features.public).split(len(features.public) // len(z))
    grams = [(rows.T @ rows).numpy() for rows in public]
    of_class = [leverages(gram, rows, EPS_PUBLIC) for gram, rows in zip(grams, z, strict=True)]
    of_all = [leverages(np.sum(grams, axis=0), rows, EPS_PUBLIC) for rows in z]
    results: dict[str, list[Row]] = {"one client": [], "sum of ten": []}
    for _ in range(draws):
        members = [rng.choice(len(rows), size=count, replace=False) for rows in z]
        sent = [features.sums(c, chosen) for c, chosen in enumerate(members)]
        joined = FeatureStatistics.join(sent).matrix()
        for c, chosen in enumerate(members):
            gram = sent[c].matrix()
            row = told_apart(leverages(gram, z[c]), of_class[c], chosen)
            mean = torch.from_numpy(sent[c].class_sums[c].astype(np.float64))
            first = mean
            for _ in range(100):  # power iteration
                first = torch.nn.functional.normalize(torch.from_numpy(gram) @ first, dim=0)
            for name, point in (("mean", mean), ("eigenvector", first)):
                nearest = ((z[c] @ point) / z[c].norm(dim=1)).abs().argmax()
                row[f"nearest-to-{name}-is-own"] = float(int(nearest) in chosen)
            results["one client"].append(row)
            results["sum of ten"].append(told_apart(leverages(joined, z[c]), of_all[c], chosen))
    for payload, rows in results.items():
        means = {key: round(float(np.mean([row[key] for row in rows])), 4) for key in rows[0]}
        yield {"sums": payload, "examples": count, **means}


def difference(features: Features, count: int) -> Row:
    """Attack a client by the sums with and without it; the other nine have many images each."""
    rng, size = np.random.default_rng([count, 1]), features.classes.shape[1]
    others = FeatureStatistics.join(
        features.sums(c, rng.choice(size, size=MANY, replace=False))
        for c in range(1, len(features.classes))
    )
    members = rng.choice(size, size=count, replace=False)
    sent = features.sums(0, members)
    gram, exact = ((others + sent) - others).matrix(), sent.matrix()
    z = features.compared(features.classes[0])
    auc = round(told_apart(leverages(gram, z), torch.ones(len(z)), members)["auc"], 4)
    error = np.abs(gram - exact).max() / np.abs(exact).max()
    return {"sums": "difference", "examples": count, "auc": auc, "relative-error": float(error)}


def linear_map(features: Tensor, images: Tensor) -> Tensor:
    """Fit pixels to features and a 1, (p + 1, 784); a fifth of the images chooses the ridge."""
    z = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    x = images.double()
    last = torch.arange(len(z)) % 5 == 0

    def fitted(chosen: Tensor, ridge: float) -> Tensor:
        gram = z[chosen].T @ z[chosen]
        gram.diagonal().add_(ridge * float(gram.diagonal().mean()))
        return torch.linalg.solve(gram, z[chosen].T @ x[chosen])

    def error(ridge: float) -> float:
        return float((z[last] @ fitted(~last, ridge) - x[last]).square().mean())

    return fitted(torch.ones_like(last), min((10.0**k for k in range(-6, 1)), key=error))


def rebuilt(features: Features, pixels: Tensor, public_pixels: Tensor) -> Iterator[Row]:
    """Rebuild ten images of each class from sums of 1 ... 10: SSIM, and all images."""
    steps = torch.ones(1) if features.fixed_point is None else features.fixed_point.step
    scale = torch.as_tensor(steps).double()
    matrix = linear_map((features.compared(features.public) * scale).float(), public_pixels)
    for count in MEANS:
        images = []
        for c, start in itertools.product(range(len(features.classes)), range(0, 100, 10)):
            sums = features.sums(c, np.arange(start, start + count)).class_sums[c]
            mean = torch.from_numpy(sums / count) * scale
            images.append((torch.cat([mean, torch.ones(1)]).double() @ matrix).clamp(0, 1).float())
        made = torch.stack(images)
        score = round(float(ssim(made, pixels[:, :100:10].flatten(0, 1)).mean()), 3)
        yield {"sums": "rebuilt", "examples": count, "ssim": score, "images": made}


def sums(data_dir: str, weights: str, features: str, bits: int) -> Iterator[Row]:
    data, network = network_of("simple-cnn", data_dir, weights)
    parts = data.train(np.arange(len(data.y_train))), data.test()
    x, y = (torch.cat(pair) for pair in zip(*parts, strict=True))
    raw = torch.from_numpy(np.concatenate([data.x_train, data.x_test])).flatten(1) / 255.0
    rng = np.random.default_rng(0)
    of_class = [torch.from_numpy(rng.permutation(np.flatnonzero(y == c))) for c in range(10)]
    public = torch.cat([places[:PUBLIC] for places in of_class])
    drawn = torch.stack([places[PUBLIC:] for places in of_class])  # (C, 6000)
    extract = MAPS[features].extractor(network)
    z = torch.cat([extract(part) for part in x.split(2_000)])
    made = Features(z[drawn], z[public], FixedPoint.of(z[public], bits) if bits < 32 else None)
    means, ten = raw[public].view(10, PUBLIC, -1).mean(1), raw[drawn[:, :100:10]]
    alone = ssim(means.repeat_interleave(10, 0), ten.flatten(0, 1))
    picture = {"original": raw[drawn[:, 0]], "label alone": means}
    yield {"sums": "label alone", "ssim": round(float(alone.mean()), 3), "picture": picture}
    for row in rebuilt(made, raw[drawn], raw[public]):
        images = row.pop("images")
        if row["examples"] == 1 and bits == 32:
            row["picture"] = {f"{features}, {weights} weights": images[::10]}
        yield row
    for count in COUNTS:
        yield from membership(made, count, DRAWS.get(count, 1))
    if weights == "first":
        yield from (difference(made, count) for count in (1, 10, 100, 1000))


def prototypes(data_dir: str, weights: str, features: str) -> Iterator[Row]:
    """Compare means of some images' features with the features of all."""
    data, network = network_of("lenet", data_dir, weights)
    x, _ = data.train(np.flatnonzero(data.y_train == 0)[:POOL])
    extract = MAPS[features].extractor(network)
    z = torch.cat([extract(part) for part in x.split(200)])
    for count in (1, 2, 5, 20, 100):
        rng, hits = np.random.default_rng(0), []
        for _ in range(PROTOTYPE_DRAWS):
            members = rng.choice(len(z), size=count, replace=False)
            hits.append(int((z - z[members].mean(0)).norm(dim=1).argmin()) in members)
        share = float(np.mean(hits))
        yield {"examples": count, "nearest-is-own": share, "by-chance": count / len(z)}
