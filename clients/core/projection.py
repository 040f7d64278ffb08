"""The projection of a client's inputs; only clients and key server know its seed.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2:
Z = X P with P of shape (d_1, d_1'), made from a seed that the key server encrypts for each client.
P is Gaussian there; for images it may be a rotation of their lowest frequencies instead.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedntk.ntk import random_projection
from fedntk.ntk.features.projection import low_frequencies, rotated_low_frequencies
from fedntk.trust import SEALED_SEED, ClientKeys, SealError

from .weights import Config

ProjectionKind = Literal["gaussian", "low-frequency"]


@dataclass(frozen=True)
class SealedProjection:
    """Projects examples with the sealed seed of a message: see :func:`project`."""

    num_features: int  # d_1', the model's inputs
    keys: ClientKeys  # which open the seed
    kind: ProjectionKind = "gaussian"  # the same for all clients and for whoever evaluates

    def __post_init__(self) -> None:
        if self.kind not in get_args(ProjectionKind):
            kinds = ", ".join(get_args(ProjectionKind))
            raise ValueError(f"projection: expected the kind {kinds}, got {self.kind!r}")

    def probe(self, x: Tensor) -> Tensor:
        """Return one projected example of zeros; refuse examples that cannot be projected."""
        inputs = math.prod(x.shape[1:])
        if not 1 <= self.num_features <= inputs:
            raise ValueError(
                f"projection: expected 1 ... {inputs} features, the numbers in an example, "
                f"got {self.num_features}"
            )
        if self.kind == "low-frequency":
            return low_frequencies(torch.zeros_like(x[:1]), self.num_features)
        return torch.zeros(1, self.num_features, dtype=x.dtype)

    def __call__(self, x: Tensor, config: Config) -> Tensor:
        """Project examples (n, ...) to (n, d_1'); SealError if no seed came that the keys open."""
        sealed = config.get(SEALED_SEED)
        if not isinstance(sealed, bytes):
            raise SealError(
                "no sealed seed came with the message; give the strategy key_server=... and "
                "enrol this client's public key there"
            )
        return project(x, self.num_features, self.keys.open(sealed), self.kind)


def project(x: Tensor, num_features: int, seed: bytes, kind: ProjectionKind = "gaussian") -> Tensor:
    """Return Z = X P of shape (n, d_1') for n examples of d_1 numbers each; `seed` is of P.

    Gaussian: independent entries of P with variance 1/d_1, where the paper has 1: features of
    inputs of mean 0 and variance 1 have variance 1, as a network's first weights expect.

    Low frequencies: :func:`~fedntk.ntk.features.projection.rotated_low_frequencies` of images,
    times sqrt(d_1' / d_1), for the same size. They keep far more of an image, and the kept
    frequencies are public; the page on privacy says what that gives away.
    """
    rows, number = x.flatten(1), int.from_bytes(seed, "big")
    scale = math.sqrt(num_features / rows.shape[1])
    if kind == "low-frequency":
        return rotated_low_frequencies(x, num_features, number).mul_(scale)
    return random_projection(rows, num_features, number).mul_(scale)
