"""Who is in a model that is solved from sums, and who harms it.

The model without a client is the solution of the total minus its sums, exactly. Its harm is the
rise of half the mean squared error on validation examples by its sums. Shapley values: Ghorbani and
Zou, *Data Shapley*, ICML 2019, by sampled orders with their reverses (Mitchell et al., *Sampling
Permutations for Shapley Value Estimation*, JMLR 2022).

**Harm of honest clients.** One example (z, y) more moves the solution W of A W = Z^T Y by t r^T to
first order in 1 / n, t = A^{-1} z and r = y - W^T z. On m validation examples (z_j, y_j) with
residuals r_j, the loss rises by

    a = -1/m sum_j (z_j . t) (r_j . r) + |r|^2 / (2 m) sum_j (z_j . t)^2.

Among the server's m_c validation examples of class c, a has mean mu_c and variance s_c^2, each on
the other half of the examples. An honest client with n_c examples like these has a harm with mean
at most sum_c n_c mu_c and variance sum_c n_c s_c^2 + n_c^2 s_c^2 / m_c. A client's score is its
harm minus that mean, in standard deviations; of K honest clients one has a score above
Phi^{-1}(1 - alpha / K) with probability alpha or less (union bound; sums are taken to be normal).

**Weight that it claims.** The mean of n_c examples of class c is at a distance d_c from that of m_c
validation examples, E d_c^2 = tau_c (1 / n_c + 1 / m_c) with tau_c = tr Sigma_c. It is larger for a
client that counts each example several times. So its second score is of

    F = sum_c d_c^2 / (1 / n_c + 1 / m_c) / sum_c tau_c,

1 for an honest client. Each term above has the relative variance 2 rho + kappa / min(n_c, m_c) at
most, each below (2 rho + kappa) / m_c, with rho = tr Sigma_c^2 / tau_c^2 and 1 + 2 rho + kappa =
E |z - E z|^4 / tau_c^2, means over classes. The cube root of F is near normal (Paulson, *Annals of
Mathematical Statistics* 13, 1942). A client with a high second score, or with a factor that all
whole numbers share, is removed only if it does harm. Either score has half of alpha.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..features.fixed_point import FixedPoint
from ..losses import one_hot
from ..payloads.feature_statistics import SLACK, FeatureStatistics
from .pooled_statistics import NormalEquations

Clients = Mapping[int, FeatureStatistics]  # sums by client; it may read them from disk

FEW = 10  # validation examples of a class, or examples of a client, by which nothing is judged


@dataclass(frozen=True, eq=False)
class ClientLedger:
    """What a model owes to each client."""

    equations: Callable[[FeatureStatistics], NormalEquations]  # of sums, as in the model's run
    ridge: float
    validation: NormalEquations  # of validation examples, or of clients that are held out

    def solve(self, sums: FeatureStatistics) -> Tensor:
        """Return W (q, C) as the run does; 0 if there are no examples."""
        if not sums.num_examples:
            return torch.zeros_like(self.validation.cross)
        return self.equations(sums).solve(self.ridge)

    def parts(
        self, total: FeatureStatistics, clients: Clients, removed: Collection[int] = ()
    ) -> Iterator[tuple[int, FeatureStatistics, Tensor, Tensor]]:
        """Yield each client with its sums, the model with it, and the model without it.

        Those `removed` are not in the total. Of whole numbers models have the bits of such runs.
        """
        linear = self.solve(total)
        for client, sums in clients.items():
            if client in removed:
                yield client, sums, self.solve(total + sums), linear
            else:
                yield client, sums, linear, self.solve(total - sums)

    def harm(self, with_it: Tensor, without: Tensor) -> float:
        """Return a client's harm, from the models with it and without it."""
        return self.validation.loss(with_it) - self.validation.loss(without)

    def shapley(
        self, clients: Clients, pairs: int, generator: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Estimate the clients' Shapley values (K,) and their standard errors, by sampled orders.

        A value is the mean fall of the loss when a client's sums are added to those before it. Each
        of the `pairs`, at least 2, of an order and its reverse takes 2 K solutions. Values add up
        to the fall from a model of 0.
        """
        if pairs < 2:
            raise ValueError(f"pairs: expected 2 or more orders with their reverses, got {pairs}")
        names = list(clients)
        falls = np.zeros((pairs, len(names)))
        for row in falls:
            order = generator.permutation(len(names))
            for places in (order, order[::-1]):
                first = clients[names[places[0]]]
                sums = first - first
                before = self.validation.loss(self.solve(sums))
                for place in places:
                    sums = sums + clients[names[place]]
                    after = self.validation.loss(self.solve(sums))
                    row[place] += (before - after) / 2
                    before = after
        return falls.mean(0), falls.std(0, ddof=1) / np.sqrt(pairs)


@dataclass(frozen=True, eq=False)
class ValidationExamples:
    """Examples of the server, by which harm is judged: rows (m, q) as in the equations, labels."""

    rows: Tensor
    labels: Tensor
    num_classes: int
    fixed_point: FixedPoint | None  # of clients' sums

    def harms(self, equations: NormalEquations, ridge: float) -> NDArray[np.float64]:
        """Return a (m,): by how much one more example like each raises the loss on the others."""
        rows = self.rows.double()
        targets = one_hot(self.labels, self.num_classes).double() - 1 / self.num_classes
        residuals = targets - rows @ equations.solve(ridge)
        moves = replace(equations, cross=rows.T).solve(ridge)  # t of each (q, m)
        harms = np.empty(len(rows))
        for half in (0, 1):
            fold, other = slice(half, None, 2), slice(1 - half, None, 2)
            moved = rows[other] @ moves[:, fold]
            gradient = -(moved.T @ residuals[other]) / len(moved)
            first = (gradient * residuals[fold]).sum(1)
            second = moved.square().mean(0) * residuals[fold].square().sum(1) / 2
            harms[fold] = (first + second).numpy()
        return harms

    def scores(
        self,
        harms: NDArray[np.float64],
        counts: NDArray[np.int64],
        equations: NormalEquations,
        ridge: float,
    ) -> NDArray[np.float64]:
        """Return the scores (K,) of clients with these harms (K,) and classes' counts (K, C).

        A class with fewer than two validation examples takes mean and variance of all.
        """
        of_examples, labels = self.harms(equations, ridge), self.labels.numpy()
        groups = [of_examples[labels == label] for label in range(self.num_classes)]
        groups = [group if len(group) > 1 else of_examples for group in groups]
        mean, variance, m = np.array([(g.mean(), g.var(ddof=1), len(g)) for g in groups]).T
        n = counts.astype(np.float64)
        return np.asarray((harms - n @ mean) / np.sqrt(n @ variance + n**2 @ (variance / m)))

    def weight_score(self, sums: FeatureStatistics) -> float:
        """Return the second score; a class without two different validation examples has none."""
        parts = sums.counts, sums.class_sums.ravel(), sums.gram
        if self.fixed_point is not None:  # of few examples, some may be there twice by chance
            factor = np.gcd.reduce([*map(np.gcd.reduce, parts)])
            if factor > 1 and factor * FEW <= sums.num_examples:
                return np.inf
        means, m, tau, rho, fourth = self._classes
        if not (usable := (sums.counts > 0) & (tau > 0) & (m >= FEW)).any():
            return -np.inf
        n, m, tau = sums.counts[usable].astype(np.float64), m[usable], tau[usable]
        differences = sums.class_sums[usable] / n[:, None] - means[usable, : sums.width]
        squares = np.square(differences).sum(1)
        above = 2 * rho + (fourth - 1 - 2 * rho) / np.minimum(n, m)
        a, b = (tau**2 @ part / (9 * tau.sum() ** 2) for part in (above, (fourth - 1) / m))
        root = np.cbrt(tau.sum() / max(squares @ (n * m / (n + m)), 1e-9 * tau.sum()))
        return float((1 - b - (1 - a) * root) / np.sqrt(b + a * root**2))

    @cached_property
    def _classes(self) -> tuple[Any, ...]:
        """Means (C, p or p + 1), m (C,) and tau (C,) of the classes; rho and 1 + 2 rho + kappa."""
        fixed, labels = self.fixed_point, self.labels.numpy()
        rows = self.rows if fixed is None else fixed(self.rows[:, : len(fixed.step)])
        x, m = rows.double().numpy(), np.bincount(labels, minlength=self.num_classes) * 1.0
        means, (tau, rho, fourth) = np.zeros((len(m), x.shape[1])), np.zeros((3, len(m)))
        for k in np.flatnonzero(m > 1):
            members, free = x[labels == k], m[k] - 1
            means[k] = members.mean(0)
            products = (members - means[k]) @ (members - means[k]).T * (m[k] / free)
            tau[k] = products.trace() / m[k]
            squares = np.square(products / (tau[k] or 1))
            fourth[k] = squares.trace() / m[k]
            rho[k] = (squares.sum() / m[k] - fourth[k]) / free - 1 / free**2
        shares = m * (tau > 0) / np.maximum(m @ (tau > 0), 1)
        shape = np.maximum(shares @ rho, 1 / x.shape[1])
        return means, m, tau, shape, np.maximum(shares @ fourth, 1 + 2 * shape)


def are_possible(sums: FeatureStatistics) -> bool:
    """Whether any examples can have such sums: [Z Y]^T [Z Y] has no negative eigenvalue."""
    gram, cross = torch.from_numpy(sums.matrix()), torch.from_numpy(sums.class_sums).double()
    counts = torch.from_numpy(sums.counts * sums.weights).diag()
    joint = torch.cat([torch.cat([gram, cross]), torch.cat([cross.T, counts])], 1)
    scale = joint.diagonal().sqrt()
    scale[scale == 0] = 1.0
    joint /= scale
    joint /= scale[:, None]
    joint.diagonal().add_(SLACK)  # for rounding
    return not int(torch.linalg.cholesky_ex(joint).info)


def find_harmful(
    ledger: ClientLedger, clients: Clients, examples: ValidationExamples, level: float
) -> dict[int, float]:
    """Return clients whose harm or claimed weight is beyond what honest ones show, with scores.

    `level` is alpha. All are judged by the model of those kept, again after each removal, and by
    weight first. When no more are removed, the one with the least score comes back, once, if that
    is at most Phi^{-1}(1 - alpha / 2): beside others it had seemed to do harm. ValueError if nobody
    is left.
    """
    numbers = torch.tensor([2 * max(1, len(clients)), 2], dtype=torch.float64)
    highest, returning = torch.special.ndtri(1 - level / numbers).tolist()
    removed, returned = set[int](), set[int]()
    while len(removed) < len(clients):
        total = FeatureStatistics.join(clients[k] for k in clients if k not in removed)
        harms, counts, weights = list[float](), list[NDArray[np.int64]](), dict[int, float]()
        for k, sums, *models in ledger.parts(total, clients, removed):
            harms.append(ledger.harm(*models))
            counts.append(sums.counts)
            weights[k] = examples.weight_score(sums) if harms[-1] > 0 else -np.inf
        equations = ledger.equations(total)
        of_harms = examples.scores(np.array(harms), np.array(counts), equations, ledger.ridge)
        scores = {k: max(weights[k], score) for k, score in zip(weights, of_harms, strict=True)}
        remaining = scores.keys() - removed
        if worse := {k for k in remaining if weights[k] > highest} or {
            k for k in remaining if scores[k] > highest
        }:
            removed |= worse
            continue
        back = [k for k in removed - returned if scores[k] <= returning]
        if not back:
            return {k: scores[k] for k in sorted(removed)}
        best = min(back, key=scores.__getitem__)
        removed.remove(best)
        returned.add(best)
    raise ValueError(
        "all clients are harmful on the validation examples; expected examples like the clients'"
    )
