"""Client of similarity-weighted FedAvg: its weights, and what its classes look like to them.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 6.2: p_k^j = mean of g_k(x) over the examples of class
j, with g_k the trained network without its last linear layer.
"""

from torch import Tensor

from fedntk.ntk import FeatureMap
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.support.arrays import ArrayDict

from ..core.weights import Config, Fit, NamedArrays, Parameters, set_weights
from .personal_client import PersonalClient


class WeightedFedAvgClient(PersonalClient):
    """Trains the model that is sent only to it; sends it back with its classes' mean features.

    The message says which features. They tell the server what an average example of each class
    looks like to the network, and how many there are: of a single example, that one's features.
    """

    strategy = "WeightedFedAvg"
    replies = "weights and prototypes"
    config_keys = PersonalClient.config_keys | {wire.STEP, *FeatureMap("last-layer").to_config()}

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train as :class:`PersonalisedClient`; add the record of Prototypes."""
        network = self.own_network(parameters, config)
        names = list(self.split_records(parameters)[0])
        x, targets = self.training_examples(config)
        shared, train_loss = self.train_network(network, (x, targets), config, names)
        prototypes = self._prototypes(x, targets, config)
        records = {self.record_name(parameters): shared, wire.PROTOTYPES: prototypes}
        return NamedArrays(records), len(x), {wire.TRAIN_LOSS: train_loss}

    def step_prototypes(self, parameters: Parameters, config: Config) -> Fit:
        """Return the record of Prototypes under the network that came, without training it."""
        set_weights(self.model, list(self.own_network(parameters, config).values()))
        x, targets = self.training_examples(config)
        records = {wire.PROTOTYPES: self._prototypes(x, targets, config)}
        return NamedArrays(records), len(x), {}

    def _prototypes(self, x: Tensor, targets: Tensor, config: Config) -> ArrayDict:
        extract = FeatureMap.from_config(config).extractor(self.model)
        return Prototypes.of(extract, x, targets.argmax(1), targets.shape[1]).to_arrays()
