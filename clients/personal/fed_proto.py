"""Client of FedProto: a network of its own; its features are drawn to those of other clients.

Source: Tan et al., *FedProto: Federated Prototype Learning across Heterogeneous Clients*, AAAI
2022, with C_i^j the mean feature of client i's examples of class j and C^j the server's:

    F_i + lambda sum over j of d(C_i^j, C^j)

As in the authors' program, d is taken example by example: the mean square over the features.
"""

from typing import Literal

import torch
from torch import Tensor

from fedntk.ntk import FeatureMap, Predictor, PrototypePredictor
from fedntk.ntk.features.feature_map import record_input
from fedntk.ntk.options import option
from fedntk.ntk.payloads.prototypes import GLOBAL_PROTOTYPES, Prototypes
from fedntk.ntk.support.arrays import ArrayDict

from ..core.named_arrays import NamedArrays
from ..core.weights import Config, Evaluation, Fit, Parameters
from .personalised import PersonalisedClient


class FedProtoClient(PersonalisedClient):
    """Trains a network of its own towards the server's class prototypes; sends its own of these.

    To the loss of a batch of m examples is added

        (lambda / m) * sum over the examples i of ||f(x_i) - C^{y_i}||^2 / p

    with f(x) the p features before the last linear layer. A class without a global prototype pulls
    at none. After training, the client's prototypes are the means of f(x), in evaluation mode, over
    its examples of each class. All of the network stays on this machine.
    """

    strategy = "FedProto"
    replies = "prototypes"
    config_keys = PersonalisedClient.config_keys | FeatureMap("last-layer").to_config().keys()

    pull: float = option(
        "lambda: how strongly features are drawn to the prototypes; 0: not at all",
        default=1.0,
        at_least=0,
    )
    predict: Literal["prototype", "head"] = option(
        "what the client evaluates: the class of the nearest global prototype, or the network's "
        "own last layer, which predicts as long as there are no prototypes",
        default="prototype",
    )

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Train as :meth:`PersonalisedClient.fit`, with the pull, and send only the prototypes."""
        prototypes, feature_map = self._prototypes_in(parameters), FeatureMap.from_config(config)
        _, head = feature_map.last_layer(self.model)
        if prototypes.means.shape != (head.out_features, head.in_features):
            raise ValueError(
                f"prototypes: expected {head.out_features} classes and {head.in_features} features "
                f"of the last layer, got {prototypes.means.shape}; give the strategy the client's "
                "network"
            )
        self._head, self._pulls = head, bool(self.pull and prototypes.present.any())
        self._means = torch.from_numpy(prototypes.means.copy()).to(head.weight)
        self._present = torch.from_numpy(prototypes.present).to(head.weight)
        result, num_examples, metrics = super().fit(parameters, config)
        if not isinstance(result, NamedArrays):  # what it kept is lost
            return result, num_examples, metrics
        x, targets = self.training_examples(config)
        extract = feature_map.extractor(self.model)
        own = Prototypes.of(extract, x, targets.argmax(1), targets.shape[1])
        return NamedArrays({self.record_name(parameters): own.to_arrays()}), num_examples, metrics

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """See :meth:`PersonalisedClient.evaluate`; by prototypes or by the last layer."""
        self.refuse_own_arrays()
        if not self._by_prototypes(parameters) or self.assemble(parameters, config) is None:
            return super().evaluate(parameters, config)
        x, targets = self.test_examples(config)
        evaluated = self.predictor(parameters, config).evaluate(x, targets.argmax(1))
        return evaluated.loss, len(x), {"accuracy": evaluated.accuracy}

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of what the client evaluates."""
        predictor = super().predictor(parameters, config)
        if not self._by_prototypes(parameters):
            return predictor
        feature_map, prototypes = FeatureMap.from_config(config), self._prototypes_in(parameters)
        return PrototypePredictor(self.model, prototypes, head=feature_map.head, device=self.device)

    def records(self, parameters: Parameters) -> tuple[ArrayDict, ArrayDict]:
        """Return no arrays of the network as shared, and first values of all as personal."""
        _, first = super().records(parameters)
        return {}, first

    def _prototypes_in(self, parameters: Parameters) -> Prototypes:
        arrays, _ = super().records(parameters)
        if arrays.keys() != set(GLOBAL_PROTOTYPES):
            raise ValueError(
                f"arrays: expected {' and '.join(GLOBAL_PROTOTYPES)}, got {sorted(arrays)[:5]}"
            )
        return Prototypes.from_global_arrays(arrays)

    def _by_prototypes(self, parameters: Parameters) -> bool:
        there = bool(self._prototypes_in(parameters).present.any())
        return there and self.predict == "prototype"

    def _batch_loss(self, x: Tensor, targets: Tensor, batch: Tensor) -> Tensor:
        if not self._pulls:
            return super()._batch_loss(x, targets, batch)
        with record_input(self._head, len(batch)) as seen:
            loss = super()._batch_loss(x, targets, batch)
        own = targets.index_select(0, batch)
        labels = (own if own.ndim == 1 else own.argmax(1)).to(self._means.device)
        distances = (seen[0] - self._means[labels]).square().mean(1)
        return loss + self.pull * (self._present[labels] * distances).mean()
