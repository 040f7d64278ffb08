"""Similarity of clients by their prototypes, and the weights that follow from it.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 6.2:

    p_k = concat over the classes j of p_k^j
    s_kk' = exp(cos(p_k, p_k') / tau) / sum over i of exp(cos(p_k, p_i) / tau)
    W_k = sum over k' of s_kk' W_k'
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .payloads.prototypes import Prototypes

Absent = Literal["zero", "common"]
Matrix = NDArray[np.float64]


def cosine_similarities(
    prototypes: Sequence[Prototypes],
    others: Sequence[Prototypes] | None = None,
    *,
    absent: Absent = "zero",
) -> Matrix:
    """Cosine similarity (K, L) of clients' prototypes with those of others, by default themselves.

    They are rounded to 12 places, so equal prototypes are at 1 for any order of summation, and 0 if
    all features are zero or no class is common. A class that a client lacks is zero, as in the
    paper; with ``absent="common"`` a pair of clients is compared over the classes that both have.
    """
    if absent not in ("zero", "common"):
        raise ValueError(f"absent: expected 'zero' or 'common', got {absent!r}")
    means, present = _stack(prototypes)
    other_means, other_present = (means, present) if others is None else _stack(others)
    products = np.einsum("kcp,lcp->kl", means, other_means, optimize=True)
    by_class, other_by_class = ((a**2).sum(2) for a in (means, other_means))  # squared norms (K, C)
    if absent == "zero":
        norms = np.outer(by_class.sum(1), other_by_class.sum(1))
    else:  # over the classes that both have; elsewhere the products are zero already
        norms = (by_class @ other_present.T) * (present @ other_by_class.T)
    divisors = np.sqrt(norms)
    quotients = np.divide(products, divisors, out=np.zeros_like(products), where=divisors > 0)
    cosines: Matrix = np.clip(quotients.round(12), -1.0, 1.0)
    if others is None:
        np.fill_diagonal(cosines, 1.0)
    return cosines


def _stack(prototypes: Sequence[Prototypes]) -> tuple[Matrix, Matrix]:
    """Means (K, C, p) and which classes are present (K, C)."""
    means = np.stack([client.means for client in prototypes]).astype(np.float64)
    return means, np.stack([client.present for client in prototypes]).astype(np.float64)


def similarity_weights(
    similarities: Matrix, *, temperature: float = 1.0, examples: Sequence[int] | None = None
) -> Matrix:
    """Softmax of cosine similarities (K, L), row by row.

    An infinite temperature tau gives equal weights. `examples`, which the paper lacks, weight the L
    clients as well: with equal similarities the result is FedAvg's.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: expected more than 0, got {temperature}")
    with np.errstate(over="ignore"):  # of a tiny temperature, where all others' weights are 0
        logits = (similarities - similarities.max(1, keepdims=True)) / temperature
    weights = np.exp(logits)
    if examples is not None:
        weights = weights * np.asarray(examples, np.float64)
    shares: Matrix = weights / weights.sum(1, keepdims=True)
    return shares
