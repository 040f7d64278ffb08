"""Clients that keep arrays of their own on their disk, from round to round.

Source of partial personalisation: Pillutla et al., *Federated Learning with Partial Model
Personalization*, ICML 2022, with u the shared and v_k the personal arrays of client k (its FedSim:
both are trained together).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedntk.ntk import Predictor
from fedntk.ntk.options import argument, part
from fedntk.ntk.payloads import wire
from fedntk.ntk.support.arrays import ArrayDict, Arrays
from fedntk.ntk.support.shared_arrays import require_whole

from ..core.base import LostStateError, ModelClient
from ..core.disk_store import PersonalStore
from ..core.local_sgd import SGD_KEYS, BatchLoss, LocalSGD
from ..core.weights import Config, Evaluation, Fit, NamedArrays, Parameters, records_of, set_weights


class PersonalClient(ModelClient):
    """A client that evaluates a network of its own, and keeps what of it is not shared.

    What is personal is what the record ``arrays`` of a message lacks of the network. First values
    come with the first message, in a record ``personal``. After each training it is kept on this
    machine's disk. The strategy names the round to take it from, in which it accepted a reply; a
    client that finds it missing says so, and is sent the first values again.
    """

    strategy = "PersonalisedStrategy"
    replies = "shared weights"
    config_keys = SGD_KEYS | {wire.RUN, wire.ROUND}

    sgd: LocalSGD = part("local training", default=LocalSGD)
    cache: str | os.PathLike[str] | None = argument(
        "folder for what is personal; fedntk/personal in $XDG_CACHE_HOME or ~/.cache by default. A "
        "client's folder of a run has the newest 20 rounds (64 MiB at most, or the newest two), "
        "and goes when the client begins another run more than a day after its last use",
        default=None,
    )

    def own_network(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict:
        """Return the network that the client evaluates, in its order; else LostStateError."""
        return self.assemble(*self.split_records(parameters), config)

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Evaluate the client's own network on its examples; ``{"lost-state": 0}`` if that is lost.

        A private client refuses to evaluate arrays that it computed from its examples.
        """
        if self.is_private:
            raise ValueError(
                "this client promises what its messages tell of its training examples, and arrays "
                "of its own are computed from these; set fraction_evaluate = 0"
            )
        try:
            network = self.own_network(parameters, config)
        except LostStateError as lost:
            return 0.0, lost.num_examples, dict(lost.metrics)
        set_weights(self.model, list(network.values()))
        return self.evaluate_by(parameters, config)

    def evaluate_by(self, parameters: Parameters, config: Config) -> Evaluation:
        """Evaluate the network, which the model holds, as the method predicts."""
        return self.evaluate_model(config)

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the client's own network: see :meth:`ModelClient.predictor`."""
        weights = list(self.own_network(parameters, config).values())
        return self.predictor_of(weights, parameters, config)

    def predictor_of(
        self, weights: Parameters, parameters: Parameters, config: Config
    ) -> Predictor:
        """Make a module of the network with some weights, as the method predicts."""
        return self.network_predictor(weights)

    def split_records(self, parameters: Parameters) -> tuple[ArrayDict, ArrayDict]:
        """Return the shared arrays that came, and first values of the personal ones."""
        name = self.record_name(parameters)
        records = records_of(parameters, name, strategy=self.strategy)
        return records[name], records.get(wire.PERSONAL, {})

    def record_name(self, parameters: Parameters) -> str:
        """Return the name of the record that is not of personal arrays: the strategy's choice."""
        names = [name for name in getattr(parameters, "records", {}) if name != wire.PERSONAL]
        return names[0] if len(names) == 1 else "arrays"

    def assemble(self, shared: ArrayDict, first: ArrayDict, config: Mapping[str, Any]) -> ArrayDict:
        """Return the client's whole network, in its order; else LostStateError."""
        expected = self.model.state_dict()
        personal = [name for name in expected if name not in shared]
        if unknown := sorted(shared.keys() - expected.keys()):
            raise ValueError(f"arrays: the network has none of the names {unknown[:5]}")
        require_whole(self.model, shared, "be shared")
        saved = (self.load_personal(config) if personal else {}) or first
        if any(name not in saved for name in personal):
            folder = self.store(config).folder
            raise LostStateError(f"{folder}: what was kept there is lost", self.num_examples)
        return {name: shared[name] if name in shared else saved[name] for name in expected}

    def train_network(
        self,
        network: ArrayDict,
        examples: tuple[Tensor, Tensor],
        config: Mapping[str, Any],
        shared: Sequence[str],
        batch_loss: BatchLoss | None = None,
    ) -> tuple[ArrayDict, float]:
        """Train a network and keep what is not shared; return what is, and the mean loss."""
        loss = self.sgd.train(self, list(network.values()), *examples, config, batch_loss)
        trained = self.model_weights()
        self.save_personal({n: a for n, a in trained.items() if n not in shared}, config)
        return {name: trained[name] for name in shared}, loss

    def load_personal(self, config: Mapping[str, Any]) -> ArrayDict | None:
        """Return what the client kept in the round that the message names; None if it is lost."""
        server_round = int(config.get(wire.ROUND, 0))
        return self.store(config).load(server_round) if server_round else {}

    def save_personal(self, arrays: Arrays, config: Mapping[str, Any]) -> None:
        """Keep the current round's arrays, and those from which they were made."""
        if arrays:
            needed = int(config.get(wire.ROUND, 0))
            self.store(config).save(int(config.get("server-round", 0)), arrays, needed=needed)

    def store(self, config: Mapping[str, Any]) -> PersonalStore:
        """Return the folder of what the client keeps in a run."""
        return PersonalStore(self.cache, config, self.seed)


class PersonalisedClient(PersonalClient):
    """Trains the whole network by local SGD, and keeps its personal arrays to itself."""

    takes_real_targets = True

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Train shared and personal arrays together; return the shared ones and ``train-loss``."""
        network = self.own_network(parameters, config)
        names = list(self.split_records(parameters)[0])
        x, targets = self.training_examples(config)
        shared, train_loss = self.train_network(network, (x, targets), config, names)
        reply = NamedArrays({self.record_name(parameters): shared})
        return reply, len(x), {wire.TRAIN_LOSS: train_loss}
