"""The two-layer ReLU network of feature learning theory, for the weights of K clients at once.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, sections 3.3 and 3.4. It has m filters for each sign j, on both
patches, and a second layer that is fixed, eq. (2):

    f(W, x) = F_{+1}(x) - F_{-1}(x),   F_j(x) = 1/m sum_r [relu(<w_jr, x1>) + relu(<w_jr, x2>)]

Its loss is log(1 + exp(-y f)). That is the cross-entropy of the two logits (F_{-1}, F_{+1}), with
class 0 for y = -1 and class 1 for y = +1. So full-batch FedAvg on a network with these two outputs
is the paper's algorithm, eq. (4) and (5).

Weights have shape (K, 2, m, d), the signs in the order j = -1, +1.
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
    found = margins(inner_products(weights, examples), examples.labels)
    losses = torch.nn.functional.softplus(-found)
    return Evaluation(losses.mean(1), (found < 0).to(found).mean(1))


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
