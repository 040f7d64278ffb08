"""Full-batch FedAvg on two-patch data, and the signal and noise coefficients of its weights.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, eq. (4) and (5), section 4.1, lemma 4.1, and appendix C.4. All
clients start from the same weights w^0. From then on, eq. (6),

    w_kjr = w^0_jr + sum_c j gamma_kcjr mu_c / ||mu_c||^2
                   + sum_k'i rho_kk'ijr xi_k'i / ||xi_k'i||^2

with one gamma for each *different* signal c: eq. (7) has one for each client, which would count a
signal that clients share several times. Eq. (6) has no factor j before gamma, but eq. (4) and (11)
need it: for j = -1 the gradient points along -mu while gamma grows.

A gradient step of client k changes only its own coefficients. With l' = -1 / (1 + exp(y f)):

    gamma_kc(k)jr -= eta / (n m) sum_i l'_ki relu'(<w_kjr, y_ki mu_k>) ||mu_k||^2         eq. (11)
    rho_kkijr     -= eta / (n m) l'_ki relu'(<w_kjr, xi_ki>) ||xi_ki||^2 j y_ki     eq. (12), (13)

psi is rho for y_ki = j, and it grows; phi is rho for y_ki = -j, and it falls. Averaging weights
averages coefficients, eq. (14).

All clients have n examples. Shapes: K clients, C signals, 2 signs in the order j = -1, +1, m
filters; first weights (2, m, d).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .network import inner_products, margins, second_layer
from .two_patch import TwoPatchExamples


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients of all clients' weights in signals and noise."""

    signal: Tensor  # gamma of client k in signal c: (K, C, 2, m)
    noise: Tensor  # rho of client k in the noise of client k' and its example i: (K, K, n, 2, m)

    @classmethod
    def zeros(cls, examples: TwoPatchExamples, width: int) -> Self:
        """Return those of the first weights, eq. (10); `width` is m."""
        clients, n, _ = examples.noise.shape
        signal = examples.noise.new_zeros(clients, len(examples.signals), 2, width)
        return cls(signal, examples.noise.new_zeros(clients, clients, n, 2, width))

    def weights(self, initial: Tensor, examples: TwoPatchExamples) -> Tensor:
        """Return the weights (K, 2, m, d) with these coefficients, eq. (8)."""
        mu, xi = examples.signals, examples.noise
        learned = torch.einsum("kcjr,cd->kjrd", self.signal, mu / _squared_norms(mu))
        memorised = torch.einsum("klijr,lid->kjrd", self.noise, xi / _squared_norms(xi))
        return initial + second_layer(mu)[:, None, None] * learned + memorised

    def mixed(self, mixing: Tensor) -> "Coefficients":
        """Return those of averaged weights, eq. (14); row k of (K, K) has client k's shares."""
        mixing = mixing.to(self.signal)
        return Coefficients(*(torch.tensordot(mixing, c, 1) for c in (self.signal, self.noise)))


def coefficient_step(
    coefficients: Coefficients, initial: Tensor, examples: TwoPatchExamples, *, learning_rate: float
) -> Coefficients:
    """Take one gradient step of every client, by the rules (11) to (13)."""
    products = inner_products(coefficients.weights(initial, examples), examples)
    gamma, rho = _increments(products, examples, learning_rate)
    signal, noise = coefficients.signal.clone(), coefficients.noise.clone()
    models = torch.arange(len(signal))
    signal[models, examples.groups] += gamma
    noise[models, models] += rho
    return Coefficients(signal, noise)


def decompose(weights: Tensor, initial: Tensor, examples: TwoPatchExamples) -> Coefficients:
    """Find the coefficients of weights (K, 2, m, d), by projection; best in float64."""
    clients, n, d = examples.noise.shape
    room = d - len(examples.signals)
    if clients * n > room:
        raise ValueError(
            f"examples: expected at most d - C = {room} noise patches, got {clients * n}: their "
            "coefficients are not unique; take fewer examples or a larger d, or follow them from "
            "the first weights with coefficient_step"
        )
    change = weights - initial
    signal = torch.einsum("kjrd,cd->kcjr", change, examples.signals)
    noise = examples.noise.reshape(-1, d)
    targets = noise @ change.reshape(-1, d).T
    solved = torch.linalg.solve(noise @ noise.T, targets) * _squared_norms(noise)
    by_client = solved.reshape(clients, n, *change.shape[:3]).permute(2, 0, 1, 3, 4)
    return Coefficients(signal * second_layer(change)[:, None], by_client)


def mixing_matrix(groups: Tensor) -> Tensor:
    """Return the shares (K, K), float64, of averages over each group's clients with equal weight.

    Groups (K,) that are all the same give FedAvg, all different local training, those of the
    signals the weighted FedAvg of appendix C.4.
    """
    same = (groups[:, None] == groups).double()
    return same / same.sum(1, keepdim=True)


def train(
    examples: TwoPatchExamples,
    initial: Tensor,
    mixing: Tensor,
    *,
    rounds: int,
    local_steps: int,
    learning_rate: float,
) -> Iterator[Tensor]:
    """Yield all clients' weights after each round, shape (K, 2, m, d): full-batch FedAvg.

    All clients begin with the first weights (2, m, d); :func:`mixing_matrix` gives (K, K). Gradient
    steps of a round stay in the span of the client's own n patches, so that they need only the
    products of these, (n, n) instead of (n, d).
    """
    clients = len(examples.noise)
    if mixing.shape != (clients, clients) or bool(((mixing.sum(1) - 1).abs() > 1e-5).any()):
        raise ValueError(
            f"mixing: expected shape {(clients, clients)} with rows that add up to 1, got shape "
            f"{tuple(mixing.shape)}; mixing_matrix makes one"
        )
    mu, xi = examples.client_signals, examples.noise
    unit_noise = xi / _squared_norms(xi)
    within = xi @ unit_noise.transpose(1, 2)  # <xi_i, xi_i'> / ||xi_i'||^2, (K, n, n)
    signs = second_layer(mu)[:, None]
    weights = initial.expand(len(xi), *initial.shape)
    for _ in range(rounds):
        signal, noise = inner_products(weights, examples)
        gammas, rhos = torch.zeros_like(signal), torch.zeros_like(noise)
        for _ in range(local_steps):
            gamma, rho = _increments((signal, noise), examples, learning_rate)
            signal = signal + signs * gamma
            noise = noise + (within @ rho.flatten(2)).view_as(noise)
            gammas, rhos = gammas + gamma, rhos + rho
        learned = (signs * gammas)[..., None] * (mu / _squared_norms(mu))[:, None, None]
        memorised = rhos.flatten(2).transpose(1, 2) @ unit_noise
        weights = weights + learned + memorised.view_as(weights)
        weights = torch.tensordot(mixing.to(weights), weights, 1)
        yield weights


def _increments(
    products: tuple[Tensor, Tensor], examples: TwoPatchExamples, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Return a step's increments of the clients' own gamma (K, 2, m) and rho (K, n, 2, m)."""
    signal, noise = products
    labels = examples.labels
    n, width = labels.shape[1], signal.shape[2]
    slopes = learning_rate / (n * width) * torch.sigmoid(-margins(products, labels))  # -l' > 0
    right, left = (slopes * (labels == sign) for sign in (1, -1))
    active = (signal > 0) * right.sum(1)[:, None, None] + (signal < 0) * left.sum(1)[:, None, None]
    gamma = active * _squared_norms(examples.client_signals)[..., None]
    scale = slopes * labels * _squared_norms(examples.noise)[..., 0]
    rho = (noise > 0) * (scale[..., None] * second_layer(noise))[..., None]
    return gamma, rho


def _squared_norms(vectors: Tensor) -> Tensor:
    """Return ||v||^2 of vectors (..., d), shape (..., 1)."""
    return vectors.square().sum(-1, keepdim=True)
