"""The random projection of a client's inputs, whose seed only clients and key server know.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2:
Z = X P with P of shape (d_1, d_1'), made from a seed that the key server encrypts for each client.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedntk.ntk import random_projection
from fedntk.trust import SEALED_SEED, ClientKeys, SealError

from .weights import Scalar

__all__ = ["SealedProjection", "project"]


@dataclass(frozen=True)
class SealedProjection:
    """Projects examples with the seed that came, sealed, with a message.

    P is as in :func:`project`. Examples are flattened first.

    Attributes
    ----------
    num_features : int
        d_1': what the model takes.
    keys : ClientKeys
        This client's keys, which open the seed.
    """

    num_features: int
    keys: ClientKeys

    def probe(self, x: Tensor) -> Tensor:
        """Return one projected example of zeros.

        Raises
        ------
        ValueError
            If there are more features than inputs.
        """
        inputs = math.prod(x.shape[1:])
        if not 1 <= self.num_features <= inputs:
            raise ValueError(
                f"projection: expected 1 ... {inputs} features, the numbers in an example, "
                f"got {self.num_features}"
            )
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
        return project(x, self.num_features, self.keys.open(sealed))


def project(x: Tensor, num_features: int, seed: bytes) -> Tensor:
    """Z = X P, with independent Gaussian entries of variance 1/d_1 in P.

    The paper's entries have variance 1. With 1/d_1 the features of inputs of mean 0 and variance 1
    have variance 1 again, on average, which is what a network's first weights are drawn for.

    Parameters
    ----------
    x : Tensor, shape (n, ...)
        Examples of d_1 numbers each.
    num_features : int
        d_1'.
    seed : bytes
        Of P.

    Returns
    -------
    Tensor, shape (n, d_1')
    """
    rows = x.flatten(1)
    scale = math.sqrt(num_features / rows.shape[1])
    return random_projection(rows, num_features, int.from_bytes(seed, "big")).mul_(scale)
