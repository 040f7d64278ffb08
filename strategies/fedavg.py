"""Flower's FedAvg, reproducible and safe from single bad replies.

Source: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
AISTATS 2017, algorithm 1: w <- sum over the sampled clients k of (n_k / n) w_k.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedntk.ntk.robust_averages import DEFENCES

from .core.averaging import cast_like, named_arrays
from .core.exchange import Aggregated
from .core.secure_average import AveragingStrategy


class SeededFedAvg(AveragingStrategy):
    """Flower's FedAvg: same seed, same bits; a bad reply is dropped, logged and counted.

    Clients are :class:`~fedntk.clients.SGDClient`, or any whose reply is one set of weights. With
    three clients or more, weights that moved over 100 times as far as the median client's are
    dropped.
    """

    centres = True
    defences = (*DEFENCES, "validation")

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Average the accepted weights, in the dtypes of the global model."""
        model = named_arrays(self.global_arrays)
        averaged, _, metrics = self.average(replies, model)
        self.train_metrics[server_round] = metrics
        return None if averaged is None else cast_like(averaged, model), metrics
