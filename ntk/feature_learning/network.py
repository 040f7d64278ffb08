"""The two-layer ReLU network of feature learning theory, for K clients, and its test error.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, sections 3.3 and 3.4. It has m filters for each sign j, on both
patches, and a second layer that is fixed, eq. (2):

    f(W, x) = F_{+1}(x) - F_{-1}(x),   F_j(x) = 1/m sum_r [relu(<w_jr, x1>) + relu(<w_jr, x2>)]

Its loss is log(1 + exp(-y f)). That is the cross-entropy of the two logits (F_{-1}, F_{+1}), with
class 0 for y = -1 and class 1 for y = +1. So full-batch FedAvg on a network with these two outputs
is the paper's algorithm, eq. (4) and (5).

Weights have shape (K, 2, m, d), the signs in the order j = -1, +1.

Section 4.2, theorem 4.4, for signals (K, d), one mu_k a client, none of them zero:

    chi_k = sum_k' <mu_k, mu_k'> / ||mu_k||^2
    SNR_k = sqrt(chi_k) ||mu_k|| / (sigma_p sqrt(d))
    test error <= exp(-c n chi_k^2 ||mu||^4 / (K sigma_p^4 d)),   c a constant

with n the number of examples *of one client*; the paper's text has the same letter for that of all.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .two_patch import TwoPatchExamples


def initial_std(dimension: int) -> float:
    """Return sigma_0, the standard deviation of the first weights: 0.1 / sqrt(d), our choice.

    Assumption 4.2 (3) wants it between n / (sigma_p d) and the smaller of 1 / (sigma_p sqrt(d)) and
    1 / ||mu||, up to constants. For the paper's experiments (n = 100, d = 1,000) there is no such
    number, and the text states none. A tenth of the upper bound keeps the first outputs near 0, as
    in stage 1 of the proof.
    """
    return 0.1 / math.sqrt(dimension)


class Evaluation(NamedTuple):
    """Mean of log(1 + exp(-y f)) and share with y f < 0 of each client's examples, (K,) each."""

    loss: Tensor
    error: Tensor


def evaluate(weights: Tensor, examples: TwoPatchExamples) -> Evaluation:
    """Evaluate each client's weights (K, 2, m, d) on its own examples."""
    margin = margins(inner_products(weights, examples), examples.labels)
    losses = torch.nn.functional.softplus(-margin)
    return Evaluation(losses.mean(1), (margin < 0).to(margin).mean(1))


def inner_products(weights: Tensor, examples: TwoPatchExamples) -> tuple[Tensor, Tensor]:
    """Return <w_kjr, mu_k> (K, 2, m) and <w_kjr, xi_ki> (K, n, 2, m)."""
    filters = weights.flatten(1, 2)  # (K, 2 m, d)
    signal = torch.einsum("kfd,kd->kf", filters, examples.client_signals)
    noise = examples.noise @ filters.transpose(1, 2)
    shape = weights.shape[1:3]
    return signal.unflatten(1, shape), noise.unflatten(2, shape)


def margins(products: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return y f of each example, (K, n)."""
    signal, noise = products
    of_signal = torch.stack([torch.relu(-signal), torch.relu(signal)], 1).mean(3)  # y = -1, +1
    both = torch.relu(noise).mean(3)
    both = both + torch.where(labels[..., None] > 0, of_signal[:, 1:], of_signal[:, :1])
    return labels * (both[..., 1] - both[..., 0])


def second_layer(dtype_of: Tensor) -> Tensor:
    """Return the fixed weights j of the second layer, shape (2,), in the dtype of a tensor."""
    return dtype_of.new_tensor([-1.0, 1.0])


def signal_similarity(signals: Tensor) -> Tensor:
    """Return chi_k, shape (K,): the number of clients' signals that client k's own is worth.

    K if all signals are the same, 1 if all are orthogonal.
    """
    products = signals @ signals.T
    if bool((products.diagonal() == 0).any()):
        raise ValueError("signals: expected none that is zero; leave out clients without a signal")
    return products.sum(1) / products.diagonal()


def effective_snr(signals: Tensor, *, noise_std: float) -> Tensor:
    """Return SNR_k of FedAvg among the clients with these signals, shape (K,)."""
    similarity = signal_similarity(signals)
    if bool((similarity < 0).any()):
        raise ValueError(
            "signals: expected signals that are the same or orthogonal, got some with a negative "
            "sum of products"
        )
    snr: Tensor = signals.norm(dim=1) / (noise_std * math.sqrt(signals.shape[1]))
    return similarity.sqrt() * snr


def generalisation_exponent(signals: Tensor, *, num_examples: int, noise_std: float) -> Tensor:
    """Return n chi_k^2 ||mu_k||^4 / (K sigma_p^4 d) of theorem 4.4, shape (K,).

    The paper does not state the constant c. For local training give one client's signal, for
    averages within a group that group's: then it is n ||mu||^4 / (sigma_p^4 d), times the number of
    clients in the group.
    """
    clients, dimension = signals.shape
    return num_examples * dimension * effective_snr(signals, noise_std=noise_std) ** 4 / clients
