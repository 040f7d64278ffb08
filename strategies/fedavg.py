"""FedAvg: Flower's, reproducible and safe from single bad replies.

Source: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
AISTATS 2017, algorithm 1: w <- sum over the sampled clients k of (n_k / n) w_k.
"""

from fedntk.ntk.options import part
from fedntk.ntk.robust_averages import DEFENCES

from .core.averaging import cast_like
from .core.centre import CentreInputs
from .core.channel import Rounds
from .core.round import Round
from .core.secure import SecureAggregation
from .core.strategy import Strategy
from .core.uploads import Update
from .core.weight_average import WeightAverage


class SeededFedAvg(Strategy):
    """Flower's FedAvg: same seed, same bits; a bad reply is dropped, logged and counted.

    Clients are :class:`~fedntk.clients.SGDClient`, or any whose reply is one set of weights. With
    three clients or more, weights that moved over 100 times as far as the median client's are
    dropped. With `secure` clients need the mod :class:`~fedntk.clients.MaskedWeights`. The server
    then learns the mean and the sum of examples; as metrics, the mean ``train-loss``, and how many
    numbers were out of range and ``clipped``. It cannot screen weights.
    """

    rules = (*DEFENCES, "validation")
    takes_real_targets = True

    secure: SecureAggregation | None = part("clients mask their weights", default=None)
    average: WeightAverage | None = part("average of the weights over rounds", default=None)
    centre: CentreInputs | None = part("take the mean over all clients off inputs", default=None)

    def train_round(self, r: Round) -> Rounds[Update]:
        """Average the clients' weights, in the dtypes of the global model."""
        return (yield from average_weights(self, r, self.secure))


def average_weights(
    strategy: Strategy, r: Round, secure: SecureAggregation | None
) -> Rounds[Update]:
    """Do a strategy's round as FedAvg does, in the dtypes of the global model."""
    if secure is not None:
        mean, uploads, metrics = yield from secure.mean(r, strategy.enough)
        return Update(uploads, None if mean is None else cast_like(mean, r.model), metrics)
    uploads = yield from r.ask(r.weights)
    uploads = strategy.screening.drop_outliers(uploads, r.model)
    if not strategy.enough(uploads):
        return Update(uploads)
    return Update(uploads, cast_like(strategy.screening.mean(uploads, r.model), r.model))
