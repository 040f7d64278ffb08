"""The projection of a client's inputs, whose seed only clients and key server know.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2:
Z = X P with P of shape (d_1, d_1'), made from a seed that the key server encrypts for each client.
P is Gaussian there; here it may, for images, be a rotation of their lowest frequencies, too.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedntk.ntk import random_projection
from fedntk.ntk.features import low_frequencies, rotated_low_frequencies
from fedntk.trust import SEALED_SEED, ClientKeys, SealError

from .weights import Scalar

__all__ = ["ProjectionKind", "SealedProjection", "project"]

ProjectionKind = Literal["gaussian", "low-frequency"]


@dataclass(frozen=True)
class SealedProjection:
    """Projects examples with the seed that came, sealed, with a message: see :func:`project`.

    Attributes
    ----------
    num_features : int
        d_1': what the model takes.
    keys : ClientKeys
        This client's keys, which open the seed.
    kind : {"gaussian", "low-frequency"}
        Which projection. All clients and who evaluates must have the same.
    """

    num_features: int
    keys: ClientKeys
    kind: ProjectionKind = "gaussian"

    def __post_init__(self) -> None:
        if self.kind not in get_args(ProjectionKind):
            known = ", ".join(get_args(ProjectionKind))
            raise ValueError(f"projection: expected the kind {known}, got {self.kind!r}")

    def probe(self, x: Tensor) -> Tensor:
        """Return one projected example of zeros.

        Raises
        ------
        ValueError
            If there are more features than inputs, or examples are no images for low frequencies.
        """
        inputs = math.prod(x.shape[1:])
        if not 1 <= self.num_features <= inputs:
            raise ValueError(
                f"projection: expected 1 ... {inputs} features, the numbers in an example, "
                f"got {self.num_features}"
            )
        if self.kind == "low-frequency":
            return low_frequencies(torch.zeros_like(x[:1]), self.num_features)
        return torch.zeros(1, self.num_features, dtype=x.dtype)

    def __call__(self, x: Tensor, config: dict[str, Scalar]) -> Tensor:
        """Project examples (n, ...) to (n, d_1').

        Raises
        ------
        SealError
            If no seed came, or none that these keys can open.
        """
        sealed = config.get(SEALED_SEED)
        if not isinstance(sealed, bytes):
            raise SealError(
                "no sealed seed came with the message; give the strategy key_server=... and "
                "enrol this client's public key there"
            )
        return project(x, self.num_features, self.keys.open(sealed), self.kind)


def project(x: Tensor, num_features: int, seed: bytes, kind: ProjectionKind = "gaussian") -> Tensor:
    """Z = X P, with independent Gaussian entries of variance 1/d_1 in P, or low frequencies.

    The paper's entries have variance 1. With 1/d_1 the features of inputs of mean 0 and variance 1
    have variance 1 again, on average, which is what a network's first weights are drawn for.

    Low frequencies are :func:`~fedntk.ntk.features.rotated_low_frequencies` of images, times
    sqrt(d_1' / d_1): of one size with the others. They keep far more of an image, and its public
    part: which frequencies are kept. See the page on privacy for what that gives away.

    Parameters
    ----------
    x : Tensor, shape (n, ...)
        Examples of d_1 numbers each.
    num_features : int
        d_1'.
    seed : bytes
        Of P, or of the rotation.
    kind : {"gaussian", "low-frequency"}
        Which projection.

    Returns
    -------
    Tensor, shape (n, d_1')
    """
    rows, number = x.flatten(1), int.from_bytes(seed, "big")
    scale = math.sqrt(num_features / rows.shape[1])
    if kind == "low-frequency":
        return rotated_low_frequencies(x, num_features, number).mul_(scale)
    return random_projection(rows, num_features, number).mul_(scale)
