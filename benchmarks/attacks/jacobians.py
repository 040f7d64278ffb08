"""Deep leakage from Jacobians, and other attackers: images rebuilt from an upload.

fedntk's code makes and reads an upload of 60 examples of Fashion-MNIST, and 20 of them are
rebuilt. docs/results/privacy.md has the attackers. With a random projection P to 200 dimensions
some find z = x P and multiply it by the pseudo-inverse of P, others have x P in place of x.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from common import fashion_mnist
from torch import Tensor, nn

from fedntk.ntk import random_projection
from fedntk.ntk.payloads.compression import num_kept

from . import Row
from .images import MEAN, STD, leakage, pixels, ssim

BLACK, WHITE = -MEAN / STD, (1 - MEAN) / STD
CASES = ((0.0, 32), (0.5, 32), (0.5, 6), *((s, 32) for s in (0.8, 0.9, 0.95, 0.99, 0.999)))
PROJECTED, SEEDS = 200, {"seed known": 1, "seed guessed": 2}
PER_CLASS, ATTACKED = 6, 2  # of the client's examples, and those that are rebuilt
NOISE = 1e-4  # variance of each equality in the linear estimate: a hundredth of STD
SHOWN = ("deep leakage", "with a prior", "mean of the class")
PRIOR_WEIGHT = 1e-4  # against one squared equality
PLACES = [("none", "no upload", (0.0, 32)),
          *itertools.product(("none", *SEEDS), ("dense", "factored"), CASES)]  # fmt: skip
CELLS = [{"projection": p, "wire": w, "sparsity": s, "bits": b} for p, w, (s, b) in PLACES]


class Seen(NamedTuple):
    """What an upload shows of one example with inputs z, shape (d,), and H hidden units a."""

    outputs: Tensor  # f, exact (C,)
    products: Tensor  # Jacobian by W1, g z^T (C, H, d); zero where nothing came
    slopes: Tensor  # Jacobian by b1, g (C, H)
    tops: Tensor  # Jacobian of output c by row c of W2, a (C, H)
    closed: Tensor  # closed form of z from only the upload (d,); zero where nothing came
    inputs: Tensor  # z with the help of W2 (d,)
    mask: Tensor  # entries of z that the upload gives, bool (d,)
    bound: float  # what abs(z) is at most elsewhere
    on: Tensor  # units that are surely on, bool (H,)
    off: Tensor  # and surely off
    hidden: Tensor  # a (H,), zero where it is not known
    hidden_bound: float  # what a is at most there


class Prior(NamedTuple):
    """Mean (d,), covariance (d, d) and its inverse of images that the attacker has."""

    mean: Tensor
    covariance: Tensor
    precision: Tensor


def prior_of(images: Tensor) -> Prior:
    x = images.double()
    covariance = torch.cov(x.T) + 1e-3 * torch.eye(x.shape[1], dtype=x.dtype)  # regular by noise
    return Prior(x.mean(0), covariance, torch.linalg.inv(covariance))


def network(d: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(d, 100), nn.ReLU(), nn.Linear(100, 10))
        for layer in (model[0], model[2]):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model.eval()


def with_thresholds(tensors: list[Tensor], sparsity: float) -> list[tuple[Tensor, float]]:
    """Return received tensors, each with its threshold, the smallest magnitude that came.

    What was dropped of a tensor is at most its threshold. It is 0 if a zero came.
    """
    pairs = []
    for tensor in tensors:
        came = tensor[tensor != 0].abs()
        full = 0 < len(came) == num_kept(tensor.numel(), sparsity)
        pairs.append((tensor, float(came.min()) if full else 0.0))
    return pairs


def see(tensors: Sequence[tuple[Tensor, float]], row: int, outputs: Tensor, net: Any) -> Seen:
    """Collect what one example's row shows, on either wire."""
    first, slopes, third, fourth = (tensor[row].double() for tensor, _ in tensors)
    limits = [threshold for _, threshold in tensors]
    if first.ndim == 3:  # dense: d f / d W1, b1, W2, b2
        products, tops = first, third.diagonal().T
        shown = products != 0
        closed = ratio(products, slopes[:, :, None] * shown, (0, 1))
        inputs = ratio(products, net.w2[:, :, None] * shown, (0, 1))
        hidden = ratio(tops, (tops != 0).double(), (0,))
        mask = shown.any(0).any(0)
        on = shown.any(2).any(0) | (slopes != 0).any(0) | (hidden != 0)
        bound = limits[0] / float(net.w2[:, on].abs().max()) if on.any() else np.inf
    else:  # factored: inputs and output gradients of either layer
        closed = inputs = first[0]
        slopes, hidden = slopes[:, 0], third[0]
        products, tops = slopes[:, :, None] * inputs, fourth[:, 0].diagonal()[:, None] * hidden
        mask, bound = inputs != 0, limits[0]
        on = (slopes != 0).any(0) | (hidden != 0)
    off = ~on & ((net.w2.abs().amax(0) > limits[1]) | (limits[2] == 0))
    return Seen(
        *(outputs.double(), products, slopes, tops),
        *(closed, inputs, mask, bound, on, off, hidden, limits[2]),
    )


def ratio(products: Tensor, factor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Least squares of ``products = factor * result``; zero where all factors are."""
    power = (factor**2).sum(dims)
    return torch.where(power > 0, (products * factor).sum(dims) / power, 0.0)


def linear_estimate(prior: Prior, seen: Seen, net: Any, matrix: Tensor | None) -> Tensor:
    """Estimate x with least mean squared error from all that is known to be linear in x.

    These are received inputs and hidden units, and the outputs, each with noise.
    """
    got = seen.hidden != 0
    rows = [torch.eye(len(seen.inputs), dtype=torch.float64)[seen.mask], net.w1[got]]
    values = [seen.inputs[seen.mask], seen.hidden[got] - net.b1[got]]
    if (seen.on | seen.off).all():
        top = net.w2 * seen.on
        rows.append(top @ net.w1)
        values.append(seen.outputs - net.b2 - top @ net.b1)
    stacked = torch.cat(rows) if matrix is None else torch.cat(rows) @ matrix.T
    gain = prior.covariance @ stacked.T
    spread = stacked @ gain + NOISE * torch.eye(len(stacked), dtype=stacked.dtype)
    return prior.mean + gain @ torch.linalg.solve(spread, torch.cat(values) - stacked @ prior.mean)


def adaptive(
    seen: Seen, net: Any, matrix: Tensor | None = None, prior: Prior | None = None
) -> Tensor:
    """Return an x in the range of pixels that fits what was received, and what was not."""
    got, missing = seen.hidden != 0, ~seen.mask

    def loss(x: Tensor) -> Tensor:
        z = x if matrix is None else x @ matrix
        before = net.w1 @ z + net.b1
        wrong = [
            (z - seen.inputs)[seen.mask],
            (z[missing].abs() - seen.bound).relu(),
            (before - seen.hidden)[got],
            (before[~got] - seen.hidden_bound).relu(),
            (-before[seen.on]).relu(),
            before[seen.off].relu(),
            net.w2 @ before.relu() + net.b2 - seen.outputs,
        ]
        total = (torch.cat(wrong) ** 2).sum()
        if prior is not None:
            total = total + PRIOR_WEIGHT * (x - prior.mean) @ prior.precision @ (x - prior.mean)
        return total

    if prior is None:
        start = lifted(seen.inputs, matrix)
    else:
        start = linear_estimate(prior, seen, net, matrix)
    return leakage.lbfgs(loss, start.clamp(BLACK, WHITE), [(BLACK, WHITE)] * len(start))[0]


def lifted(z: Tensor, matrix: Tensor | None) -> Tensor:
    """Return the shortest x with x P = z."""
    return z if matrix is None else z @ torch.linalg.pinv(matrix)


@functools.cache
def client_of(data_dir: str) -> tuple[Tensor, Tensor, list[int], list[Prior]]:
    """Draw a client's examples, those that are rebuilt, and priors without them by class."""
    pictures, labels, _ = fashion_mnist(data_dir, 250)
    x = pictures.flatten(1)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    by_class = [mixed[labels[mixed] == c] for c in range(10)]
    order = torch.randperm(10 * PER_CLASS, generator=torch.Generator().manual_seed(1))
    drawn = torch.stack([members[:PER_CLASS] for members in by_class], 1).flatten()[order]
    attacked = order.argsort()[: 10 * ATTACKED].tolist()  # class 0 ... 9, then again
    return x[drawn], labels[drawn], attacked, [prior_of(x[m[PER_CLASS:]]) for m in by_class]


def rows(data_dir: str, projection: str, wire: str, sparsity: float, bits: int) -> Iterator[Row]:
    x, labels, attacked, all_priors = client_of(data_dir)
    originals = pixels(x[attacked])
    priors = [all_priors[int(label)] for label in labels[attacked]]
    rebuilt: dict[str, list[Tensor]] = defaultdict(list)
    if wire == "no upload":
        rebuilt["mean of the class"] = [prior.mean for prior in priors]
        means = torch.stack([prior.mean for prior in all_priors])
        rebuilt["mean of all"] = [means.mean(0)] * len(originals)
        noise = np.random.default_rng(0).random(originals.shape, dtype=np.float32)
        rebuilt["noise"] = [*(torch.from_numpy(noise) - MEAN) / STD]
    else:
        matrices = {
            name: random_projection(torch.eye(784), PROJECTED, seed).double()
            for name, seed in SEEDS.items()
        }
        matrix = matrices.get(projection)
        z = x if matrix is None else x @ matrices["seed known"].float()
        model = network(z.shape[1], 0)
        net, sent = leakage.Network.of(model), leakage.upload(model, z, labels, wire)
        tensors = with_thresholds(leakage.received(model, sent, sparsity, bits), sparsity)
        for row, prior in zip(attacked, priors, strict=True):
            seen = see(tensors, row, sent.outputs[row], net)
            received = seen.products, seen.slopes, seen.tops
            leaked = leakage.deep_leakage(net, *received, torch.Generator().manual_seed(row))
            rebuilt["closed form"].append(lifted(seen.closed, matrix))
            rebuilt["deep leakage"].append(lifted(leaked, matrix))
            rebuilt["adaptive"].append(adaptive(seen, net, matrix))
            rebuilt["with a prior"].append(adaptive(seen, net, matrix, prior))
    few = (0.0, 0.5, 0.8, 0.95) if projection == "none" else (0.0,)
    for attacker, standardised in rebuilt.items():
        images = pixels(torch.stack(standardised))
        row = {"attacker": attacker, "ssim": float(ssim(images, originals).mean())}
        if bits != 6 and sparsity in few and attacker in SHOWN:
            name = f"{projection} {wire} {sparsity}: {attacker}".removeprefix("none ")
            row["picture"] = {"original": originals, name: images}
        yield row
