"""Examples rebuilt from the Jacobian that a server or a neighbour receives.

The attack is that of Zhu, Liu and Han, *Deep Leakage from Gradients*, NeurIPS 2019, on a Jacobian
in place of a gradient: inputs are sought whose Jacobian is nearest to the one received.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from fedntk.ntk import (
    CompressedUpload,
    JacobianUpload,
    UploadLimits,
    jacobian,
    one_hot,
    random_projection,
)
from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data


class Network(NamedTuple):
    """``f(z) = W2 relu(W1 z + b1) + b2`` in float64, as the attacker holds it."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Copy the weights."""
        return cls(*(p.detach().double() for p in model.parameters()))


def attack(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield means over one example a class: correlation of pixels, SSIM, mean squared error.

    Settings: dataset, data-dir; width of the network; sparsity, bits; projection, 0 for none;
    guessed, if the attacker lacks the projection's seed and guesses another.
    """
    torch.manual_seed(seed)
    data = load_data(Config(dataset=settings["dataset"], data_dir=settings["data-dir"], seed=seed))
    drawn = np.random.default_rng(seed).permutation(len(data.y_train))
    first = [next(i for i in drawn if data.y_train[i] == c) for c in range(data.num_classes)]
    x, labels = data.train(np.array(first))
    x = x.flatten(1)
    width, projection = settings["width"], settings["projection"]
    matrix = random_projection(torch.eye(x.shape[1]), projection, seed) if projection else None
    inputs = x if matrix is None else x @ matrix
    model = nn.Sequential(
        nn.Linear(inputs.shape[1], width), nn.ReLU(), nn.Linear(width, data.num_classes)
    )
    sent = upload(model, inputs, labels, "dense")
    tensors = received(model, sent, settings["sparsity"], settings["bits"])
    net, generator = Network.of(model), torch.Generator().manual_seed(seed)
    fits = []
    for i in range(len(x)):
        products, slopes, tops, _ = (tensor[i].double() for tensor in tensors)
        fits.append(deep_leakage(net, products, slopes, tops.diagonal().T, generator))
    rebuilt = torch.stack(fits).float()
    if matrix is not None:
        used = random_projection(torch.eye(x.shape[1]), projection, seed + 1000)
        rebuilt = rebuilt @ torch.linalg.pinv(used if settings["guessed"] else matrix)
    pairs = zip(rebuilt, x, strict=True)
    correlations = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs]
    yield "correlation", None, float(np.nan_to_num(correlations).mean())
    black, white = x.min(), x.max()
    scaled = ((v.clamp(black, white) - black) / (white - black) for v in (rebuilt, x))
    images = (v.view(-1, *data.input_shape) for v in scaled)
    yield "ssim", None, float(ssim(*images).mean())
    yield "error", None, float((rebuilt - x).square().mean())


def upload(
    model: nn.Module, z: Tensor, labels: Tensor, structure: Literal["dense", "factored"]
) -> JacobianUpload:
    """Return what a client sends of its inputs (n, d) before it is compressed."""
    outputs = model(z).detach()
    targets = one_hot(labels, outputs.shape[1])
    return JacobianUpload(jacobian(model, z, structure=structure), outputs, targets)


def received(model: nn.Module, sent: JacobianUpload, sparsity: float, bits: int) -> list[Tensor]:
    """Compress an upload and read it; return its tensors, each with a row for each example."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    arrays = CompressedUpload.compress(sent, sparsity=sparsity, bits=bits).to_arrays()
    limits = UploadLimits(shapes, len(sent.outputs), sparsity, bits)
    blocks = CompressedUpload.from_arrays(arrays, limits).jacobian.blocks
    return list(itertools.chain.from_iterable(block.arrays for block in blocks))


def lbfgs(
    loss: Callable[[Tensor], Tensor], start: Tensor, bounds: Any = None
) -> tuple[Tensor, float]:
    """Minimise a loss; return the point and its loss, in float64."""

    def value_and_slope(point: Any) -> tuple[float, Any]:
        x = torch.from_numpy(point).requires_grad_()
        value = loss(x)
        return value.item(), torch.autograd.grad(value, x)[0].numpy()

    options = {"maxiter": 200, "maxcor": 20, "ftol": 1e-15, "gtol": 1e-9}
    done = minimize(
        value_and_slope, start.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return torch.from_numpy(done.x), float(done.fun)


def deep_leakage(
    net: Network, products: Tensor, slopes: Tensor, tops: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the z whose Jacobian comes nearest to the received one, zeros included.

    Received are, with C outputs, H hidden units a and g the outputs' derivatives by them, the
    derivatives by W1, g z^T (C, H, d), by b1, g (C, H), and those of each output by its own row of
    W2, a (C, H). The distance of the products is expanded, so that none is built: Zhu et al. 2019,
    eq. (4). What does not depend on z is left out. The better of two starts from random dummies.
    """
    power = (net.w2**2).sum(0)
    mixed = torch.einsum("ch,chd->hd", net.w2, products)
    constant = (products**2).sum()

    def loss(z: Tensor) -> Tensor:
        before = net.w1 @ z + net.b1
        on = (before > 0).to(z)
        weights = (on @ power) * (z @ z) - 2 * (on @ mixed) @ z + constant
        biases = ((net.w2 * on - slopes) ** 2).sum()
        return weights + biases + ((before.relu() - tops) ** 2).sum()

    dummies = torch.randn((2, net.w1.shape[1]), generator=generator, dtype=torch.float64)
    return min((lbfgs(loss, dummy) for dummy in dummies), key=lambda fit: fit[1])[0]


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean SSIM of each image in [0, 1], over windows of 7 x 7 (Wang et al. 2004)."""
    u, v, aa, bb, ab = (avg_pool2d(i, 7, 1) for i in (a, b, a * a, b * b, a * b))
    spread, both = 49 / 48 * (aa + bb - u * u - v * v), 49 / 48 * (ab - u * v)
    ratio = (2 * u * v + 1e-4) * (2 * both + 9e-4) / ((u * u + v * v + 1e-4) * (spread + 9e-4))
    return ratio.flatten(1).mean(1)
