"""Flower's FedAvg, reproducible and safe from single bad replies.

Source: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
AISTATS 2017, algorithm 1: w <- sum over the sampled clients k of (n_k / n) w_k.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedntk.ntk.averages import weighted_mean

from .core.averaging import cast_like, named_arrays
from .core.base import BaseStrategy
from .core.exchange import Aggregated


class SeededFedAvg(BaseStrategy):
    """Flower's FedAvg: same seed, same bits; a bad reply is dropped, logged and counted.

    Clients are :class:`~fedntk.clients.SGDClient`, or any whose reply is one set of weights. With
    three clients or more, weights that moved over 100 times as far as the median client's are
    dropped.
    """

    centres = True

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Average the accepted weights, in the dtypes of the global model."""
        model = named_arrays(self.global_arrays)
        pairs, metrics = self.accept_weights(replies, model)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(pairs)):
            return None, metrics
        averaged = weighted_mean(
            [weights for _, weights in pairs], [reply.num_examples for reply, _ in pairs]
        )
        return cast_like(averaged, model), metrics
