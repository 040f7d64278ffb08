"""What the decentralised methods share: the graph of the clients, and how good their models are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np

from fedntk.strategies import BaseStrategy, RelayStrategy, Topology

from .config import Config
from .method import Method, Setup
from .personal import personal_cache
from .settings import ConfigError, Settings, setting
from .simulated_trust import projected

__all__ = ["DecentralisedMethod", "GossipMethod", "GossipSettings", "GraphSettings"]


@dataclass(frozen=True, kw_only=True)
class GraphSettings(Settings):
    """Settings of methods whose clients have neighbours."""

    topology: Literal["regular", "ring", "line", "erdos-renyi", "clustered", "complete"] = setting(
        "regular", "who is whose neighbour"
    )
    degree: int = setting(5, "kappa, neighbours of a client (in the mean)", at_least=1)
    dynamic: bool = setting(True, "the graph is drawn anew in each round")
    same_weights: bool = setting(True, "all clients begin with the same weights")
    seal: bool = setting(
        False,
        "what clients send each other is sealed for its receivers; one exchange more in a round",
    )

    def of_relay(self, seed: int) -> dict[str, Any]:
        """Return the options that the strategies of these methods share, with a run's graphs."""
        graphs = Topology(self.topology, degree=self.degree, dynamic=self.dynamic, seed=seed)
        return {"topology": graphs, "same_weights": self.same_weights, "seal": self.seal}


@dataclass(frozen=True, kw_only=True)
class GossipSettings(GraphSettings):
    """Settings of methods whose clients train by SGD and average with neighbours."""

    mixing: Literal["examples", "equal", "metropolis"] = setting(
        "examples",
        "a client and its neighbours count by examples, each the same, or by the doubly stochastic "
        "rule of Metropolis and Hastings",
    )
    learning_rate_factor: float = setting(
        1.0, "in round k the learning rate is multiplied by factor^(k - 1)", above=0
    )


D = TypeVar("D", bound=GraphSettings)
G = TypeVar("G", bound=GossipSettings)


class DecentralisedMethod(Method[D]):
    """A method whose clients have neighbours, and weights of their own."""

    metrics: ClassVar[tuple[str, ...]] = (
        "inter-client-deviation", "models-collected", "neighbours-heard", "parcels-rejected",
        "restarted", "spectral-gap",
    )  # fmt: skip

    def check(self, config: Config, settings: D) -> None:
        """Refuse more neighbours than there are others in a round."""
        taking_part = config.clients_per_round
        if settings.topology in ("regular", "clustered") and settings.degree >= taking_part:
            raise ConfigError(
                f"{settings.key('degree')}: expected less than clients-per-round = {taking_part}, "
                f"got {settings.degree}"
            )

    def measured(self, setup: Setup, strategy: BaseStrategy) -> Mapping[str, float]:
        """Return how accurate the clients' models are, on the server's examples."""
        models = cast(RelayStrategy, strategy).models
        if not models:
            return {}
        x, y = setup.evaluation_set()
        x = projected(setup.config, x)
        values = [
            self.predictor(setup, model, "network").evaluate(x, y).accuracy
            for model in models.values()
        ]
        return {
            "model-accuracy-mean": float(np.mean(values)),
            "model-accuracy-min": float(np.min(values)),
            "model-accuracy-max": float(np.max(values)),
            "model-accuracy-std": float(np.std(values)),
        }


class GossipMethod(DecentralisedMethod[G]):
    """A decentralised method whose clients train by SGD and average with neighbours."""

    baseline = True

    def shared(self, setup: Setup) -> dict[str, Any]:
        """Return the options that the strategies of these methods share."""
        own = self.own(setup.config)
        return {
            **own.of_relay(setup.config.seed),
            "mixing": own.mixing,
            "learning_rate_factor": own.learning_rate_factor,
        }

    def of_clients(self, setup: Setup) -> dict[str, Any]:
        """Return the options that the clients of these methods share."""
        return {"cache": personal_cache(setup.config), **setup.config.local_sgd}
