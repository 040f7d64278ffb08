"""Differential privacy of single examples: clipped rows with Gaussian noise, and noisy labels.

Sources: Dwork and Roth, *The Algorithmic Foundations of Differential Privacy*, 2014, section 3.2
(randomised response) and appendix A (the Gaussian mechanism), on the rows that clients send in Yue
et al. 2022, section 4.2; Mironov, *Renyi Differential Privacy*, CSF 2017, for the composition, with
the conversion of Balle et al., *Hypothesis Testing Interpretations and Renyi Differential Privacy*,
AISTATS 2020, both as Opacus has them; Bun and Steinke, *Concentrated Differential Privacy*, TCC
2016, proposition 3.3, for noisy labels: what is epsilon-private has a Renyi divergence of order a
of at most min(epsilon, a epsilon^2 / 2).

An example's row is its part of the Jacobian's tensors, in the form in which they travel, and its
outputs.
"""

import math
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..noise import Noise
from .jacobian_upload import JacobianUpload

Draw = Callable[[int], NDArray[np.float64]]
ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024]


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


@dataclass(frozen=True, kw_only=True)
class RowNoise(Noise):
    """Noise in clipped rows and in labels, and the epsilon that it gives.

    A row of norm over S is scaled down to S, and a row that is not finite, which some weights
    cause, becomes zero; each of its numbers then gets independent noise of standard deviation sigma
    S. Replacing an example moves its row by at most 2 S, so the noise multiplier of the mechanism
    is sigma / 2. Later steps on the result, such as sparsification, keep the guarantee. (Noise in
    floating point differs from the theorem's in its lowest bits: Mironov, CCS 2012.)

    Attributes
    ----------
    clip, noise_multiplier : float
        Norm S and factor sigma; ValueError unless both are above 0.
    label_noise : float
        Probability that a label is drawn anew, all C alike; 0 leaves the labels exact.
    """

    protects: ClassVar = "a training example's values, and its label if there is label noise"
    covers: ClassVar = frozenset(
        {
            *("clip", "noise_multiplier", "label_noise", "delta", "noise_seed", "sampling_rate"),
            *("steps", "kernel", "residuals", "kernel_dtype", "tolerance", "allow_no_step"),
            *("class_prior", "class_target", "validation_loss", "structure", "chunk_size"),
            *("sparsity", "bits", "shuffling_server", "shuffling_key", "private_key", "shuffle"),
            *("outlier_factor", "defence", "liars_expected"),  # they judge rows with noise
        }
    )
    needs: ClassVar = {"selection": ("linearised", "validation")}
    metrics: ClassVar = frozenset(
        {
            *("num-examples", "epsilon", "epsilon-without-labels", "noise-multiplier"),
            *("label-noise", "t", "learning-rate", "kernel-products", "solver-steps"),
            "solver-error-estimate",
            *("candidate-loss", "linearised-loss", "model-updated"),
        }
    )
    releases: ClassVar = (
        "each round's rows with noise, and what follows from them",
        "labels, with noise if there is label noise",
        "the number of examples of each client",
    )

    clip: float
    noise_multiplier: float
    label_noise: float = 0.0

    def __post_init__(self) -> None:
        if not (self.clip and self.noise_multiplier):
            raise ValueError(
                "differential privacy takes clip and noise_multiplier above 0, both, got "
                f"clip = {self.clip}, noise_multiplier = {self.noise_multiplier}, label_noise = "
                f"{self.label_noise}"
            )

    @property
    def sensitivity(self) -> float:
        """2 / sigma, of one upload."""
        return 2 / self.noise_multiplier

    def epsilon(self, delta: float, uploads: int = 1, num_outputs: int = 2) -> float:
        """Epsilon at `delta` of an example whose client has sent so many uploads.

        Two data sets are neighbours if one example's values, and its label, are replaced. No credit
        is given for what is sampled or shuffled, so it holds whatever the server knows of both.
        Without `label_noise` labels are public, and epsilon is only of the rows. C is
        `num_outputs`. This takes Opacus: ``pip install 'fedntk[privacy]'``.
        """
        if uploads == 0:
            return 0.0
        try:
            from opacus.accountants.analysis import rdp  # imports much
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "epsilon needs opacus, which is not installed: pip install 'fedntk[privacy]'",
                name=error.name,
            ) from error

        renyi = rdp.compute_rdp(
            q=1.0, noise_multiplier=1 / self.sensitivity, steps=uploads, orders=ORDERS
        )
        if self.label_noise > 0:
            pure = label_epsilon(self.label_noise, num_outputs)
            orders = np.array(ORDERS)
            renyi = renyi + uploads * np.minimum(pure, orders * pure**2 / 2)
        with warnings.catch_warnings():  # that an order at the end of the list is the best
            warnings.simplefilter("ignore")
            epsilon, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=renyi, delta=delta)
        return float(epsilon) if math.isfinite(epsilon) else math.inf

    def add(
        self, upload: JacobianUpload, generator: np.random.Generator | None = None
    ) -> JacobianUpload:
        """Clip each example's row to the norm, add noise to it, and randomise its label.

        Layers with tokens are refused: whole numbers take no noise. A `generator` makes repeatable
        noise, for simulations: anyone who draws the same numbers can remove it. By default all
        random numbers come from the operating system's cryptographic source.
        """
        whole = upload.jacobian.expanded()
        blocks = whole.blocks
        if any(block.integers for block in blocks):
            raise ValueError("noise: tokens take none; expected layers with real inputs")
        rows = [upload.outputs, *(array for block in blocks for array in block.arrays)]
        norms = torch.stack([row.double().flatten(1).square().sum(1) for row in rows]).sum(0).sqrt()
        finite = norms.isfinite()
        scales = torch.where(finite, self.clip / norms.clamp_min(self.clip), 0.0).cpu()
        normal: Draw = generator.standard_normal if generator else _system_normal
        uniform: Draw = generator.random if generator else _system_uniform
        deviation = self.noise_multiplier * self.clip

        def noisy(row: torch.Tensor) -> torch.Tensor:
            shape = (-1, *[1] * (row.ndim - 1))
            clipped = row.cpu().double().where(finite.cpu().view(shape), 0.0) * scales.view(shape)
            noise = torch.from_numpy(normal(row.numel()).reshape(row.shape))
            return (clipped + deviation * noise).to(row.dtype)

        outputs, jacobian = noisy(upload.outputs), whole.mapped(noisy)
        labels = _noisy_labels(upload.targets, self.label_noise, uniform)
        return JacobianUpload(jacobian, outputs, labels)


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
