"""Client of FedNova: local SGD that also says how many steps it amounts to.

Source: Wang et al., *Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization*, NeurIPS 2020, section 4.1: after tau steps with momentum rho the change of the
weights is -eta sum of a_j g_j with a_j = (1 - rho^(tau - j)) / (1 - rho), j = 0 ... tau - 1, and

    ||a||_1 = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho),  tau without momentum.
"""

import torch

from fedntk.ntk.payloads import wire

from .core.weights import Config, Fit, Parameters, Scalar, get_weights
from .sgd import SGDClient


class FedNovaClient(SGDClient):
    """Trains as :class:`SGDClient`, and reports ||a||_1 as the metric ``effective-steps``.

    The learning rate may differ from round to round, not between clients. Weight decay counts as
    part of the gradient.
    """

    strategy = "FedNova"
    config_keys = frozenset({"lr"})

    def check(self) -> None:
        """Refuse local training that FedNova cannot normalise."""
        self.sgd.refuse_proximal_term("FedNova normalises SGD with and without momentum")
        self.sgd.refuse_adam("FedNova")
        if self.sgd.epochs < 1:
            raise ValueError(f"epochs: expected at least 1 with FedNova, got {self.sgd.epochs}")

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train from the received weights; metrics: ``train-loss`` and ``effective-steps``."""
        x, targets = self.training_examples(config)
        train_loss = self.sgd.train(self, parameters, x, targets, config)
        batches = self.sgd.batches(self.model, torch.arange(len(x)))
        velocity = total = 0.0
        for _ in range(self.sgd.epochs * len(batches)):
            velocity = self.sgd.momentum * velocity + 1
            total += velocity
        metrics: dict[str, Scalar] = {wire.TRAIN_LOSS: train_loss, wire.EFFECTIVE_STEPS: total}
        return get_weights(self.model), len(x), metrics
