"""The base of decentralised clients that train by SGD and average with neighbours."""

import math
from collections.abc import Sequence
from logging import getLogger

from fedntk.ntk.averages import are_finite, weighted_sum
from fedntk.ntk.payloads.gossip_options import GossipOptions, mixing_row
from fedntk.ntk.support.arrays import ArrayDict

from ..core.sgd_steps import Adjust
from ..sgd import SGDClient
from .relay import Message, RelayClient, WeightsParcel, round_of

logger = getLogger("flwr")


class GossipClient(RelayClient, SGDClient):
    """A client with weights of its own, local SGD, and averages with its neighbours.

    The strategy's ``learning_rate_factor`` multiplies the learning rate in its round. Momentum
    begins at zero in each round.
    """

    config_keys = RelayClient.config_keys | {"lr", "degrees"}
    options_kind = GossipOptions

    def check(self) -> None:
        """Refuse FedProx's term: there is no global model to be near to."""
        super().check()
        if self.proximal_mu:
            raise ValueError(
                f"proximal_mu: expected 0, got {self.proximal_mu}; {type(self).__name__} has no "
                "global model to be near to"
            )

    def train_from(
        self, weights: ArrayDict, message: Message, adjust: Adjust | None = None
    ) -> tuple[ArrayDict, dict[str, float]]:
        """Return new weights after a round's local epochs, and ``{"train-loss": ...}`` if finite.

        `adjust` is that of :meth:`SGDClient.descend`. Training that diverged gives the weights
        where it began.
        """
        config, options = dict(message.config), message.options
        x, targets = self.training_examples(config)
        factor = options.learning_rate_factor ** (round_of(config) - 1)
        config["lr"] = config.get("lr", self.learning_rate) * factor
        self.load_weights(weights)
        loss = self.descend(list(weights.values()), x, targets, config, adjust)
        trained = self.model_weights()
        if not are_finite(trained, weights):
            logger.warning("local training diverged: the weights stay as they were")
            trained = dict(weights)
        return trained, {"train-loss": loss} if math.isfinite(loss) else {}

    def mix(
        self,
        own: ArrayDict,
        others: Sequence[tuple[int, WeightsParcel]],
        message: Message,
        *,
        with_own: bool = True,
    ) -> ArrayDict:
        """Return sum over j of W_ij x_j: see :func:`weighted_sum`.

        Unless `with_own` the shares of the others, if there are some, grow by that of x_i.
        """
        shares = self.shares([(j, parcel.num_examples) for j, parcel in others], message)
        weights = [own, *(parcel.weights for _, parcel in others)]
        if not with_own and others:
            weights, shares = weights[1:], [s / sum(shares[1:]) for s in shares[1:]]
        return weighted_sum(weights, shares)

    def shares(self, heard: Sequence[tuple[int, int]], message: Message) -> list[float]:
        """Return a row of W: the client's own share, then those of the neighbours heard.

        Each neighbour comes with its number of examples.
        """
        counts = [len(self._training), *(n for _, n in heard)]
        near = message.neighbours
        known = dict(zip(near, message.config.get("degrees", [0] * len(near)), strict=True))
        degrees = [len(near), *(known[j] for j, _ in heard)]
        return mixing_row(message.options.mixing, counts, degrees)
