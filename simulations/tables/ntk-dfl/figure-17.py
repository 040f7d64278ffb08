"""Examples rebuilt from the Jacobian that a neighbour receives.

The attack is that of Zhu, Liu and Han, *Deep Leakage from Gradients*, NeurIPS 2019, on a Jacobian
in place of a gradient: inputs are sought whose Jacobian is nearest to the one received.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
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

STEPS = 100  # of L-BFGS


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
    received = _received(model, inputs, labels, settings["sparsity"], settings["bits"])
    rebuilt = torch.stack([_fitted(model, [t[i] for t in received]) for i in range(len(x))])
    if matrix is not None:
        used = random_projection(torch.eye(x.shape[1]), projection, seed + 1000)
        rebuilt = rebuilt @ torch.linalg.pinv(used if settings["guessed"] else matrix)
    pairs = zip(rebuilt, x, strict=True)
    correlations = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs]
    yield "correlation", None, float(np.nan_to_num(correlations).mean())
    yield "ssim", None, _ssim(rebuilt, x, data.input_shape)
    yield "error", None, float((rebuilt - x).square().mean())


def _received(
    model: nn.Module, x: Tensor, labels: Tensor, sparsity: float, bits: int
) -> list[Tensor]:
    with torch.no_grad():
        outputs = model(x)
    targets = one_hot(labels, outputs.shape[1])
    sent = JacobianUpload(jacobian(model, x, structure="dense"), outputs, targets)
    arrays = CompressedUpload.compress(sent, sparsity=sparsity, bits=bits).to_arrays()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    upload = CompressedUpload.from_arrays(arrays, UploadLimits(shapes, len(x), sparsity, bits))
    return list(itertools.chain.from_iterable(b.arrays for b in upload.jacobian.blocks))


def _fitted(model: nn.Sequential, rows: list[Tensor]) -> Tensor:
    """Return the inputs whose Jacobian L-BFGS brings nearest to rows, from a random start."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(parameters["0.weight"].shape[1]).requires_grad_()
    optimiser = torch.optim.LBFGS([x], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        made = jacrev(lambda weights: functional_call(model, weights, x))(parameters)
        pairs = zip(made.values(), rows, strict=True)
        distance = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
        distance.backward()
        return distance

    optimiser.step(loss)
    return x.detach()


def _ssim(rebuilt: Tensor, x: Tensor, shape: tuple[int, ...]) -> float:
    """Return the mean SSIM over windows of 7 x 7, between black and white (Wang et al. 2004)."""
    black, white = x.min(), x.max()
    scaled = ((v.clamp(black, white) - black) / (white - black) for v in (rebuilt, x))
    a, b = (images.view(-1, *shape) for images in scaled)
    u, v, aa, bb, ab = (avg_pool2d(i, 7, 1) for i in (a, b, a * a, b * b, a * b))
    spread, both = 49 / 48 * (aa + bb - u * u - v * v), 49 / 48 * (ab - u * v)
    ratio = (2 * u * v + 1e-4) * (2 * both + 9e-4) / ((u * u + v * v + 1e-4) * (spread + 9e-4))
    return float(ratio.mean())
