"""FedCOF: ridge regression from class means, whose spread over clients gives the covariances.

Source: Goswami et al., *Covariances for Free: Exploiting Mean Distributions for Training-free
Federated Learning*, NeurIPS 2025, arXiv 2412.14326; read were the abstract and the authors'
program. Clients send what they send in FedNCM. Of n_kc examples of class c client k has the mean
m_kc. With K_c clients that have the class, its n_c examples, and their mean m_c,

    S_c = sum over k of n_kc (m_kc - m_c)(m_kc - m_c)^T / (K_c - 1) + gamma I

estimates the class's covariance: without bias, but for gamma, if its examples were dealt to the
clients at random. With the mean m of all N examples

    G = sum over c of (n_c - 1) S_c + N m m^T,  w_c = G^{-1} n_c m_c,

and w_c is divided by its norm. G lacks the scatter of the m_c around m: the paper finds a better
classifier without it. As gamma grows this becomes FedNCM. Here gamma is `shrinkage` times the mean
square of the m_c's features; if all n_c are 1, it takes the place of gamma (n_c - 1). A class with
one client has gamma I, as in the program, and one that nobody has gets weights of 0.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk.convex.pooled_statistics import solve_ridge
from fedntk.ntk.options import option
from fedntk.ntk.payloads.prototypes import Prototypes

from .closed_form import ClosedFormStrategy, Layer, unit_rows


def deviations(clients: Sequence[Prototypes]) -> NDArray[np.float64]:
    """Return D (m, p) with D^T D = sum over c of (n_c - 1) S_c, for gamma = 0."""
    means = np.stack([client.means for client in clients]).astype(np.float64)  # (K, C, p)
    counts = np.stack([client.counts for client in clients]).astype(np.float64)
    total, num_clients = counts.sum(0), (counts > 0).sum(0)
    centre = (counts[..., None] * means).sum(0) / np.maximum(total, 1)[:, None]
    weight = counts * np.maximum(total - 1, 0) / np.maximum(num_clients - 1, 1)
    there = (counts > 0) & (num_clients > 1)
    rows: NDArray[np.float64] = (np.sqrt(weight)[..., None] * (means - centre))[there]
    return rows


class FedCOF(ClosedFormStrategy):
    """FedCOF (Goswami et al. 2025). Clients are :class:`~fedntk.clients.ClosedFormClient`."""

    statistics = Prototypes

    shrinkage: float = option(
        "gamma over the mean square of a feature of the class means", default=0.1, above=0
    )

    def last_layer(self, sums: Sequence[Prototypes]) -> Layer:
        """Return weights of norm 1 (C, p), and zeros for a bias."""
        pooled, rows = Prototypes.pooled(sums), torch.from_numpy(deviations(sums))
        means, counts = pooled.means.astype(np.float64), pooled.counts
        total, of_class = int(counts.sum()), torch.from_numpy(counts[:, None] * means)
        mean = of_class.sum(0) / total
        square = float(counts @ np.square(means).mean(1)) / total
        scale = square * max(float(np.maximum(counts - 1, 0).sum()), 1.0)
        gram = rows.T @ rows + total * mean.outer(mean)
        return unit_rows(solve_ridge(gram, of_class.T, self.shrinkage, scale).T.numpy())
