"""What sums over features give away: who is in them, and what the images look like.

A client of TCT with `sums`, of AFL or of Fed3R sends the Gram matrix G = Z^T Z of
its features, their sum by class, and counts. Whoever has the network, which the server does, can
compute the features z of any image. Here a client has n Fashion-MNIST images of one class, drawn
from 6,000; the server has these 6,000 and does not know which n they are. These and 10,000
public images, 1,000 of each class, are drawn from all 70,000 training and test images alike.

* **Membership**: by the leverage z^T (G + eps)^-1 z, with eps 1e-8 of G's mean diagonal. That of a
  member is at most 1. With fewer examples than features z lies in the range of G, and that of
  nearly all others is far above 1. The area under the ROC curve (AUC) is that of members against
  all other images of the class; also with the leverage divided by that in the Gram matrix of public
  images of the same classes, which tells how unusual an image is at all (calibration, as in Carlini
  et al., *Membership Inference Attacks From First Principles*, S&P 2022). There eps is 1e-4, the
  best for the attacker of 1e-8, 1e-4 and 1e-2 on two of the ten clients.
* **Sum of ten clients**, each with n images of a class of its own: the same in the sum of their G.
* **Difference** of two sums, with and without a client, the other nine having 5,800 images each.
* **Nearest image** to the mean of the class, and to the first eigenvector of G.
* **Rebuilt images**: the sums of one example are its features, from which a linear map that is
  fitted to the public images gives its pixels. The same is done for means of several examples.

All this with exact features and with features rounded to 8 bits, with a network at its first
weights and after ten rounds of FedAvg on 10,000 of the training images, members or not.

    python benchmarks/sums_privacy.py --data-dir FOLDER
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import parse_options, trained, write
from numpy.typing import NDArray
from projection_privacy import draw_rows
from reconstruction import ssim
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup

COUNTS = (1, 10, 100, 1000, 5800)
DRAWS = {1: 2}  # of ten clients; one draw for larger counts
PUBLIC, MANY = 1_000, 5_800  # public images of each class; images of a client with many
MEANS = (1, 2, 10)  # images in the means that are rebuilt
SHOWN = 10
EPS, EPS_PUBLIC = 1e-8, 1e-4
MAPS = {"last-layer": FeatureMap("last-layer"), "entk": FeatureMap("entk", 1000)}


@dataclass(frozen=True, eq=False)
class Features:
    """Features of those that clients draw from, (C, m, p), and of public ones, sorted by class."""

    classes: Tensor
    public: Tensor
    fixed_point: FixedPoint | None

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.classes)

    @classmethod
    def of(cls, classes: Tensor, public: Tensor, bits: int) -> "Features":
        """Round to `bits` bits unless they are 32, by steps that the public images choose."""
        fixed = FixedPoint.of(public, bits) if bits < 32 else None
        return cls(classes, public, fixed)

    def compared(self, z: Tensor) -> Tensor:
        """Return the server's own features (n, p), rounded as clients round theirs, float64."""
        return (z if self.fixed_point is None else self.fixed_point(z)).double()

    def sums(self, label: int, own: NDArray[np.int64]) -> FeatureStatistics:
        """Return what a client sends that has some images of one class."""
        labels = torch.full((len(own),), label)
        z = self.classes[label][torch.from_numpy(own)]
        return FeatureStatistics.of([z], labels, self.num_classes, fixed_point=self.fixed_point)


class Leverage:
    """z^T (G + eps)^-1 z."""

    def __init__(self, gram: NDArray[np.float64], eps: float = EPS) -> None:
        matrix = torch.from_numpy(gram).clone()
        matrix.diagonal().add_(eps * float(matrix.diagonal().mean()))
        self.factor = torch.linalg.cholesky(matrix)

    def __call__(self, z: Tensor) -> Tensor:
        """Return the leverage of each row of z (m, p), float64, shape (m,)."""
        return torch.linalg.solve_triangular(self.factor, z.T, upper=False).square().sum(0)


def told_apart(leverage: Tensor, calibration: Tensor, own: NDArray[np.int64]) -> dict[str, float]:
    """Compare leverages (m,) of the members `own` in a client's sums with those of all others.

    `calibration` (m,) has the leverages in the sums of the public images.
    """
    member = np.zeros(len(leverage), bool)
    member[own] = True
    plain, relative = (-s.log().numpy() for s in (leverage, leverage / calibration))
    lowest = np.argsort(-plain)[: len(own)]
    strict = np.quantile(relative[~member], 0.99)
    return {
        "auc": float(roc_auc_score(member, plain)),
        "auc-calibrated": float(roc_auc_score(member, relative)),
        "members-found-at-1%-false": float((relative[member] > strict).mean()),
        "found-among-n-lowest": float(member[lowest].mean()),
        "others-ruled-out": float((leverage.numpy()[~member] > 1 + 1e-6).mean()),
    }


def nearest_is_own(z: Tensor, point: Tensor, own: NDArray[np.int64]) -> float:
    cosines = (z @ point) / z.norm(dim=1)
    return float(int(cosines.abs().argmax()) in own)


def first_eigenvector(matrix: Tensor, start: Tensor, *, times: int = 100) -> Tensor:
    for _ in range(times):
        start = matrix @ start
        start = start / start.norm()
    return start


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(float(np.mean([f[key] for f in found])), 4) for key in found[0]}


def membership(features: Features, count: int, draws: int) -> dict[str, Any]:
    """Attack clients with `count` images each, by their own sums and by the sum of all."""
    rng = np.random.default_rng([count, 0])
    classes = range(features.num_classes)
    z = [features.compared(own) for own in features.classes]
    known = features.compared(features.public).split(len(features.public) // len(z))
    grams = [(own.T @ own).numpy() for own in known]
    of_class = [Leverage(gram, EPS_PUBLIC)(own) for gram, own in zip(grams, z, strict=True)]
    all_public = Leverage(np.sum(grams, axis=0), EPS_PUBLIC)
    of_all = [all_public(own) for own in z]
    alone, together = [], []
    for _ in range(draws):
        members = [rng.choice(len(own), size=count, replace=False) for own in z]
        sent = [features.sums(c, members[c]) for c in classes]
        total = Leverage(FeatureStatistics.join(sent).matrix())
        for c in classes:
            gram = sent[c].matrix()
            found = told_apart(Leverage(gram)(z[c]), of_class[c], members[c])
            mean = torch.from_numpy(sent[c].class_sums[c].astype(np.float64))
            first = first_eigenvector(torch.from_numpy(gram), mean)
            for name, point in (("mean", mean), ("eigenvector", first)):
                found[f"nearest-to-{name}-is-own"] = nearest_is_own(z[c], point, members[c])
            alone.append(found)
            together.append(told_apart(total(z[c]), of_all[c], members[c]))
    own_sums = [np.array_equal(FeatureStatistics.join(sent).class_sums[c], sent[c].class_sums[c])
                for c in classes]  # fmt: skip
    return {
        "examples": count,
        "one client": mean_of(alone),
        "sum of ten": mean_of(together),
        "class sums of the ten are the clients' own": all(own_sums),
    }


def difference(features: Features, count: int) -> dict[str, Any]:
    """Attack a client by the sums with and without it; the other nine have many images each."""
    rng = np.random.default_rng([count, 1])
    others = FeatureStatistics.join(
        features.sums(c, rng.choice(features.classes.shape[1], size=MANY, replace=False))
        for c in range(1, features.num_classes)
    )
    members = rng.choice(features.classes.shape[1], size=count, replace=False)
    own = features.sums(0, members)
    gram, exact = ((others + own) - others).matrix(), own.matrix()
    error = np.abs(gram - exact).max() / np.abs(exact).max()
    z = features.compared(features.classes[0])
    found = told_apart(Leverage(gram)(z), torch.ones(len(z)), members)
    return {
        "examples": count,
        "relative error of the Gram matrix": float(error),
        "auc": round(found["auc"], 4),
        "found-among-n-lowest": round(found["found-among-n-lowest"], 4),
    }


def linear_map(features: Tensor, images: Tensor) -> Tensor:
    """Fit pixels to features and a 1, (p + 1, 784); a fifth of the images chooses the ridge."""
    z = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    x = images.double()
    last = torch.arange(len(z)) % 5 == 0

    def fitted(chosen: Tensor, ridge: float) -> Tensor:
        gram = z[chosen].T @ z[chosen]
        gram.diagonal().add_(ridge * float(gram.diagonal().mean()))
        return torch.linalg.solve(gram, z[chosen].T @ x[chosen])

    ridges = [10.0**k for k in range(-6, 1)]
    errors = [float((z[last] @ fitted(~last, r) - x[last]).square().mean()) for r in ridges]
    return fitted(torch.ones_like(last), ridges[int(np.argmin(errors))])


def rebuilt(
    features: Features, pixels: Tensor, public_pixels: Tensor
) -> tuple[dict[str, float], NDArray[np.float32]]:
    """Rebuild ten images of each class from sums of 1 ... 10; SSIM, and the images shown."""
    steps = torch.ones(1) if features.fixed_point is None else features.fixed_point.step
    scale = torch.as_tensor(steps).double()
    matrix = linear_map((features.compared(features.public) * scale).float(), public_pixels)
    scores: dict[str, list[float]] = {}
    images = []
    for c in range(features.num_classes):
        for start in range(0, 100, 10):
            for count in MEANS:
                own = np.arange(start, start + count)
                mean = torch.from_numpy(features.sums(c, own).class_sums[c] / count) * scale
                image = (torch.cat([mean, torch.ones(1)]).double() @ matrix).clamp(0, 1).float()
                found = ssim(image.numpy(), pixels[c, start].numpy())
                scores.setdefault(f"ssim, mean of {count}", []).append(found)
                if start == 0 and count == 1:
                    images.append(image.numpy())
    return {name: round(float(np.mean(s)), 3) for name, s in scores.items()}, np.stack(images)


def extracted(network: nn.Module, kind: str, x: Tensor) -> Tensor:
    extract = MAPS[kind].extractor(network)
    return torch.cat([extract(part) for part in x.split(2_000)])


def main() -> None:
    options = parse_options(__doc__, data_dir=True)
    config = Config(
        method="fedavg", dataset="fashion-mnist", data_dir=options.data_dir, model="simple-cnn",
        num_clients=20, clients_per_round=10, clients_per_evaluation=0, train_examples=10_000,
        partition="dirichlet", alpha=0.8, learning_rate=0.1, rounds=10, test_examples=1_000,
    )  # fmt: skip
    setup = load_setup(config)
    data, num_classes = setup.data, setup.data.num_classes
    (x, y), (x_test, y_test) = data.train(np.arange(len(data.y_train))), data.test()
    x, y = torch.cat([x, x_test]), torch.cat([y, y_test])
    raw = torch.from_numpy(np.concatenate([data.x_train, data.x_test])).flatten(1) / 255.0
    rng = np.random.default_rng(0)
    of_class = [
        torch.from_numpy(rng.permutation(np.flatnonzero(y == c))) for c in range(num_classes)
    ]
    public = torch.cat([own[:PUBLIC] for own in of_class])
    drawn = torch.stack([own[PUBLIC:] for own in of_class])  # (C, 6000)
    means = torch.stack([raw[own[:PUBLIC]].mean(0) for own in of_class])
    alone = [ssim(means[c].numpy(), raw[i].numpy())
             for c in range(num_classes) for i in drawn[c, :100:10]]  # fmt: skip
    shown = {"original": raw[drawn[:, 0]].numpy(), "label alone": means.numpy()}
    content: dict[str, Any] = {
        "ssim of the class's mean image": round(float(np.mean(alone)), 3),
        "membership": [], "differences": [], "rebuilt": [],
    }  # fmt: skip
    for weights in ("first", "trained"):
        network = trained(config) if weights == "trained" else setup.network
        for kind in MAPS:
            z = extracted(network, kind, x)
            for bits in (32, 8):
                case = {"weights": weights, "features": kind, "p": z.shape[1], "bits": bits}
                features = Features.of(z[drawn], z[public], bits)
                found, images = rebuilt(features, raw[drawn], raw[public])
                content["rebuilt"].append(case | found)
                if bits == 32:
                    shown[f"{kind}, {weights} weights"] = images
                for count in COUNTS:
                    row = membership(features, count, DRAWS.get(count, 1))
                    content["membership"].append(case | row)
                    print(content["membership"][-1], flush=True)
                if weights == "first":
                    for count in (1, 10, 100, 1000):
                        content["differences"].append(case | difference(features, count))
                        print(content["differences"][-1], flush=True)
                write("sums_privacy", summary=content)
    draw_rows(shown, "sums_privacy", SHOWN, width=0.62 * SHOWN)


if __name__ == "__main__":
    main()
