"""Client of FedProto: a network of its own; its features are drawn to those of other clients.

Source: Tan et al., *FedProto: Federated Prototype Learning across Heterogeneous Clients*, AAAI
2022, with C_i^j the mean feature of client i's examples of class j and C^j the server's:

    F_i + lambda sum over j of d(C_i^j, C^j)

As in the authors' program, d is taken example by example: the mean square over the features.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedntk.ntk import FeatureMap, Predictor, PrototypePredictor
from fedntk.ntk.features.feature_map import record_input
from fedntk.ntk.options import option
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.prototypes import GLOBAL_PROTOTYPES, Prototypes
from fedntk.ntk.support.arrays import ArrayDict

from ..core.local_sgd import BatchLoss
from ..core.weights import Config, Evaluation, Fit, NamedArrays, Parameters
from .personal_client import PersonalClient


class FedProtoClient(PersonalClient):
    """Trains a network of its own towards the server's class prototypes; sends its own of these.

    To the loss of a batch of m examples is added

        (lambda / m) * sum over the examples i of ||f(x_i) - C^{y_i}||^2 / p

    with f(x) the p features before the last linear layer. A class without a global prototype pulls
    at none. After training, the client's prototypes are the means of f(x), in evaluation mode, over
    its examples of each class. All of the network stays on this machine.
    """

    strategy = "FedProto"
    replies = "prototypes"
    config_keys = PersonalClient.config_keys | FeatureMap("last-layer").to_config().keys()

    pull: float = option(
        "lambda: how strongly features are drawn to the prototypes", default=1.0, at_least=0
    )
    predict: Literal["prototype", "head"] = option(
        "what the client evaluates: the class of the nearest global prototype, or the network's "
        "own last layer, which predicts as long as there are no prototypes",
        default="prototype",
    )

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train as :class:`PersonalisedClient`, with the pull, and send only the prototypes."""
        prototypes, feature_map = self._read_prototypes(parameters), FeatureMap.from_config(config)
        _, head = feature_map.last_layer(self.model)
        if prototypes.means.shape != (head.out_features, head.in_features):
            raise ValueError(
                f"prototypes: expected {head.out_features} classes and {head.in_features} features "
                f"of the last layer, got {prototypes.means.shape}; give the strategy this network"
            )
        network = self.own_network(parameters, config)
        x, targets = self.training_examples(config)
        pulled = None
        if self.pull and prototypes.present.any():
            pulled = self._pulled_loss(head, prototypes, x, targets)
        _, train_loss = self.train_network(network, (x, targets), config, [], pulled)
        extract = feature_map.extractor(self.model)
        new = Prototypes.of(extract, x, targets.argmax(1), targets.shape[1])
        reply = NamedArrays({self.record_name(parameters): new.to_arrays()})
        return reply, len(x), {wire.TRAIN_LOSS: train_loss}

    def own_network(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict:
        """Return the client's network, none of which is shared; else LostStateError."""
        _, first = self.split_records(parameters)
        return self.assemble({}, first, config)

    def evaluate_by(self, parameters: Parameters, config: Config) -> Evaluation:
        """Evaluate the network by prototypes or by its last layer."""
        if not self._by_prototypes(parameters):
            return self.evaluate_model(config)
        x, targets = self.test_examples(config)
        predictor = self.predictor(parameters, config)
        predictor.metrics = self.metrics or {}
        evaluated = predictor.evaluate(x, targets.argmax(1))
        return evaluated.loss, len(x), {"accuracy": evaluated.score, **evaluated.more}

    def predictor_of(
        self, weights: Parameters, parameters: Parameters, config: Config
    ) -> Predictor:
        """Make a module of what the client evaluates."""
        predictor = self.network_predictor(weights)
        if not self._by_prototypes(parameters):
            return predictor
        head, prototypes = FeatureMap.from_config(config).head, self._read_prototypes(parameters)
        return PrototypePredictor(self.model, prototypes, head=head, device=self.device)

    def _read_prototypes(self, parameters: Parameters) -> Prototypes:
        arrays, _ = self.split_records(parameters)
        if arrays.keys() != set(GLOBAL_PROTOTYPES):
            raise ValueError(
                f"arrays: expected {' and '.join(GLOBAL_PROTOTYPES)}, got {sorted(arrays)[:5]}"
            )
        return Prototypes.from_global_arrays(arrays)

    def _by_prototypes(self, parameters: Parameters) -> bool:
        present = self._read_prototypes(parameters).present
        return bool(present.any()) and self.predict == "prototype"

    def _pulled_loss(
        self, head: nn.Linear, prototypes: Prototypes, x: Tensor, targets: Tensor
    ) -> BatchLoss:
        plain = self.sgd.batch_loss(self, x, targets)
        means = torch.from_numpy(prototypes.means.copy()).to(head.weight)
        present = torch.from_numpy(prototypes.present).to(head.weight)

        def loss(batch: Tensor) -> Tensor:
            with record_input(head, len(batch)) as seen:
                value = plain(batch)
            labels = targets.index_select(0, batch).argmax(1).to(means.device)
            distances = (seen[0] - means[labels]).square().mean(1)
            return value + self.pull * (present[labels] * distances).mean()

        return loss
