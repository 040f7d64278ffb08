"""Full-batch FedAvg on two-patch data, all clients at once: its weights after each round.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, eq. (4) and (5), appendix C.4.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .coefficients import increments, squared_norms
from .network import inner_products, second_layer
from .two_patch import TwoPatchExamples

__all__ = ["mixing_matrix", "train"]


def mixing_matrix(groups: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the shares of averages, shape (K, K): all clients of one group, with equal weight.

    Groups (K,) that are all the same give FedAvg, all different local training, those of the
    signals the weighted FedAvg of appendix C.4.

    Examples
    --------
    >>> mixing_matrix(torch.tensor([0, 1, 1]))
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 0.5000, 0.5000],
            [0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    same = (groups[:, None] == groups).to(dtype)
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

    Gradient steps of a round stay in the span of the client's own n patches, so that they need only
    the products of these, (n, n) instead of (n, d). The weights are those of plain gradient
    descent, up to rounding. First weights (2, m, d) are those of all clients; :func:`mixing_matrix`
    gives (K, K).
    """
    clients = len(examples.noise)
    if mixing.shape != (clients, clients) or bool(((mixing.sum(1) - 1).abs() > 1e-5).any()):
        raise ValueError(
            f"mixing: expected shape {(clients, clients)} with rows that add up to 1, got shape "
            f"{tuple(mixing.shape)}; mixing_matrix makes one"
        )
    mu, xi = examples.client_signals, examples.noise
    unit_noise = xi / squared_norms(xi)
    within = xi @ unit_noise.transpose(1, 2)  # <xi_i, xi_i'> / ||xi_i'||^2, (K, n, n)
    signs = second_layer(mu)[:, None]
    weights = initial.expand(len(xi), *initial.shape)
    for _ in range(rounds):
        signal, noise = inner_products(weights, examples)
        gammas, rhos = torch.zeros_like(signal), torch.zeros_like(noise)
        for _ in range(local_steps):
            gamma, rho = increments((signal, noise), examples, learning_rate)
            signal = signal + signs * gamma
            noise = noise + (within @ rho.flatten(2)).view_as(noise)
            gammas, rhos = gammas + gamma, rhos + rho
        learned = (signs * gammas)[..., None] * (mu / squared_norms(mu))[:, None, None]
        memorised = rhos.flatten(2).transpose(1, 2) @ unit_noise
        weights = weights + learned + memorised.view_as(weights)
        weights = torch.tensordot(mixing.to(weights), weights, 1)
        yield weights
