"""Differential privacy of single examples: clipped rows with Gaussian noise, and noisy labels.

Source: Dwork and Roth, *The Algorithmic Foundations of Differential Privacy*, 2014, section 3.2
(randomised response) and appendix A (the Gaussian mechanism), on the rows that clients send in Yue
et al. 2022, section 4.2. An example's row is its part of the Jacobian's tensors, in the form in
which they travel, and its outputs.
"""

import math
import secrets
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from .jacobian_upload import JacobianUpload

Draw = Callable[[int], NDArray[np.float64]]


def check_privacy(clip: float, noise_multiplier: float, label_noise: float) -> None:
    """Refuse noise without a norm to scale it by, and the norm or noisy labels without noise."""
    if (clip or noise_multiplier or label_noise) and not (clip and noise_multiplier):
        raise ValueError(
            "differential privacy takes clip and noise_multiplier above 0, both, got "
            f"clip = {clip}, noise_multiplier = {noise_multiplier}, label_noise = {label_noise}"
        )


def label_epsilon(label_noise: float, num_outputs: int) -> float:
    """Epsilon of one noisy label: ln(1 + C (1 - p) / p); infinite without noise.

    `label_noise` is p, the probability that a label is drawn anew from all C = `num_outputs` alike.

    Examples
    --------
    >>> round(label_epsilon(0.5, 10), 3)
    2.398
    """
    if label_noise == 0:
        return math.inf
    return math.log1p(num_outputs * (1 - label_noise) / label_noise)


def privatise(
    upload: JacobianUpload,
    *,
    clip: float,
    noise_multiplier: float,
    label_noise: float,
    generator: np.random.Generator | None = None,
) -> JacobianUpload:
    """Clip each example's row to a norm, add Gaussian noise to it, and randomise its label.

    A row of norm over S is scaled down to S, and a row that is not finite, which some weights
    cause, becomes zero; each of its numbers then gets independent noise of standard deviation sigma
    S. Replacing an example moves its row by at most 2 S, so the noise multiplier of the mechanism
    is sigma / 2. Later steps on the result, such as sparsification, keep the guarantee. (Noise in
    floating point differs from the theorem's in its lowest bits: Mironov, CCS 2012.) Layers with
    tokens are refused: whole numbers take no noise.

    Parameters
    ----------
    clip, noise_multiplier : float
        Norm S and factor sigma.
    label_noise : float
        Probability that a label is drawn anew, all C alike; 0 leaves the labels exact.
    generator : numpy.random.Generator, optional
        Source of repeatable noise, for simulations: anyone who draws the same numbers can remove
        it. By default all random numbers come from the operating system's cryptographic source.
    """
    whole = upload.jacobian.expanded()
    blocks = whole.blocks
    if any(block.integers for block in blocks):
        raise ValueError("privatise: tokens take no noise; expected layers with real inputs")
    rows = [upload.outputs, *(array for block in blocks for array in block.arrays)]
    norms = torch.stack([row.double().flatten(1).square().sum(1) for row in rows]).sum(0).sqrt()
    finite = norms.isfinite()
    scales = torch.where(finite, clip / norms.clamp_min(clip), 0.0).cpu()
    normal: Draw = generator.standard_normal if generator else _system_normal
    uniform: Draw = generator.random if generator else _system_uniform

    def noisy(row: torch.Tensor) -> torch.Tensor:
        shape = (-1, *[1] * (row.ndim - 1))
        clipped = row.cpu().double().where(finite.cpu().view(shape), 0.0) * scales.view(shape)
        noise = torch.from_numpy(normal(row.numel()).reshape(row.shape))
        return (clipped + noise_multiplier * clip * noise).to(row.dtype)

    outputs, jacobian = noisy(upload.outputs), whole.mapped(noisy)
    return JacobianUpload(jacobian, outputs, _noisy_labels(upload.targets, label_noise, uniform))


def _system_uniform(count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) of 53 random bits each, from the operating system."""
    words = np.frombuffer(secrets.token_bytes(8 * count), np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _system_normal(count: int) -> NDArray[np.float64]:
    """Box and Muller's transform of pairs of uniform numbers."""
    half = -(-count // 2)
    radius = np.sqrt(-2 * np.log1p(-_system_uniform(half)))
    angle = 2 * np.pi * _system_uniform(half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _noisy_labels(targets: torch.Tensor, label_noise: float, uniform: Draw) -> torch.Tensor:
    n, num_outputs = targets.shape
    drawn = torch.from_numpy((uniform(n) * num_outputs).astype(np.int64))
    anew = torch.from_numpy(uniform(n) < label_noise)
    labels = torch.where(anew, drawn, targets.argmax(1))
    return torch.nn.functional.one_hot(labels, num_outputs).to(targets.dtype)
