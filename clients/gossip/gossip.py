"""What the clients of decentralised methods share that train by SGD and average with neighbours."""

import math
from collections.abc import Mapping, Sequence
from logging import WARNING, getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.averages import weighted_sum

from ..core.sgd_steps import Adjust
from ..sgd import SGDClient
from .relay import Arrays, Message, RelayClient, WeightsParcel

__all__ = ["GossipClient"]

OF_GOSSIP = frozenset({"lr", "rate-factor", "mixing", "degrees"})
logger = getLogger("flwr")


class GossipClient(RelayClient, SGDClient):
    """A client with weights of its own, local SGD, and averages with its neighbours.

    Parameters
    ----------
    **options
        Of :class:`SGDClient`: local_epochs, batch_size, learning_rate, momentum, weight_decay. The
        strategy's ``learning_rate_factor`` multiplies the rate in its round. Momentum begins at
        zero in each round. Of :class:`RelayClient`: cache, the folder for its weights. Of
        :class:`ModelClient`: model, x, y, x_test, y_test, columns, loss, device, batch_size_eval,
        sampling_rate, projection, seed (of the shuffling, too).

    Raises
    ------
    ValueError
        If a number is out of range, or what :class:`ModelClient` refuses.
    TypeError
        For ``proximal_mu``: there is no global model to be near to.
    """

    replies = "parcels"
    config_keys = RelayClient.config_keys | OF_GOSSIP

    def __init__(self, *args: Any, **options: Any) -> None:
        if "proximal_mu" in options:
            raise TypeError(
                f"proximal_mu: {type(self).__name__} has no global model to be near to; leave it "
                "out"
            )
        super().__init__(*args, **options)

    def trained_from(
        self, weights: Arrays, config: Mapping[str, Any], adjust: Adjust | None = None
    ) -> tuple[Arrays, dict[str, float]]:
        """Run the local epochs of a round.

        Parameters
        ----------
        weights : dict of str to ndarray
            Where to begin, in the network's order.
        config : dict
            Of the message; it seeds the shuffling, and has the learning rate's factor.
        adjust : callable, optional
            Of :meth:`SGDClient.descend`.

        Returns
        -------
        tuple of dict, dict
            New weights, and ``{"train-loss": ...}``. Training that diverged gives the weights
            where it began, and no metric of a loss that is not finite.
        """
        x, targets = self.training_examples(dict(config))
        rate = config.get("lr", self.learning_rate) * float(config.get("rate-factor", 1.0))
        self.load_weights(weights)
        loss = self.descend(list(weights.values()), x, targets, {**config, "lr": rate}, adjust)
        trained = self.model_weights()
        if not all(np.isfinite(array).all() for array in trained.values()):
            logger.log(WARNING, "local training diverged: the weights stay as they were")
            trained = dict(weights)
        return trained, {"train-loss": loss} if math.isfinite(loss) else {}

    def mixed(
        self,
        own: Arrays,
        others: Sequence[tuple[int, WeightsParcel]],
        message: Message,
        *,
        alone: bool = True,
    ) -> Arrays:
        """Return sum over j of W_ij x_j, in float64 and cast back.

        Parameters
        ----------
        own : dict of str to ndarray
            x_i.
        others : list of (int, WeightsParcel)
            Neighbours that were heard, and their x_j.
        message : Message
            Says which W.
        alone : bool
            Whether x_i counts. Without it, and with neighbours, it is as if it were not there.
        """
        shares = self.shares([(j, parcel.num_examples) for j, parcel in others], message)
        weights = [own, *(parcel.weights for _, parcel in others)]
        if not alone and others:
            weights, shares = weights[1:], [s / sum(shares[1:]) for s in shares[1:]]
        return weighted_sum(weights, shares)

    def shares(self, heard: Sequence[tuple[int, int]], message: Message) -> list[float]:
        """Return a row of W: the client's own share, then those of the neighbours heard.

        Parameters
        ----------
        heard : list of (int, int)
            Neighbours and their numbers of examples.
        message : Message
            Says which W: see the ``mixing`` of its strategy.

        Raises
        ------
        ValueError
            If the message names another rule.
        """
        mixing = message.config.get("mixing", "examples")
        if mixing == "metropolis":
            degrees = dict(zip(message.neighbours, message.config["degrees"], strict=True))
            own = len(message.neighbours)
            each = [1 / (1 + max(own, int(degrees[j]))) for j, _ in heard]
            return [1 - sum(each), *each]
        if mixing not in ("examples", "equal"):
            raise ValueError(f"mixing: expected examples, equal or metropolis, got {mixing!r}")
        counts = [len(self._training), *(n for _, n in heard)]
        if mixing == "equal":
            counts = [1] * len(counts)
        return [n / sum(counts) for n in counts]

    def parcel(self, weights: Arrays) -> Mapping[str, NDArray[Any]]:
        """Return weights as they go to neighbours."""
        return WeightsParcel(weights, len(self._training)).to_arrays()
