"""What the decentralised methods tell their clients, and the mixing matrix W of their averages.

W_ij > 0 if i and j are neighbours or the same, and rows sum to one. With the rule of Metropolis and
Hastings columns sum to one as well, on any graph: repeated averaging then leads to the equal mean
of all clients. Source: Xiao, Boyd and Lall, *A Scheme for Robust Distributed Sensor Fusion Based on
Average Consensus*, IPSN 2005, section 3.
"""

import math
from collections.abc import Sequence
from typing import Literal

from ..options import Declared, option

__all__ = [
    "DFedAvgOptions",
    "DisPFLOptions",
    "GossipOptions",
    "MixingMatrix",
    "RelayOptions",
    "mixing_row",
]

MixingMatrix = Literal["examples", "equal", "metropolis"]


def mixing_row(
    mixing: MixingMatrix, num_examples: Sequence[int], degrees: Sequence[int] = ()
) -> list[float]:
    """Return the shares of a client and of the neighbours that it heard, in this order.

    Parameters
    ----------
    mixing : {"examples", "equal", "metropolis"}
        Rule: see :class:`GossipOptions`.
    num_examples : sequence of int
        Number of examples of each.
    degrees : sequence of int
        Number of neighbours of each, for ``"metropolis"``.
    """
    if mixing == "metropolis":
        each = [1 / (1 + max(degrees[0], degree)) for degree in degrees[1:]]
        return [1 - sum(each), *each]
    counts = num_examples if mixing == "examples" else [1] * len(num_examples)
    return [count / sum(counts) for count in counts]


class RelayOptions(Declared):
    """What all clients with neighbours are told."""

    same_weights: bool = option(
        "all clients begin with the same weights; else each with its own, drawn as He et al. 2015",
        default=True,
        to_clients=True,
    )


class GossipOptions(RelayOptions):
    """How clients train by SGD and average with their neighbours."""

    mixing: MixingMatrix = option(
        "a client and its neighbours count by examples, each the same (doubly stochastic if all "
        "have as many neighbours), or by the rule of Metropolis and Hastings, W_ij = "
        "1 / (1 + max(d_i, d_j)) of the numbers of neighbours d (doubly stochastic on any graph); "
        "the share of a neighbour that is not heard goes to the others, or to the client itself",
        default="examples",
        to_clients=True,
    )
    learning_rate_factor: float = option(
        "in round k the learning rate is multiplied by factor^(k - 1)",
        default=1.0,
        above=0,
        to_clients=True,
    )


class DFedAvgOptions(GossipOptions):
    """How clients of DFedAvg average."""

    gossip_steps: int = option(
        "averages in a round, an exchange each: W^Q for W; 1 in the paper",
        default=1,
        at_least=1,
        to_clients=True,
    )


class DisPFLOptions(GossipOptions):
    """What the masks of DisPFL are like.

    Examples
    --------
    >>> options = DisPFLOptions(annealing_rounds=100)
    >>> [round(options.pruned_share(number), 3) for number in (1, 51, 101)]
    [0.5, 0.25, 0.0]
    """

    sparsity: float = option(
        "share of the network that a client does not have",
        default=0.5,
        at_least=0,
        below=1,
        to_clients=True,
    )
    prune_share: float = option(
        "alpha: share of a mask that changes in the first round; 0: none ever",
        default=0.5,
        at_least=0,
        at_most=1,
        to_clients=True,
    )
    annealing_rounds: int = option(
        "T: after so many rounds masks stay; set it to the rounds of the run",
        default=500,
        at_least=1,
        to_clients=True,
    )
    same_masks: bool = option(
        "all clients begin with the same mask", default=True, to_clients=True
    )
    mixing: MixingMatrix = option(
        "how clients count in the average of those that have a number; equal in the authors' "
        "program",
        default="equal",
        to_clients=True,
    )
    seed: int = option(
        "seed of the sampling of clients, and of the mask with which all begin",
        default=0,
        at_least=0,
        to_clients=True,
    )

    def pruned_share(self, server_round: int) -> float:
        """Return the share of a mask that is pruned in a round."""
        done = min(server_round - 1, self.annealing_rounds) / self.annealing_rounds
        return self.prune_share / 2 * (1 + math.cos(math.pi * done))
