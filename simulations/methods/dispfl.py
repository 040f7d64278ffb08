"""DisPFL: decentralised; a sparse model of each client's own."""

from typing import Any, Literal

from flwr.client import NumPyClient

from fedntk.clients import DisPFLClient
from fedntk.strategies import BaseStrategy, DisPFL

from ..config.settings import setting
from .decentralised import GossipMethod, GossipSettings
from .method import Setup

__all__ = ["METHOD"]


class DisPFLSettings(GossipSettings, frozen=True, eq=True):
    """Settings of DisPFL."""

    table = "dispfl"

    sparsity: float = setting(
        0.5, "share of the network that a client does not have", at_least=0, below=1
    )
    prune_share: float = setting(
        0.5,
        "alpha: share of a mask that changes in the first round; 0: none ever",
        at_least=0,
        at_most=1,
    )
    annealing_rounds: int = setting(
        500, "T: after so many rounds masks stay; set it to the rounds of the run", at_least=1
    )
    same_masks: bool = setting(True, "all clients begin with the same mask")
    mixing: Literal["equal", "examples", "metropolis"] = setting(
        "equal", "as of the others; of the neighbours that have a number"
    )


class _DisPFL(GossipMethod[DisPFLSettings]):
    name = "dispfl"
    settings = DisPFLSettings
    headline = "client-accuracy-mean"
    metrics = (*GossipMethod.metrics, "mask-density", "mask-changed")

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return DisPFL(
            sparsity=own.sparsity,
            prune_share=own.prune_share,
            annealing_rounds=own.annealing_rounds,
            same_masks=own.same_masks,
            **self.shared(setup),
            **options,
        )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return DisPFLClient(**self.of_clients(setup), **options)


METHOD = _DisPFL()
