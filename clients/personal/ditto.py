"""Client of Ditto: it trains the global model for the server, and one of its own for itself.

Source: Li, Hu, Beirami and Smith, *Ditto: Fair and Robust Federated Learning Through
Personalization*, ICML 2021, algorithm 1, with w^t the received weights:

    w_k <- local SGD on F_k from w^t, which is sent
    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)), which is kept
"""

from collections.abc import Mapping
from logging import getLogger
from typing import Any

import torch

from fedntk.ntk.options import option
from fedntk.ntk.payloads import wire
from fedntk.ntk.support.arrays import ArrayDict

from ..core.local_sgd import proximal_term, trained_parameters
from ..core.weights import Config, Fit, NamedArrays, Parameters, Scalar, set_weights
from .personal_client import PersonalClient

logger = getLogger("flwr")


class DittoClient(PersonalClient):
    """Trains the received weights as :class:`SGDClient`, and keeps a model of its own beside them.

    The personal model v_k begins as the first weights that come, also after it was lost. In each
    round it is trained on F_k(v) + (lambda / 2) ||v - w^t||^2, with w^t the received weights, on
    the same batches. Parameters are pulled; buffers, such as BatchNorm's statistics, are its own.
    It is what the client evaluates.
    """

    strategy = "Ditto"
    takes_real_targets = True
    replies = "global weights"

    pull: float = option(
        "lambda: how strongly the personal model is pulled to the received weights; steps do not "
        "overshoot while learning rate times pull is at most 1",
        default=1.0,
        at_least=0,
    )
    personal_epochs: int = option(
        "passes that train the personal model; 0: as many as sgd has", default=0, at_least=0
    )

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train both models, and return the global one.

        Metrics are ``train-loss`` of w_k, ``personal-loss`` of v_k, ``restarted`` if v_k was lost.
        """
        received, _ = self.split_records(parameters)
        network = self.assemble(received, {}, config)
        saved = self.load_personal(config)
        x, targets = self.training_examples(config)
        shared, train_loss = self.train_network(network, (x, targets), config, list(received))
        start = list(self._personal_weights(received, saved).values())
        adjust = None
        if self.pull:
            set_weights(self.model, start)
            centre = {name: torch.from_numpy(array) for name, array in received.items()}
            adjust = proximal_term(trained_parameters(self.model), self.pull, centre)
        sgd = self.sgd.copy(epochs=self.personal_epochs or self.sgd.epochs)
        personal_loss = sgd.descend(self, start, x, targets, config, adjust)
        self.save_personal(self.model_weights(), config)
        metrics: dict[str, Scalar] = {wire.TRAIN_LOSS: train_loss, "personal-loss": personal_loss}
        metrics["restarted"] = float(saved is None)
        return NamedArrays({self.record_name(parameters): shared}), len(x), metrics

    def own_network(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict:
        """Return v_k as it was kept; the received weights before that, or if it is lost."""
        received, _ = self.split_records(parameters)
        return self._personal_weights(received, self.load_personal(config))

    def _personal_weights(self, received: ArrayDict, saved: ArrayDict | None) -> ArrayDict:
        if saved is None:
            logger.warning("the personal model is lost: it begins again with the global weights")
        weights = saved or received
        return {name: weights[name] for name in self.model.state_dict()}
