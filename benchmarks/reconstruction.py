"""Deep leakage from Jacobians: Fashion-MNIST images rebuilt from what a client uploads.

Yue et al. 2022, section 4.2 and appendix B (figure 8); Thompson et al. 2025, appendix F (figure
17); the attack is Zhu, Liu and Han, *Deep Leakage from Gradients*, NeurIPS 2019. An upload of 60
examples, MLP with 100 hidden units, is made and read by fedntk's own code: dense (the paper's
tensors) and factored, at several sparsities, at the first weights and after training. The server
knows weights, labels, outputs and the range of pixels, and rebuilds 20 of the examples:

closed form     weight row over bias row of the first layer, pixel by pixel, by least squares;
                of a factored upload the input factor itself
deep leakage    Zhu et al.: L-BFGS fits a dummy's Jacobian to the received one, zeros included
adaptive        L-BFGS fits only what was received; the rest is below the threshold, a hidden unit
                that shows is on, others are off, pixels stay within their range
with a prior    the same with mean and covariance of other images of the label's class; starts at
                the linear estimate of least mean squared error

With a random projection P to 200 dimensions the first two find z = x P and multiply it by the
pseudo-inverse of P, the others have x P in place of x; a server without the seed guesses another.

    python benchmarks/reconstruction.py --data-dir FOLDER [--processes 4]

SSIM is scikit-image's, of 28 x 28 images in [0, 1] with data_range=1. Needs torch, numpy, pandas,
SciPy, scikit-image and matplotlib.
"""

import copy
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RESULTS, fashion_mnist, parse_options, use_checkout, write
from numpy.typing import NDArray
from scipy.optimize import minimize
from skimage.metrics import structural_similarity
from torch import Tensor, nn

MEAN, STD = 0.286, 0.353  # Fashion-MNIST's, as common.py has them
BLACK, WHITE = -MEAN / STD, (1 - MEAN) / STD
CASES = ((0.0, 32), (0.5, 32), (0.5, 6), *((s, 32) for s in (0.8, 0.9, 0.95, 0.99, 0.999)))
SPARSITIES = tuple(s for s, bits in CASES if bits == 32)
WIRES = ("dense", "factored")
ATTACKERS = ("closed form", "deep leakage", "adaptive", "with a prior")
PROJECTED, SEED, GUESS = 200, 1, 2
PER_CLASS, ATTACKED = 6, 2  # of the client's examples, and those that are rebuilt
NOISE = 1e-4  # variance of each equality in the linear estimate: a hundredth of STD
PRIOR_WEIGHT = 1e-4  # against one squared equality
KEYS = ("weights", "projection", "wire", "sparsity", "bits", "attacker")
SHOWN = (  # in the picture
    *(("none", "dense", s, "deep leakage") for s in (0.0, 0.5, 0.8, 0.9, 0.95)),
    ("none", "dense", 0.95, "closed form"),
    ("none", "dense", 0.99, "with a prior"),
    *(("none", "factored", s, "deep leakage") for s in (0.5, 0.8, 0.95)),
    *(("none", "factored", s, "with a prior") for s in (0.8, 0.95)),
    ("seed guessed", "dense", 0.0, "closed form"),
    ("seed guessed", "dense", 0.0, "with a prior"),
    ("seed known", "dense", 0.0, "closed form"),
    *(("seed known", "dense", s, "with a prior") for s in (0.0, 0.95)),
)
Images = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Network:
    """``f(z) = W2 relu(W1 z + b1) + b2`` in float64, as the attacker holds it."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> "Network":
        """Copy the weights."""
        return cls(*(p.detach().double() for p in model.parameters()))


@dataclass(frozen=True, eq=False)
class Seen:
    """What an upload shows of one example with inputs z, shape (d,), and H hidden units a."""

    outputs: Tensor  # f, exact (C,)
    products: Tensor  # Jacobian by W1, g z^T (C, H, d); zero where nothing came
    slopes: Tensor  # Jacobian by b1, g (C, H)
    tops: Tensor  # Jacobian of output c by row c of W2, a (C, H)
    closed: Tensor  # closed form of z from only the upload (d,); zero where nothing came
    inputs: Tensor  # z with the help of W2 (d,)
    known: Tensor  # where it is known, bool (d,)
    bound: float  # what abs(z) is at most elsewhere
    on: Tensor  # units that are surely on, bool (H,)
    off: Tensor  # and surely off
    hidden: Tensor  # a (H,), zero where it is not known
    hidden_bound: float  # what a is at most there


@dataclass(frozen=True, eq=False)
class Prior:
    """Mean (d,), covariance (d, d) and its inverse of images that the attacker has."""

    mean: Tensor
    covariance: Tensor
    precision: Tensor

    @classmethod
    def of(cls, images: Tensor) -> "Prior":
        """Estimate from rows; a little white noise keeps the covariance regular."""
        x = images.double()
        covariance = torch.cov(x.T) + 1e-3 * torch.eye(x.shape[1], dtype=x.dtype)
        return cls(x.mean(0), covariance, torch.linalg.inv(covariance))


@dataclass(frozen=True, eq=False)
class Target:
    """A client, the network it was sent, and what the server knows beside its upload."""

    name: str  # of the weights
    model: nn.Module  # 784-100-10, or 200-100-10 for projected examples
    x: Tensor  # the client's (n, 784)
    labels: Tensor
    rows: Sequence[int]  # examples that are rebuilt
    matrices: Mapping[str, Tensor | None]  # what is taken for P, the true one first; None: none
    priors: Sequence[Prior]  # by class


def network(d: int, seed: int, width: int = 100, num_outputs: int = 10) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, num_outputs))
        for layer in (model[0], model[2]):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model.eval()


def trained(model: nn.Module, x: Tensor, labels: Tensor, epochs: int = 3) -> nn.Module:
    """Return a copy after plain SGD: batches of 64, rate 0.05; 87 % are then right."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), labels[batch]).backward()
            optimiser.step()
    return model


def upload(model: nn.Module, z: Tensor, labels: Tensor, wire: str) -> Any:
    from fedntk.ntk import JacobianUpload, jacobian, one_hot

    outputs = model(z).detach()
    targets = one_hot(labels, outputs.shape[1])
    return JacobianUpload(jacobian(model, z, structure=wire), outputs, targets)


def received(model: nn.Module, sent: Any, sparsity: float, bits: int) -> list[tuple[Tensor, float]]:
    """Compress an upload and read it; its tensors, each with its threshold.

    What was dropped of a tensor is at most its threshold: the smallest magnitude that came, or 0
    if zeros came, too.
    """
    from fedntk.ntk import CompressedUpload, UploadLimits
    from fedntk.ntk.payloads.compression import num_kept

    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    arrays = CompressedUpload.compress(sent, sparsity=sparsity, bits=bits).to_arrays()
    read = CompressedUpload.from_arrays(
        arrays, UploadLimits(shapes, len(sent.outputs), sparsity, bits)
    )
    found = []
    for tensor in itertools.chain.from_iterable(b.arrays for b in read.jacobian.blocks):
        came = tensor[tensor != 0].abs()
        full = 0 < len(came) == num_kept(tensor.numel(), sparsity)
        found.append((tensor, float(came.min()) if full else 0.0))
    return found


def see(tensors: Sequence[tuple[Tensor, float]], row: int, outputs: Tensor, net: Network) -> Seen:
    """Collect what one example's row shows, on either wire."""
    first, slopes, third, fourth = (tensor[row].double() for tensor, _ in tensors)
    limits = [threshold for _, threshold in tensors]
    if first.ndim == 3:  # dense: d f / d W1, b1, W2, b2
        products, tops = first, third.diagonal().T
        shown = products != 0
        closed = ratio(products, slopes[:, :, None] * shown, (0, 1))
        inputs = ratio(products, net.w2[:, :, None] * shown, (0, 1))
        hidden = ratio(tops, (tops != 0).double(), (0,))
        known = shown.any(0).any(0)
        on = shown.any(2).any(0) | (slopes != 0).any(0) | (hidden != 0)
        bound = limits[0] / float(net.w2[:, on].abs().max()) if on.any() else np.inf
    else:  # factored: inputs and output gradients of either layer
        closed = inputs = first[0]
        slopes, hidden = slopes[:, 0], third[0]
        products, tops = slopes[:, :, None] * inputs, fourth[:, 0].diagonal()[:, None] * hidden
        known, bound = inputs != 0, limits[0]
        on = (slopes != 0).any(0) | (hidden != 0)
    off = ~on & ((net.w2.abs().amax(0) > limits[1]) | (limits[2] == 0))
    return Seen(
        *(outputs.double(), products, slopes, tops),
        *(closed, inputs, known, bound, on, off, hidden, limits[2]),
    )


def ratio(found: Tensor, factor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Least squares of ``found = factor * result``; zero where all factors are."""
    power = (factor**2).sum(dims)
    return torch.where(power > 0, (found * factor).sum(dims) / power, 0.0)


def lbfgs(
    loss: Callable[[Tensor], Tensor], start: Tensor, *, bounds: Any = None, steps: int = 200
) -> tuple[Tensor, float]:
    def value_and_slope(point: Any) -> tuple[float, Any]:
        x = torch.from_numpy(point).requires_grad_()
        value = loss(x)
        return value.item(), torch.autograd.grad(value, x)[0].numpy()

    options = {"maxiter": steps, "maxcor": 20, "ftol": 1e-15, "gtol": 1e-9}
    done = minimize(
        value_and_slope, start.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return torch.from_numpy(done.x), float(done.fun)


def leakage_loss(seen: Seen, net: Network) -> Callable[[Tensor], Tensor]:
    """Return the squared distance of z's Jacobian from the received one, zeros included.

    Of the tensors g z^T it is expanded, so that none is built: Zhu et al. 2019, eq. (4). What does
    not depend on z, the rest of W2 and b2, is left out.
    """
    power = (net.w2**2).sum(0)
    mixed = torch.einsum("ch,chd->hd", net.w2, seen.products)
    constant = (seen.products**2).sum()

    def loss(z: Tensor) -> Tensor:
        before = net.w1 @ z + net.b1
        on = (before > 0).to(z)
        weights = (on @ power) * (z @ z) - 2 * (on @ mixed) @ z + constant
        biases = ((net.w2 * on - seen.slopes) ** 2).sum()
        return weights + biases + ((before.relu() - seen.tops) ** 2).sum()

    return loss


def deep_leakage(seen: Seen, net: Network, seed: int, starts: int = 2) -> Tensor:
    """Start at random dummies; return the z whose Jacobian came nearest."""
    generator = torch.Generator().manual_seed(seed)
    loss, shape = leakage_loss(seen, net), (starts, net.w1.shape[1])
    dummies = torch.randn(shape, generator=generator, dtype=torch.float64)
    return min((lbfgs(loss, dummy) for dummy in dummies), key=lambda found: found[1])[0]


def linear_estimate(prior: Prior, rows: Tensor, values: Tensor) -> Tensor:
    """Estimate x linearly from ``rows x = values`` + noise, with least mean squared error."""
    gain = prior.covariance @ rows.T
    spread = rows @ gain + NOISE * torch.eye(len(rows), dtype=rows.dtype)
    return prior.mean + gain @ torch.linalg.solve(spread, values - rows @ prior.mean)


def equalities(seen: Seen, net: Network, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
    """All that is known to be linear in x: received inputs and hidden units, and the outputs."""
    got = seen.hidden != 0
    rows = [torch.eye(len(seen.inputs), dtype=torch.float64)[seen.known], net.w1[got]]
    values = [seen.inputs[seen.known], seen.hidden[got] - net.b1[got]]
    if (seen.on | seen.off).all():
        top = net.w2 * seen.on
        rows.append(top @ net.w1)
        values.append(seen.outputs - net.b2 - top @ net.b1)
    stacked = torch.cat(rows)
    return (stacked if matrix is None else stacked @ matrix.T), torch.cat(values)


def adaptive(
    seen: Seen, net: Network, matrix: Tensor | None = None, prior: Prior | None = None
) -> Tensor:
    """Return an x in the range of pixels that fits what was received, and what was not."""
    got, missing = seen.hidden != 0, ~seen.known

    def loss(x: Tensor) -> Tensor:
        z = x if matrix is None else x @ matrix
        before = net.w1 @ z + net.b1
        wrong = [
            (z - seen.inputs)[seen.known],
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
        start = linear_estimate(prior, *equalities(seen, net, matrix))
    bounds = [(BLACK, WHITE)] * len(start)
    return lbfgs(loss, start.clamp(BLACK, WHITE), bounds=bounds)[0]


def lifted(z: Tensor, matrix: Tensor | None) -> Tensor:
    """Return the shortest x with x P = z."""
    return z if matrix is None else z @ torch.linalg.pinv(matrix)


def attacked(job: tuple[str, int, str, float, int]) -> dict[tuple[str, str], Images]:
    """Rebuild a target's rows; for each P and attacker the images, (rows, 784) in [0, 1]."""
    data_dir, which, wire, sparsity, bits = job
    torch.set_num_threads(1)
    use_checkout()
    target = targets(data_dir)[which]
    true = next(iter(target.matrices.values()))
    z = target.x if true is None else target.x @ true.float()
    net = Network.of(target.model)
    sent = upload(target.model, z, target.labels, wire)
    tensors = received(target.model, sent, sparsity, bits)
    found: dict[tuple[str, str], list[Images]] = {}
    for row in target.rows:
        seen = see(tensors, row, sent.outputs[row], net)
        leaked = deep_leakage(seen, net, seed=row)
        prior = target.priors[int(target.labels[row])]
        for name, matrix in target.matrices.items():
            rebuilt = (
                lifted(seen.closed, matrix),
                lifted(leaked, matrix),
                adaptive(seen, net, matrix),
                adaptive(seen, net, matrix, prior),
            )
            for attacker, x in zip(ATTACKERS, rebuilt, strict=True):
                found.setdefault((name, attacker), []).append(pixels(x))
    return {key: np.stack(images) for key, images in found.items()}


def pixels(x: Tensor) -> Images:
    """Undo the standardisation; what is beyond black and white is cut off."""
    return (x.float() * STD + MEAN).clamp(0, 1).numpy()


def ssim(image: Images, original: Images) -> float:
    a, b = (np.float64(i).reshape(28, 28) for i in (image, original))
    return float(structural_similarity(a, b, data_range=1.0))


def scores(images: Images, originals: Images) -> dict[str, float]:
    each = [ssim(a, b) for a, b in zip(images, originals, strict=True)]
    error = float(((images - originals) ** 2).mean())
    return {
        "ssim": float(np.mean(each)), "ssim-min": min(each), "ssim-max": max(each), "mse": error,
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def targets(data_dir: str) -> list[Target]:
    """Client, networks and priors; no image of the client is in a prior."""
    from fedntk.ntk import random_projection

    pictures, labels, _ = fashion_mnist(data_dir, 250)
    x = pictures.flatten(1)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    by_class = [mixed[labels[mixed] == c] for c in range(10)]
    order = torch.randperm(10 * PER_CLASS, generator=torch.Generator().manual_seed(1))
    own = torch.stack([members[:PER_CLASS] for members in by_class], 1).flatten()[order]
    rows = order.argsort()[: 10 * ATTACKED].tolist()  # class 0 ... 9, then again
    priors = [Prior.of(x[members[PER_CLASS:]]) for members in by_class]
    matrices = {
        name: random_projection(torch.eye(784), PROJECTED, seed).double()
        for name, seed in (("seed known", SEED), ("seed guessed", GUESS))
    }
    first = network(784, 0)
    client = (x[own], labels[own], rows)
    return [
        Target("first", first, *client, {"none": None}, priors),
        Target("trained", trained(first, x, labels), *client, {"none": None}, priors),
        Target("first", network(PROJECTED, 0), *client, matrices, priors),
    ]


def references(target: Target, originals: Images) -> dict[str, Images]:
    classes = [target.priors[int(target.labels[row])].mean for row in target.rows]
    overall = torch.stack([prior.mean for prior in target.priors]).mean(0)
    return {
        "mean of the class": np.stack([pixels(mean) for mean in classes]),
        "mean of all": np.stack([pixels(overall)] * len(classes)),
        "noise": np.random.default_rng(0).random(originals.shape, dtype=np.float32),
    }


def main() -> None:
    options = parse_options(__doc__, data_dir=True, processes=4)
    use_checkout()
    start = time.perf_counter()
    found = targets(options.data_dir)
    jobs = [
        (options.data_dir, which, wire, *case)
        for which in range(len(found))
        for wire in WIRES
        for case in CASES
    ]
    originals = pixels(found[0].x[found[0].rows])
    rows, images = [], {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for job, results in zip(jobs, pool.imap(attacked, jobs), strict=True):
            for (projection, attacker), rebuilt in results.items():
                key = (found[job[1]].name, projection, *job[2:], attacker)
                images[key] = rebuilt
                rows.append(dict(zip(KEYS, key, strict=True)) | scores(rebuilt, originals))
            print(f"{time.perf_counter() - start:.0f} s:", *job[1:], flush=True)
    known = references(found[0], originals)
    summary = {
        "seconds": round(time.perf_counter() - start),
        "processes": options.processes,
        "images": len(originals),
        "examples-of-the-client": len(found[0].x),
        "settings": {
            "projection": PROJECTED,
            "noise-variance": NOISE,
            "prior-weight": PRIOR_WEIGHT,
        },
        "references": {name: scores(each, originals) for name, each in known.items()},
        "sparsity-and-bits": CASES,
        "mean-ssim": table(rows),
    }
    write("reconstruction", rows, summary)
    grid(images, known, originals)
    curves(rows, summary["references"]["mean of the class"]["ssim"])


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Mean SSIM by situation and attacker, a number for each case; and of the best attacker."""
    scored = pd.DataFrame(rows)
    found = {}
    for (weights, projection, wire), part in scored.groupby([*KEYS[:3]], sort=False):
        by_attacker = part.pivot(index=["sparsity", "bits"], columns="attacker", values="ssim")
        by_attacker = by_attacker.loc[[*CASES], [*ATTACKERS]].round(3)
        situation = f"{weights} weights, projection {projection}, {wire}"
        found[situation] = by_attacker.assign(best=by_attacker.max(axis=1)).to_dict("list")
    return found


def grid(images: Mapping[Any, Images], known: Mapping[str, Images], originals: Images) -> None:
    """Ten originals and what the attackers make of them, SSIM under each; in 32 greys."""
    from matplotlib import pyplot
    from PIL import Image

    lines = [("original", originals)]
    for projection, wire, sparsity, attacker in SHOWN:
        projected = "" if projection == "none" else f"projected, {projection},\n"
        label = f"{projected}{wire}, sparsity {sparsity:g}:\n{attacker}"
        lines.append((label, images["first", projection, wire, sparsity, 32, attacker]))
    lines.append(("no upload:\nmean of the class", known["mean of the class"]))
    side, across, down, left = 56, 59, 72, 150  # in dots
    width, height = left + 10 * across, len(lines) * down
    figure = pyplot.figure(figsize=(width / 100, height / 100), dpi=100)
    for (top, (label, line)), column in itertools.product(enumerate(lines), range(10)):
        corner = (left + column * across) / width, 1 - (top * down + side + 1) / height
        axis = figure.add_axes((*corner, side / width, side / height))
        axis.imshow(line[column].reshape(28, 28), cmap="gray", vmin=0, vmax=1)
        axis.set_axis_off()
        if top:
            score = round(ssim(line[column], originals[column]), 2) + 0.0  # no -0.00
            axis.text(
                0.5, -0.03, f"{score:.2f}", size=7, ha="center", va="top", transform=axis.transAxes
            )
        if column == 0:
            axis.text(-0.1, 0.5, label, size=7, ha="right", va="center", transform=axis.transAxes)
    figure.canvas.draw()
    grey = np.asarray(figure.canvas.buffer_rgba())[:, :, 0]
    Image.fromarray(grey).quantize(32).save(RESULTS / "reconstruction.png", optimize=True)


def curves(rows: Sequence[Mapping[str, Any]], mean_of_class: float) -> None:
    from matplotlib import pyplot

    titles = {
        "none": "no projection",
        "seed known": f"projected to {PROJECTED}, seed known",
        "seed guessed": f"projected to {PROJECTED}, seed guessed",
    }
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    figure, axes = pyplot.subplots(
        2, 3, figsize=(9, 5), sharex=True, sharey=True, layout="constrained"
    )
    for (wire, projection), axis in zip(itertools.product(WIRES, titles), axes.flat, strict=True):
        for attacker, colour in zip(ATTACKERS, colours, strict=True):
            for weights, style in (("first", "o-"), ("trained", "s:")):
                wanted = {"weights": weights, "projection": projection, "wire": wire}
                wanted |= {"bits": 32, "attacker": attacker}
                line = [r["ssim"] for r in rows if wanted.items() <= r.items()]
                label = attacker if weights == "first" else None
                if line:
                    axis.plot(line, style, c=colour, ms=3, lw=1.3, label=label)
        axis.axhline(mean_of_class, c="0.5", lw=1, ls="--", label="mean of the class, no upload")
        axis.set_title(f"{wire}, {titles[projection]}", fontsize=9)
        axis.set_xticks(range(len(SPARSITIES)), [f"{s:g}" for s in SPARSITIES], fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean SSIM")
    for axis in axes[1]:
        axis.set_xlabel("sparsity")
    axes[0, 0].plot([], [], "s:", c="0.3", ms=3, lw=1.3, label="same, at trained weights")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(RESULTS / "reconstruction_ssim.png", dpi=90)


if __name__ == "__main__":
    main()
