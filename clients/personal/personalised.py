"""Client of partial personalisation: some of the network's arrays never leave it.

Source: Pillutla et al., *Federated Learning with Partial Model Personalization*, ICML 2022, with
u the shared and v_k the personal arrays of client k (its FedSim: both are trained together).
"""

import os
from collections.abc import Mapping
from typing import Any

from fedntk.ntk import Predictor
from fedntk.ntk.options import argument
from fedntk.ntk.support.arrays import ArrayDict, Arrays
from fedntk.ntk.support.shared_arrays import require_whole

from ..core.named_arrays import NamedArrays, records_of
from ..core.weights import Config, Evaluation, Fit, Parameters
from ..sgd import SGDClient
from .personal_store import ROUND, RUN, PersonalStore

SHARED, PERSONAL = "arrays", "personal"  # records of a message; a strategy may rename the first


class PersonalisedClient(SGDClient):
    """Trains the whole network as :class:`SGDClient`, and keeps its personal arrays to itself.

    What is personal is what the record ``arrays`` of a message lacks of the network. With the first
    message come first values for it, in a record ``personal``. After each training it is kept on
    this machine's disk. The strategy names the round to take it from: the last one in which it
    accepted the client's reply. A client that finds it missing says so, and is sent the first
    values again.
    """

    strategy = "PersonalisedStrategy"
    replies = "shared weights"
    config_keys = SGDClient.config_keys | {RUN, ROUND}

    cache: str | os.PathLike[str] | None = argument(
        "folder for what is personal; fedntk/personal in $XDG_CACHE_HOME or ~/.cache by default. "
        "It holds a folder for each run and client, with the newest 20 rounds (64 MiB at most, or "
        "the newest two), which goes when this client begins another run more than a day after its "
        "last use",
        default=None,
    )

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Run E epochs of SGD on the received arrays and the client's own, together.

        The new shared arrays go back, with ``train-loss``. A client that lost what it kept returns
        no arrays, and ``{"lost-state": 0}``.
        """
        network = self.assemble(parameters, config)
        if network is None:
            return [], len(self._training), {"lost-state": 0}
        _, num_examples, metrics = super().fit(list(network.values()), config)
        trained = self.model_weights()
        shared = {name: trained[name] for name in self.records(parameters)[0]}
        self.keep({n: a for n, a in trained.items() if n not in shared}, config)
        return NamedArrays({self.record_name(parameters): shared}), num_examples, metrics

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Evaluate the client's own network on its examples for evaluation.

        A client that lost what it kept reports ``{"lost-state": 0}`` instead.
        """
        self.refuse_own_arrays()
        network = self.own_network(parameters, config)
        if network is None:
            return 0.0, len(self._training), {"lost-state": 0}
        return super().evaluate(list(network.values()), config)

    def refuse_own_arrays(self) -> None:
        """Refuse, as a private client, to evaluate arrays that it computed from its examples."""
        if self.is_private:
            raise ValueError(
                "this client promises what its messages tell of its training examples, and arrays "
                "of its own are computed from these; set fraction_evaluate = 0"
            )

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the client's own network: see :meth:`ModelClient.predictor`."""
        network = self.own_network(parameters, config)
        if network is None:
            raise ValueError(f"{self._store(config).folder}: what was kept there is lost")
        return super().predictor(list(network.values()), config)

    def records(self, parameters: Parameters) -> tuple[ArrayDict, ArrayDict]:
        """Return the shared arrays that came, and first values of the personal ones."""
        name = self.record_name(parameters)
        records = records_of(parameters, name, strategy=self.strategy)
        return records[name], records.get(PERSONAL, {})

    def record_name(self, parameters: Parameters) -> str:
        """Return the name of the record that is not of personal arrays: the strategy's choice."""
        names = [name for name in getattr(parameters, "records", {}) if name != PERSONAL]
        return names[0] if len(names) == 1 else SHARED

    def assemble(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict | None:
        """Return the client's whole network, in its order; None if its own part is lost."""
        shared, first = self.records(parameters)
        expected = self.model.state_dict()
        personal = [name for name in expected if name not in shared]
        if odd := sorted(shared.keys() - expected.keys()):
            raise ValueError(f"arrays: the network has none of the names {odd[:5]}")
        require_whole(self.model, shared, "be shared")
        kept = self.kept(config) if personal else {}
        own = kept or first
        if any(name not in own for name in personal):
            return None
        return {name: shared[name] if name in shared else own[name] for name in expected}

    def own_network(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict | None:
        """Return the network that the client evaluates: by default the one that it trains."""
        return self.assemble(parameters, config)

    def kept(self, config: Mapping[str, Any]) -> ArrayDict | None:
        """Return what the client kept in the round that the message names; None if it is lost."""
        server_round = int(config.get(ROUND, 0))
        return self._store(config).load(server_round) if server_round else {}

    def keep(self, arrays: Arrays, config: Mapping[str, Any]) -> None:
        """Keep the current round's arrays, and those from which they were made."""
        if arrays:
            needed = int(config.get(ROUND, 0))
            self._store(config).save(int(config.get("server-round", 0)), arrays, needed=needed)

    def _store(self, config: Mapping[str, Any]) -> PersonalStore:
        return PersonalStore(self.cache, config, self.seed)
