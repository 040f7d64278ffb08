"""DisPFL: each client trains a sparse model of its own, and averages where neighbours have weights.

Source: Dai, Shen, He, Tian and Tao, *DisPFL: Towards Communication-Efficient Personalized Federated
Learning via Decentralized Sparse Training*, ICML 2022. In round k client i has weights w_i, the
mask m_i that they were trained in, and a next mask m_i'. With its neighbours and itself as j,

    w_i <- m_i' * (sum over j of w_j) / (sum over j of m_j)      coordinate by coordinate
    w_i <- local epochs of SGD in m_i';  m_i <- m_i'
    m_i' <- m_i without its smallest weights, and as many with the largest gradients

Layers' densities are those of Erdos-Renyi kernels. The share that is pruned goes down by a cosine:
alpha / 2 (1 + cos(pi (k - 1) / T)).

**What is whose.** That weights are sparse, that masks are personal, and that they are searched
for by decentralised sparse training, is the paper's abstract. The three lines above, the densities,
the cosine, that all clients begin with the same mask, and that masks regrow by the gradients of one
batch, follow the authors' program. This package's reading: biases and norms are always whole (there
nearly always); the shares of other mixing matrices weight both sums; gradients are not clipped;
the learning rate's factor is 1 unless it is set; the mean model is over those that have a
coordinate.

One exchange a round: clients get what the neighbours sent at the end of the round before. Where
some did not take part then, there is one more, ``weights``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from .gossip import GossipStrategy
from .relay import Step
from .topology import MixingMatrix

__all__ = ["DisPFL"]


class DisPFL(GossipStrategy):
    """DisPFL (Dai et al. 2022). Clients are :class:`~fedntk.clients.DisPFLClient`.

    Each client is judged by its own model. The global arrays are the mean over the clients of each
    number that is not zero.

    Parameters
    ----------
    sparsity : float
        Share of the network's numbers that a client does not have: 0.5 in the paper.
    prune_share : float
        alpha: share of a mask that changes in the first round. 0: masks stay as they are drawn.
    annealing_rounds : int
        T: after so many rounds masks stay.
    same_masks : bool
        Whether all clients begin with the same mask.
    mixing : {"equal", "examples", "metropolis"}
        Of :class:`~fedntk.strategies.GossipStrategy`; ``"equal"`` is the authors'.
    **options
        Of :class:`~fedntk.strategies.GossipStrategy` (learning_rate_factor, same_weights), of
        :class:`~fedntk.strategies.RelayStrategy` (topology, collect), of
        :class:`~fedntk.strategies.BaseStrategy` (seed, min_completed) and of Flower's FedAvg.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> strategy = DisPFL(annealing_rounds=100)
    >>> [round(strategy.annealed(number), 3) for number in (1, 51, 101)]
    [0.5, 0.25, 0.0]
    """

    client = "DisPFLClient"

    def __init__(
        self,
        *,
        sparsity: float = 0.5,
        prune_share: float = 0.5,
        annealing_rounds: int = 500,
        same_masks: bool = True,
        mixing: MixingMatrix = "equal",
        **options: Any,
    ) -> None:
        super().__init__(mixing=mixing, **options)
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity: expected 0 <= sparsity < 1, got {sparsity}")
        if not 0 <= prune_share <= 1:
            raise ValueError(f"prune_share: expected 0 to 1, got {prune_share}")
        if annealing_rounds < 1:
            raise ValueError(f"annealing_rounds: expected at least 1, got {annealing_rounds}")
        self.sparsity, self.prune_share = sparsity, prune_share
        self.annealing_rounds, self.same_masks = annealing_rounds, same_masks

    def settings(self) -> dict[str, Any]:
        """Add what masks are like."""
        return {
            **super().settings(),
            "sparsity": self.sparsity,
            "prune_share": self.prune_share,
            "annealing_rounds": self.annealing_rounds,
            "same_masks": self.same_masks,
        }

    def steps(self, *, first: bool) -> Sequence[Step]:
        """Return the exchange, after one of the weights where these are not there yet."""
        return [Step("weights"), Step("step")] if first else [Step("step")]

    def annealed(self, server_round: int) -> float:
        """Return the share of a mask that is pruned in a round."""
        done = min(server_round - 1, self.annealing_rounds) / self.annealing_rounds
        return self.prune_share / 2 * (1 + math.cos(math.pi * done))

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add what masks are like in this round."""
        super().prepare_config(config, server_round)
        config["sparsity"], config["prune-share"] = self.sparsity, self.annealed(server_round)
        config["same-masks"], config["mask-seed"] = self.same_masks, self.seed

    def mean_of(self, models: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        """Mean of each number over the models in which it is not zero."""
        mean = {}
        for name in models[0]:
            each = np.stack([np.asarray(model[name], np.float64) for model in models])
            holders = np.maximum(np.count_nonzero(each, axis=0), 1)
            mean[name] = np.asarray(each.sum(axis=0) / holders)
        return mean
