"""The signal-to-noise ratio of FedAvg, and its test error on each client in theory.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 4.2, theorem 4.4:

    chi_k = sum_k' <mu_k, mu_k'> / ||mu_k||^2
    SNR_k = sqrt(chi_k) ||mu_k|| / (sigma_p sqrt(d))
    test error <= exp(-c n chi_k^2 ||mu||^4 / (K sigma_p^4 d)),   c a constant

where n is the number of examples *of one client*. The paper's text has the same letter for that of
all clients together. Only with the first reading are K clients with one signal (chi_k = K) as good
as one client that has all their examples. Signals are (K, d), one mu_k a client, none of them zero.
"""

import math

from torch import Tensor


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
