"""What the decentralised strategies share whose clients train by SGD and average with neighbours.

The mixing matrix W has W_ij > 0 where i and j are neighbours or the same, and rows that sum to one.
On any graph the rule of Metropolis and Hastings makes its columns sum to one, too: repeated
averaging then leads to the equal mean of all clients. Source: Xiao, Boyd and Lall, *A Scheme for
Robust Distributed Sensor Fusion Based on Average Consensus*, IPSN 2005, section 3.
"""

import math
from logging import INFO
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict

from ..core.exchange import logger
from .relay import RelayStrategy
from .topology import MixingMatrix

__all__ = ["GossipStrategy"]


class GossipStrategy(RelayStrategy):
    """Rounds of local SGD and averages with neighbours; the order of the two is the method's.

    Parameters
    ----------
    mixing : {"examples", "equal", "metropolis"}
        W. ``"examples"``: a client and its neighbours, each by its number of examples, as in eq.
        (1) of Thompson et al. 2025. ``"equal"``: each the same, which is doubly stochastic where
        all have as many neighbours. ``"metropolis"``: W_ij = 1 / (1 + max(d_i, d_j)) of the numbers
        of neighbours d, and the rest for oneself, which is doubly stochastic on any graph. A
        neighbour that is not heard leaves its share to the client itself.
    learning_rate_factor : float
        In round k the clients' learning rate is multiplied by factor^(k - 1); 1 means none.
    same_weights : bool
        Whether all clients begin with the initial arrays, or each with weights of its own, drawn
        as He et al. 2015.
    **options
        Of :class:`~fedntk.strategies.RelayStrategy` (topology, collect), of
        :class:`~fedntk.strategies.BaseStrategy` (seed, evaluate_every, min_completed) and of
        Flower's FedAvg.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    mixing: MixingMatrix

    def __init__(
        self,
        *,
        mixing: MixingMatrix = "examples",
        learning_rate_factor: float = 1.0,
        same_weights: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if mixing not in get_args(MixingMatrix):
            known = ", ".join(get_args(MixingMatrix))
            raise ValueError(f"mixing: expected one of {known}, got {mixing!r}")
        if not 0 < learning_rate_factor < math.inf:
            raise ValueError(
                "learning_rate_factor: expected a finite number above 0, got "
                f"{learning_rate_factor}"
            )
        self.mixing = mixing
        self.learning_rate_factor = learning_rate_factor
        self.same_weights = same_weights

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> %s: %s topology, mixing by %s",
            type(self).__name__,
            self.topology.kind,
            self.mixing,
        )

    def settings(self) -> dict[str, Any]:
        """Add how clients average."""
        return {
            **super().settings(),
            "mixing": self.mixing,
            "learning_rate_factor": self.learning_rate_factor,
            "same_weights": self.same_weights,
        }

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add how clients train and average in this round."""
        super().prepare_config(config, server_round)
        config["mixing"], config["same-weights"] = self.mixing, self.same_weights
        config["rate-factor"] = self.learning_rate_factor ** (server_round - 1)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add how many neighbours each neighbour has, where the mixing matrix needs it."""
        content = super().content_for(client, stage, arrays, config)
        if stage == MessageType.TRAIN and self.mixing == "metropolis":
            own = content.config_records[self.configrecord_key]
            others = self.neighbours.get(client, ())
            own["degrees"] = [len(self.neighbours[other]) for other in others]
        return content
