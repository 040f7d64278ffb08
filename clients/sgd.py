"""Client of FedAvg and its relatives: it trains the received weights by local SGD.

Sources: see :mod:`fedntk.clients.core.local_sgd`.
"""

from fedntk.ntk.options import part
from fedntk.ntk.payloads import wire

from .core.base import ModelClient
from .core.local_sgd import SGD_KEYS, LocalSGD
from .core.weights import Config, Fit, Parameters, get_weights


class SGDClient(ModelClient):
    """Trains the received weights on the local examples and sends them back."""

    strategy = "SeededFedAvg"
    replies = wire.WEIGHTS
    config_keys = SGD_KEYS
    takes_real_targets = True

    sgd: LocalSGD = part("local training", default=LocalSGD)

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train from the received weights; the metric ``train-loss`` is the mean of the steps'."""
        x, targets = self.training_examples(config)
        train_loss = self.sgd.train(self, parameters, x, targets, config)
        return get_weights(self.model), len(x), {wire.TRAIN_LOSS: train_loss}
