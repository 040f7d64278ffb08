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
from fedntk.ntk.support.arrays import ArrayDict

from ..core.sgd_steps import proximal_term
from ..core.weights import Config, Fit, Parameters, set_weights
from .personalised import PersonalisedClient

logger = getLogger("flwr")


class DittoClient(PersonalisedClient):
    """Trains the received weights as :class:`SGDClient`, and beside them a model that it keeps.

    The personal model v_k begins as the first weights that the client is sent, or receives after it
    lost v_k. In each round it is trained on F_k(v) + (lambda / 2) ||v - w^t||^2, with w^t the
    received weights, on the same batches as these. Parameters are pulled; buffers, such as
    BatchNorm's statistics, are the model's own. Nothing that is sent depends on it. It is what the
    client evaluates.
    """

    strategy = "Ditto"
    replies = "global weights"

    pull: float = option(
        "lambda: how strongly the personal model is pulled to the received weights; 0: not at all; "
        "steps do not overshoot as long as learning_rate * pull is at most 1",
        default=1.0,
        at_least=0,
    )
    personal_epochs: int = option(
        "passes over the local examples that train the personal model; 0: as many as local_epochs",
        default=0,
        at_least=0,
    )

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Train both models, and return the global one.

        Metrics are ``train-loss`` of w_k and ``personal-loss`` of v_k, as of
        :meth:`SGDClient.descend`, and ``restarted``: 1 if v_k was lost, else 0.
        """
        kept = self.kept(config)
        result, num_examples, metrics = super().fit(parameters, config)
        personal_loss = self._train_own(parameters, config, kept)
        self.keep(self.model_weights(), config)
        more = {"personal-loss": personal_loss, "restarted": float(kept is None)}
        return result, num_examples, {**metrics, **more}

    def _train_own(self, parameters: Parameters, config: Config, kept: ArrayDict | None) -> float:
        """Train v_k towards the received weights; the model holds it then."""
        received, _ = self.records(parameters)
        start = list(self._personal(received, kept).values())
        set_weights(self.model, start)
        x, targets = self.training_examples(config)
        centre = {name: torch.from_numpy(array) for name, array in received.items()}
        adjust = proximal_term(self.trainable, self.pull, centre) if self.pull else None
        return self.descend(start, x, targets, config, adjust, epochs=self.personal_epochs or None)

    def own_network(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict:
        """Return v_k as it was kept; the received weights before that, or if it is lost."""
        return self._personal(self.records(parameters)[0], self.kept(config))

    def _personal(self, received: ArrayDict, kept: ArrayDict | None) -> ArrayDict:
        if kept is None:
            logger.warning("the personal model is lost: it begins again with the global weights")
        own = kept or received
        return {name: own[name] for name in self.model.state_dict()}
