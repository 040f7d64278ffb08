"""What projected inputs give away: the Gaussian projection and the rotated low frequencies.

In the Jacobian that a client of CP-NTK-FL sends the first layer's factor is z = x P itself. docs/
results/privacy.md says what the server knows. To match each z with a public image is the idea of
Zhang et al., *Earth Mover's Distance Minimization for Unsupervised Bilingual Lexicon Induction*,
EMNLP 2017. Known pairs give inner products with another z: of the images' low frequencies, exactly,
for the rotation, and of the images, with noise, for the Gaussian projection.
"""

from collections.abc import Callable, Iterator

import torch
from common import fashion_mnist
from torch import Tensor

from fedntk.clients.core.projection import project
from fedntk.ntk.features.projection import low_frequencies

from . import Row, grid
from .images import pixels, ssim

FEATURES = 200
TARGETS, SEEN, ROUND, PUBLIC = 100, 10_000, 1_000, 10_000
PAIRS = (10, 50, 200)
SEED, GUESS = (n.to_bytes(32, "big") for n in (1, 2))
CELLS = grid(projection=("gaussian", "low-frequency"))
SHOWN = ("nothing", "seed guessed", "public images, ten", "known pairs, 50", "seed known")
Rebuild = Callable[[Tensor, Tensor], Tensor]  # received z (n, k), labels -> images (n, 784)
Attacker = tuple[Callable[[Tensor], Tensor], Rebuild]  # z -> numbers of the image -> the image


def estimator(images: Tensor, labels: Tensor, numbers: Tensor, noise: float = 0.0) -> Rebuild:
    """Estimate images linearly, by class, from numbers of them that have noise of some variance.

    `numbers` (N, m) are those of the public images (N, 784), without noise.
    """
    maps = {}
    for c in labels.unique().tolist():
        x, y = images[labels == c], numbers[labels == c]
        mean_x, mean_y = x.mean(0), y.mean(0)
        spread = torch.cov(y.T).reshape(y.shape[1], -1)
        spread += (noise + 1e-3 * float(spread.diagonal().mean())) * torch.eye(len(spread)).to(y)
        cross = (y - mean_y).T @ (x - mean_x) / (len(x) - 1)
        maps[c] = (mean_x, mean_y, torch.linalg.pinv(spread, hermitian=True) @ cross)

    def rebuild(received: Tensor, classes: Tensor) -> Tensor:
        parts = ((row, *maps[c]) for row, c in zip(received, classes.tolist(), strict=True))
        return torch.stack([x + (row - y) @ gain for row, x, y, gain in parts])

    return rebuild


def class_means(rows: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([rows[labels == c].mean(0) for c in labels.unique().tolist()])


def matched(
    z: Tensor, z_labels: Tensor, wanted: Tensor, labels: Tensor, guess: Tensor, *, rotation: bool
) -> Tensor:
    """Matrix (k, m) from centred z (n, k) to numbers of public images (N, m), without a pair.

    Each z is matched with the public image of its class that it is nearest to, and the matrix is
    fitted to these: the nearest rotation, or by ridge regression. `guess` (n, m) is the first.
    """
    for _ in range(20):
        target = torch.empty_like(guess)
        for c in z_labels.unique().tolist():
            near = torch.cdist(guess[z_labels == c], wanted[labels == c]).argmin(1)
            target[z_labels == c] = wanted[labels == c][near]
        if rotation:
            left, _, right = torch.linalg.svd(z.T @ target)
            matrix = left @ right
        else:
            gram = z.T @ z
            gram += 1e-2 * gram.diagonal().mean() * torch.eye(len(gram)).to(z)
            matrix = torch.linalg.solve(gram, z.T @ target)
        guess = z @ matrix
    return matrix


def projected(images: Tensor, seed: bytes, kind: str) -> Tensor:
    return project(images.reshape(-1, 1, 28, 28), FEATURES, seed, kind)  # type: ignore[arg-type]


def attackers(
    kind: str, seen: Tensor, seen_labels: Tensor, public: Tensor, labels: Tensor
) -> dict[str, Attacker]:
    z = projected(seen, SEED, kind)
    result = {"nothing": (lambda y: y[:, :1] * 0, estimator(public, labels, public[:, :1] * 0))}
    for name, seed in (("seed guessed", GUESS), ("seed known", SEED)):
        result[name] = (lambda y: y, estimator(public, labels, projected(public, seed, kind)))
    scale, rotation = (FEATURES / 784) ** 0.5, kind == "low-frequency"

    def numbers_of(images: Tensor) -> Tensor:  # that a server can compare z with
        if rotation:
            return scale * low_frequencies(images.reshape(-1, 28, 28), FEATURES)
        return scale * images

    def with_pairs(known: Tensor, pairs: Tensor) -> Attacker:
        """Return the attack by inner products with what is known; `pairs` are their numbers."""
        numbers, noise = numbers_of(public) @ pairs.T, 0.0
        if not rotation:  # variance of z z' about its mean: (|x|^2 |x'|^2 + (x x')^2) k / d^2
            sizes = (numbers_of(public) ** 2).sum(1).mean() * (pairs**2).sum(1).mean()
            noise = float((sizes + numbers.square().mean()) / FEATURES)
        return lambda y: y @ known.T, estimator(public, labels, numbers, noise)

    means = class_means(z, seen_labels), numbers_of(class_means(public, labels))
    result["public images, means of classes"] = numbers, rebuild = with_pairs(*means)
    for name, count in (("public images, one round", ROUND), ("public images, ten", SEEN)):
        some = seen_labels[:count]
        middle, centre = z[:count].mean(0), numbers_of(public).mean(0)
        start = numbers_of(rebuild(numbers(z[:count]), some)) - centre
        wanted = numbers_of(public) - centre
        matrix = matched(z[:count] - middle, some, wanted, labels, start, rotation=rotation)
        if not rotation:  # the largest directions; others are noise
            _, _, top = torch.linalg.svd(wanted[:2000], full_matrices=False)
            matrix, wanted = matrix @ top[:50].T, wanted @ top[:50].T
        rest = float(wanted.var(0).mean()) * 0.5
        result[name] = (
            lambda y, matrix=matrix, middle=middle: (y - middle) @ matrix,
            estimator(public, labels, wanted, noise=rest),
        )
    for count in PAIRS:
        result[f"known pairs, {count}"] = with_pairs(z[:count], numbers_of(seen[:count]))
    return result


def rows(data_dir: str, projection: str) -> Iterator[Row]:
    x, y, _ = fashion_mnist(data_dir, (TARGETS + SEEN + PUBLIC) // 190)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x.flatten(1).double()[order], y[order]
    parts = [TARGETS, SEEN, PUBLIC]
    target, seen, public = x[: sum(parts)].split(parts)
    classes, seen_labels, labels = y[: sum(parts)].split(parts)
    originals, z = pixels(target), projected(target, SEED, projection)
    attacks = attackers(projection, seen, seen_labels, public, labels)
    for name, (numbers, rebuild) in attacks.items():
        images = pixels(rebuild(numbers(z), classes))
        row = {"attacker": name, "ssim": float(ssim(images, originals).mean())}
        if name in SHOWN:
            row["picture"] = {"original": originals, f"{projection}, {name}": images}
        yield row
