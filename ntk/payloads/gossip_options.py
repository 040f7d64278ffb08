"""What the decentralised methods tell their clients, and the mixing matrix W of their averages.

Rows of W sum to one. With the rule of Metropolis and Hastings columns do as well, on any graph:
repeated averaging then leads to the equal mean of all clients. Source: Xiao, Boyd and Lall, *A
Scheme for Robust Distributed Sensor Fusion Based on Average Consensus*, IPSN 2005, section 3.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from ..evolution.gradient_flow import FlowOptions, GradientFlow, Kernel
from ..losses import Loss
from ..options import Declared, shared
from ..robust_averages import Defence
from .compression import CompressionOptions, check_compression

TO, FROM, ALL = "to-", "from-", "to-neighbours"  # names of records with parcels
REFUSED = "parcels-rejected"  # a metric: what a client got and could not use
MixingMatrix = Literal["examples", "equal", "metropolis"]
_FLOW, _COMPRESSION = FlowOptions.options(), CompressionOptions.options()


def mixing_row(
    mixing: MixingMatrix, num_examples: Sequence[int], degrees: Sequence[int] = ()
) -> list[float]:
    """Return the shares of a client and then of the neighbours that it heard.

    `degrees`, their numbers of neighbours, are for ``"metropolis"``.
    """
    if mixing == "metropolis":
        weights = [1 / (1 + max(degrees[0], degree)) for degree in degrees[1:]]
        return [1 - sum(weights), *weights]
    counts = num_examples if mixing == "examples" else [1] * len(num_examples)
    return [count / sum(counts) for count in counts]


class GossipOptions(Declared):
    """How clients train by SGD and average with their neighbours."""

    same_weights: bool = shared(
        "all clients begin with the same weights; else each with its own, drawn as He et al. 2015",
        default=True,
    )
    mixing: MixingMatrix = shared(
        "a client and its neighbours count by examples, each the same (doubly stochastic if all "
        "have as many neighbours), or by the rule of Metropolis and Hastings, W_ij = "
        "1 / (1 + max(d_i, d_j)) of the numbers of neighbours d (doubly stochastic on any graph); "
        "the share of a neighbour that is not heard goes to the others, or to the client itself",
        default="examples",
    )
    learning_rate_factor: float = shared(
        "in round k the learning rate is multiplied by factor^(k - 1)", default=1.0, above=0
    )


_GOSSIP = GossipOptions.options()


class DFedAvgOptions(Declared):
    """How clients of DFedAvg average."""

    same_weights: bool = _GOSSIP["same_weights"].field()
    mixing: MixingMatrix = _GOSSIP["mixing"].field()
    learning_rate_factor: float = _GOSSIP["learning_rate_factor"].field()
    gossip_steps: int = shared(
        "averages in a round, an exchange each: W^Q for W; 1 in the paper", default=1, at_least=1
    )


class DisPFLOptions(Declared):
    """What the masks of DisPFL are like.

    Examples
    --------
    >>> options = DisPFLOptions(annealing_rounds=100)
    >>> [round(options.pruned_share(number), 3) for number in (1, 51, 101)]
    [0.5, 0.25, 0.0]
    """

    same_weights: bool = _GOSSIP["same_weights"].field()
    learning_rate_factor: float = _GOSSIP["learning_rate_factor"].field()
    sparsity: float = shared(
        "share of the network that a client does not have", default=0.5, at_least=0, below=1
    )
    prune_share: float = shared(
        "alpha: share of a mask that changes in the first round; 0: none ever",
        default=0.5,
        at_least=0,
        at_most=1,
    )
    annealing_rounds: int = shared(
        "T, rounds after which masks no longer change; set it to the rounds of the run",
        default=500,
        at_least=1,
    )
    same_masks: bool = shared("all clients begin with the same mask", default=True)
    mixing: MixingMatrix = shared(
        "how clients count in the average of those that have a number; equal in the authors' "
        "program",
        default="equal",
    )
    seed: int = shared(
        "seed of the sampling of clients, and of the mask with which all begin",
        default=0,
        at_least=0,
    )

    def pruned_share(self, server_round: int) -> float:
        """Return the share of a mask that is pruned in a round."""
        done = min(server_round - 1, self.annealing_rounds) / self.annealing_rounds
        return self.prune_share / 2 * (1 + math.cos(math.pi * done))


class NeighbourScreening(Declared):
    """How clients of NTK-DFL bear malicious neighbours."""

    rule: Defence = shared(
        "leave-one-out: a client judges its neighbours' weights by its own examples, and their "
        "Jacobians by its own and the other neighbours' examples; weights count alike",
        default="none",
    )
    malicious: int = shared(
        "f: most neighbours of a client that it may drop as malicious", default=1, at_least=1
    )

    @property
    def mixing(self) -> MixingMatrix:
        """How clients count in averages: with a rule alike, since examples are claims."""
        return "examples" if self.rule == "none" else "equal"


class NTKDFLOptions(Declared):
    """How clients of NTK-DFL evolve; appendix E.3 has a sparsity of 0.5 and 6 bits."""

    same_weights: bool = _GOSSIP["same_weights"].field()
    sparsity: float = _COMPRESSION["sparsity"].field()
    bits: int = _COMPRESSION["bits"].field()
    loss: Loss = _FLOW["loss"].field()
    kernel: Kernel = _FLOW["kernel"].field()
    residuals: Literal["integral", "sum"] = _FLOW["residuals"].field()
    learning_rate: float = shared("eta", default=0.01, above=0)
    learning_rate_decay: float = shared(
        "in round k the rate is eta exp(-decay (k - 1)); 0 in the paper, 0.07 in its program",
        default=0.0,
        at_least=0,
    )
    steps: Sequence[float] = _FLOW["steps"].field(default=tuple(map(float, range(100, 801, 100))))
    tolerance: float = _FLOW["tolerance"].field(default=1e-3)
    selection: Literal["last", "true-loss", "own"] = shared(
        "which t. last: what the paper's rule, the lowest loss of the evolved outputs, chooses, "
        "since this loss only falls; true-loss: the lowest loss of the network itself over the "
        "neighbourhood, as in the authors' program (inputs then travel with the Jacobians, which "
        "hold them anyway if the first layer is linear); own: the same over the client's examples",
        default="last",
    )
    batches: int = shared(
        "m_1 of appendix E.1: parts of a client's examples, each with an evolution",
        default=1,
        at_least=1,
    )
    average_first: bool = shared(
        "weights are averaged with the neighbours' first: eq. (1)", default=True
    )
    class_prior: bool = shared(
        "the classes' shares in a neighbourhood are an offset of the outputs that evolve (ours; "
        "for cross-entropy): see fedntk.ntk.class_prior.log_class_prior",
        default=False,
    )

    def check(self) -> None:
        """Refuse an empty grid, and a prior that the loss does not use."""
        check_compression(self.sparsity, self.bits)
        FlowOptions(**self._flow())
        if not self.steps:
            raise ValueError("steps: expected at least one time, got none")
        if self.class_prior and self.loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {self.loss}")

    def flow_in(self, server_round: int) -> GradientFlow:
        """Return what evolves outputs in a round; with the last t only if no other is needed."""
        needs_all = self.selection != "last" or self.kernel == "corrected"
        rate = self.learning_rate * math.exp(-self.learning_rate_decay * (server_round - 1))
        steps = self.steps if needs_all else self.steps[-1:]
        return GradientFlow(**{**self._flow(), "learning_rate": rate, "steps": steps})

    def _flow(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FLOW}


class NTKDFLTask(NTKDFLOptions, NeighbourScreening):
    """All that clients of NTK-DFL are told."""
