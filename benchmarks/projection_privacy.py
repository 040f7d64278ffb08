"""What projected inputs give away: the Gaussian projection and the rotated low frequencies.

A client of CP-NTK-FL sends the Jacobian at z, in which the first layer's factor is z itself, and
the label. So the server is given z = x P here, of Fashion-MNIST images, 784 numbers to 200, and
rebuilds 100 images that it has never seen. It knows the kind of projection, and has 10,000 public
images of the same set with labels. A rebuilt image is the linear estimate of least mean squared
error from what the server has found out, with mean and covariance of the public images of the
label's class. The attackers:

nothing          the mean of the class: what the label by itself tells
seed guessed     P of another seed
public images    the means of the classes among 10,000 received z are taken for those of the public
                 images, which gives 10 known pairs; then each z is matched with the public image of
                 its class that it is nearest to, and the rotation, or a linear map, is fitted to
                 these pairs, 20 times, with the z of one round (1,000) or of ten (the idea of Zhang
                 et al., *Earth Mover's Distance Minimization for Unsupervised Bilingual Lexicon
                 Induction*, EMNLP 2017)
known pairs      10, 50 or 200 of the z are of images that the server has: their inner products
                 with another z are those of the images' low frequencies, exactly for the rotation,
                 and of the images, with noise, for the Gaussian projection
seed known       P itself

    python benchmarks/projection_privacy.py --data-dir FOLDER

SSIM is of 28 x 28 images in [0, 1] with data_range=1. Needs fedntk installed, and scikit-image.
"""

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import RESULTS, fashion_mnist, parse_options, write
from numpy.typing import NDArray
from reconstruction import pixels, ssim
from torch import Tensor

from fedntk.clients.core.projection import project
from fedntk.ntk.features.projection import low_frequencies

FEATURES = 200
TARGETS, SEEN, ROUND, PUBLIC = 100, 10_000, 1_000, 10_000
PAIRS = (10, 50, 200)
SEED, GUESS = (n.to_bytes(32, "big") for n in (1, 2))
KINDS = ("gaussian", "low-frequency")
SHOWN = (  # in the picture
    "seed guessed", "public images, one round", "public images, ten", "known pairs, 50",
    "seed known",
)  # fmt: skip
Rebuild = Callable[[Tensor, Tensor], Tensor]  # received z (n, k), labels -> images (n, 784)


def estimator(images: Tensor, labels: Tensor, found: Tensor, noise: float = 0.0) -> Rebuild:
    """Linear estimate of an image from some numbers of it, by class.

    `found` (N, m) has these numbers of the public images (N, 784); in the images that are rebuilt
    they have noise, of that variance.
    """
    maps = {}
    for c in labels.unique().tolist():
        x, y = images[labels == c], found[labels == c]
        mean_x, mean_y = x.mean(0), y.mean(0)
        spread = torch.cov(y.T).reshape(y.shape[1], -1)
        spread += (noise + 1e-3 * float(spread.diagonal().mean())) * torch.eye(len(spread)).to(y)
        cross = (y - mean_y).T @ (x - mean_x) / (len(x) - 1)
        maps[c] = (mean_x, mean_y, torch.linalg.pinv(spread, hermitian=True) @ cross)

    def rebuild(numbers: Tensor, own: Tensor) -> Tensor:
        rows = []
        for number, label in zip(numbers, own.tolist(), strict=True):
            mean_x, mean_y, gain = maps[label]
            rows.append(mean_x + (number - mean_y) @ gain)
        return torch.stack(rows)

    return rebuild


def class_means(rows: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([rows[labels == c].mean(0) for c in labels.unique().tolist()])


def matched(
    z: Tensor,
    own: Tensor,
    wanted: Tensor,
    labels: Tensor,
    start: Tensor,
    *,
    rotation: bool,
    times: int = 20,
) -> Tensor:
    """Matrix (k, m) from centred z (n, k) to numbers of public images (N, m), found without a pair.

    Each z is matched with the public image of its class that it is nearest to, and the matrix is
    fitted to these: the nearest rotation, or by ridge regression. `start` (n, m) is a first guess.
    """
    guess = start
    for _ in range(times):
        target = torch.empty_like(guess)
        for c in own.unique().tolist():
            near = torch.cdist(guess[own == c], wanted[labels == c]).argmin(1)
            target[own == c] = wanted[labels == c][near]
        if rotation:
            left, _, right = torch.linalg.svd(z.T @ target)
            matrix = left @ right
        else:
            gram = z.T @ z
            gram += 1e-2 * gram.diagonal().mean() * torch.eye(len(gram)).to(z)
            matrix = torch.linalg.solve(gram, z.T @ target)
        guess = z @ matrix
    return matrix


def attacks(
    kind: str, seen: Tensor, seen_labels: Tensor, public: Tensor, labels: Tensor
) -> dict[str, tuple[Callable[[Tensor], Tensor], Rebuild]]:
    """Name -> how an attacker turns z into numbers of the image, and these into the image."""

    def projected(images: Tensor, seed: bytes) -> Tensor:
        return project(images.reshape(-1, 1, 28, 28), FEATURES, seed, kind)  # type: ignore[arg-type]

    z = projected(seen, SEED)
    found: dict[str, tuple[Callable[[Tensor], Tensor], Rebuild]] = {}
    found["nothing"] = (lambda own: own[:, :1] * 0, estimator(public, labels, public[:, :1] * 0))
    for name, seed in (("seed guessed", GUESS), ("seed known", SEED)):
        found[name] = (lambda own: own, estimator(public, labels, projected(public, seed)))
    scale = (FEATURES / 784) ** 0.5
    rotation = kind == "low-frequency"

    def numbers_of(images: Tensor) -> Tensor:  # that a server can compare z with
        if rotation:
            return scale * low_frequencies(images.reshape(-1, 28, 28), FEATURES)
        return scale * images

    def with_pairs(known: Tensor, pairs: Tensor) -> tuple[Callable[[Tensor], Tensor], Rebuild]:
        """Return the attack by inner products with what is known; `pairs` are their numbers."""
        numbers, noise = numbers_of(public) @ pairs.T, 0.0
        if not rotation:  # variance of z z' about its mean: (|x|^2 |x'|^2 + (x x')^2) k / d^2
            sizes = (numbers_of(public) ** 2).sum(1).mean() * (pairs**2).sum(1).mean()
            noise = float((sizes + numbers.square().mean()) / FEATURES)
        return lambda own: own @ known.T, estimator(public, labels, numbers, noise)

    means = class_means(z, seen_labels), numbers_of(class_means(public, labels))
    found["public images, means of classes"] = with_pairs(*means)
    for name, count in (("public images, one round", ROUND), ("public images, ten", SEEN)):
        own = seen_labels[:count]
        middle, centre = z[:count].mean(0), numbers_of(public).mean(0)
        numbers, rebuild = found["public images, means of classes"]
        start = numbers_of(rebuild(numbers(z[:count]), own)) - centre
        wanted = numbers_of(public) - centre
        matrix = matched(z[:count] - middle, own, wanted, labels, start, rotation=rotation)
        if not rotation:  # the largest directions; others are noise
            _, _, top = torch.linalg.svd(wanted[:2000], full_matrices=False)
            matrix, wanted = matrix @ top[:50].T, wanted @ top[:50].T
        rest = float(wanted.var(0).mean()) * 0.5
        found[name] = (
            lambda own, matrix=matrix, middle=middle: (own - middle) @ matrix,
            estimator(public, labels, wanted, noise=rest),
        )
    for count in PAIRS:
        found[f"known pairs, {count}"] = with_pairs(z[:count], numbers_of(seen[:count]))
    return found


def draw_rows(rows: dict[str, NDArray[np.float32]], stem: str, columns: int, width: float) -> None:
    """Draw the first images of each source, 28 x 28, a named row for each, on so many inches."""
    figure, axes = plt.subplots(len(rows), columns, figsize=(width, 0.62 * len(rows)))
    for line, (name, own) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, own, strict=False):
            axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(wspace=0.03, hspace=0.03)
    figure.savefig(RESULTS / f"{stem}.png", dpi=75, bbox_inches="tight")


def main() -> None:
    options = parse_options(__doc__, data_dir=True)

    x, y, _ = fashion_mnist(options.data_dir, (TARGETS + SEEN + PUBLIC) // 190)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x.flatten(1).double()[order], y[order]
    parts = [TARGETS, SEEN, PUBLIC]
    (target, seen, public), (own, seen_labels, labels) = (
        t[: sum(parts)].split(parts) for t in (x, y)
    )
    originals = pixels(target)
    results: dict[str, dict[str, Any]] = {}
    shown: dict[str, NDArray[np.float32]] = {}
    for kind in KINDS:
        z = project(target.reshape(-1, 1, 28, 28), FEATURES, SEED, kind)  # type: ignore[arg-type]
        for name, (numbers, rebuild) in attacks(kind, seen, seen_labels, public, labels).items():
            images = pixels(rebuild(numbers(z), own))
            scores = [ssim(a, b) for a, b in zip(images, originals, strict=True)]
            row = {
                "ssim": round(float(np.mean(scores)), 3),
                "largest": round(float(np.max(scores)), 3),
                "squared-error": round(float(((images - originals) ** 2).mean()), 4),
            }
            results.setdefault(kind, {})[name] = row
            print(kind, name, row, flush=True)
            if name == "nothing":
                shown["label alone"] = images
            elif name in SHOWN:
                shown[f"{kind}, {name}"] = images
    settings = {"features": FEATURES, "seen": SEEN, "one round": ROUND, "public": PUBLIC}
    write("projection_privacy", summary={"settings": settings, "results": results})
    draw_rows({"original": originals, **shown}, "projection_privacy", 8, width=5.6)


if __name__ == "__main__":
    main()
