"""Client of FedRep: epochs on its head, then epochs on the body.

Source: Collins et al., *Exploiting Shared Representations for Personalized Federated Learning*,
ICML 2021, algorithm 1.
"""

from fedntk.ntk.options import option
from fedntk.ntk.payloads import wire

from ..core.local_sgd import only_trained
from ..core.weights import Config, Fit, NamedArrays, Parameters
from .personal_client import PersonalClient


class FedRepClient(PersonalClient):
    """Trains its head with the body fixed, then the body with its head fixed.

    In both, BatchNorm's statistics follow the batches. Both take the batches in the same orders.
    """

    strategy = "FedRep"
    takes_real_targets = True

    head_epochs: int = option(
        "passes that train the head, before those that train the body", default=10, at_least=0
    )

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train both; return the body, and as ``train-loss`` that of the body's steps."""
        network = self.own_network(parameters, config)
        names = list(self.split_records(parameters)[0])
        x, targets = self.training_examples(config)
        if self.head_epochs:
            with only_trained(self.model, network.keys() - set(names)):
                sgd = self.sgd.copy(epochs=self.head_epochs)
                sgd.train(self, list(network.values()), x, targets, config)
            network = self.model_weights()
        with only_trained(self.model, names):
            shared, loss = self.train_network(network, (x, targets), config, names)
        reply = NamedArrays({self.record_name(parameters): shared})
        return reply, len(x), {wire.TRAIN_LOSS: loss}
