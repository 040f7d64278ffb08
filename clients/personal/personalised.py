"""Client of partial personalisation: some of the network's arrays never leave it.

Source: Pillutla et al., *Federated Learning with Partial Model Personalization*, ICML 2022, with
u the shared and v_k the personal arrays of client k (its FedSim: both are trained together).
"""

from fedntk.ntk.payloads import wire

from ..core.weights import Config, Fit, NamedArrays, Parameters
from .personal_client import PersonalClient


class PersonalisedClient(PersonalClient):
    """Trains the whole network by local SGD, and keeps its personal arrays to itself."""

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Run E epochs of SGD on the received arrays and the client's own, together.

        The new shared arrays go back, with ``train-loss``. A client that lost what it kept returns
        no arrays, and ``{"lost-state": 0}``.
        """
        network = self.own_network(parameters, config)
        if network is None:
            return self.lost_reply()
        names = list(self.split_records(parameters)[0])
        x, targets = self.training_examples(config)
        shared, train_loss = self.train_network(network, (x, targets), config, names)
        reply = NamedArrays({self.record_name(parameters): shared})
        return reply, len(x), {wire.TRAIN_LOSS: train_loss}
