"""The base of decentralised clients that train by SGD and average with neighbours."""

import math
from collections.abc import Sequence
from logging import getLogger
from typing import Any, ClassVar

from fedntk.ntk.averages import are_finite, weighted_sum
from fedntk.ntk.options import part
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.gossip_options import GossipOptions, mixing_row
from fedntk.ntk.support.arrays import ArrayDict

from ..core.local_sgd import Adjust, LocalSGD, plain_gradients
from .relay import Message, RelayClient, WeightsParcel

logger = getLogger("flwr")


class GossipClient(RelayClient):
    """A client with weights of its own, local SGD, and averages with its neighbours.

    The strategy's ``learning_rate_factor`` multiplies the learning rate in its round.
    """

    config_keys = RelayClient.config_keys | {"lr", wire.DEGREES}
    options_kind: ClassVar[type[Any]] = GossipOptions
    gradients = staticmethod(plain_gradients)  # of a batch, along which its step goes

    sgd: LocalSGD = part("local training", default=LocalSGD)

    def check(self) -> None:
        """Refuse FedProx's term, as there is no global model to be near to, and Adam."""
        self.sgd.refuse_proximal_term(f"{type(self).__name__} has no global model to be near to")
        self.sgd.refuse_adam(self.strategy)

    def train_from(
        self, weights: ArrayDict, message: Message, adjust: Adjust | None = None
    ) -> tuple[ArrayDict, dict[str, float]]:
        """Return new weights, the old ones if training diverged, and ``train-loss`` if finite."""
        config = dict(message.config)
        x, targets = self.training_examples(config)
        factor = message.options.learning_rate_factor ** (message.memory.round - 1)
        config["lr"] = config.get("lr", self.sgd.learning_rate) * factor
        start = list(weights.values())
        loss = self.sgd.descend(self, start, x, targets, config, adjust, gradients=self.gradients)
        trained = self.model_weights()
        if not are_finite(trained, weights):
            logger.warning("local training diverged: the weights stay as they were")
            trained = dict(weights)
        return trained, {wire.TRAIN_LOSS: loss} if math.isfinite(loss) else {}

    def mix(
        self,
        weights: ArrayDict,
        others: Sequence[tuple[int, WeightsParcel]],
        message: Message,
        *,
        with_own: bool = True,
    ) -> ArrayDict:
        """Return sum over j of W_ij x_j; unless `with_own` the others, if any, share x_i's part."""
        shares = self.shares([(j, parcel.num_examples) for j, parcel in others], message)
        models = [weights, *(parcel.weights for _, parcel in others)]
        if not with_own and others:
            models, shares = models[1:], [s / sum(shares[1:]) for s in shares[1:]]
        return weighted_sum(models, shares)

    def shares(self, heard: Sequence[tuple[int, int]], message: Message) -> list[float]:
        """Return W's row: the client's share, then those of neighbours (id, number of examples)."""
        counts = [self.num_examples, *(n for _, n in heard)]
        neighbours = message.neighbours
        listed = message.config.get(wire.DEGREES, [0] * len(neighbours))
        degree_of = dict(zip(neighbours, listed, strict=True))
        degrees = [len(neighbours), *(degree_of[j] for j, _ in heard)]
        return mixing_row(message.options.mixing, counts, degrees)
