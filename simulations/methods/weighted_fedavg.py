"""Similarity-weighted FedAvg: a model for each client, mixed from those of clients like it."""

from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from flwr.client import NumPyClient
from matplotlib.figure import Figure

from fedntk.clients import WeightedFedAvgClient
from fedntk.ntk.support.files import whole
from fedntk.strategies import BaseStrategy, WeightedFedAvg

from ..config.settings import Settings, setting
from ..report.figures import similarity_heat_map
from .method import Setup
from .personal import PersonalMethod, personal_cache

__all__ = ["METHOD"]


class WeightedFedAvgSettings(Settings, frozen=True, eq=True):
    """Settings of similarity-weighted FedAvg."""

    table = "weighted-fedavg"

    similarity: Literal["prototypes", "entk"] = setting(
        "prototypes",
        "by what clients are compared: class means of the last layer's inputs, as by Huang et al. "
        "2024, or of tangent features",
    )
    temperature: float = setting(1.0, "tau of the softmax over similarities", above=0)
    absent: Literal["zero", "common"] = setting(
        "zero",
        "a class that a client lacks: zero: counts as zeros, as by Huang et al. 2024; common: "
        "pairs are compared over the classes that both have",
    )
    over: Literal["round", "all"] = setting(
        "round",
        "whose models are mixed: round: those of the round's clients; all: those that all clients "
        "last sent",
    )
    by_examples: bool = setting(False, "weights grow with a client's examples, too")
    personal_batch_norm: bool = setting(False, "BatchNorm stays with the clients, as in FedBN")
    head: str = setting("", "layer before which features are taken; the last linear one by default")
    num_features: int = setting(1000, "p of similarity = entk; 0: all coordinates", at_least=0)
    feature_seed: int = setting(123, "of similarity = entk, shared by all clients", at_least=0)
    memory_budget: float = setting(
        4.0, "GB of clients' models in the server's memory; more are kept on disk", at_least=0
    )


class _WeightedFedAvg(PersonalMethod[WeightedFedAvgSettings]):
    name = "weighted-fedavg"
    settings = WeightedFedAvgSettings
    metrics = ("effective-clients", "own-weight-mean", "similarity-mean")

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return WeightedFedAvg(
            network=setup.network,
            similarity=own.similarity,
            temperature=own.temperature,
            absent=own.absent,
            over=own.over,
            by_examples=own.by_examples,
            personal_batch_norm=own.personal_batch_norm,
            head=own.head,
            num_features=own.num_features,
            feature_seed=own.feature_seed,
            memory_budget=own.memory_budget,
            **options,
        )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        cache = personal_cache(setup.config)
        return WeightedFedAvgClient(cache=cache, **setup.config.local_sgd, **options)

    def after_round(self, strategy: BaseStrategy, server_round: int, folder: Path) -> None:
        """Write who was mixed from whom: ``similarity-<round>.npz``, unless nobody was."""
        mixing = cast(WeightedFedAvg, strategy).mixing
        if mixing is not None and mixing.server_round == server_round:
            with whole(folder / f"similarity-{server_round:06}.npz") as file:
                np.savez(file, **mixing._asdict())

    def pictures(self, folder: Path) -> dict[str, Figure]:
        """Draw the similarities of the last round."""
        files = sorted(folder.glob("similarity-*.npz"))
        if not files:
            return {}
        with np.load(files[-1]) as saved:
            number = int(files[-1].stem.partition("-")[2])
            figure = similarity_heat_map(
                saved["similarities"], saved["clients"], title=f"Similarity in round {number}"
            )
        return {"similarity": figure}


METHOD = _WeightedFedAvg()
