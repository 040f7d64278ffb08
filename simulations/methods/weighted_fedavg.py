"""Similarity-weighted FedAvg: a model for each client, mixed from those of clients like it."""

from pathlib import Path
from typing import cast

import numpy as np

from fedntk.ntk.support.files import whole
from fedntk.strategies import Strategy, WeightedFedAvg

from .method import Method


class _WeightedFedAvg(Method):
    name = "weighted-fedavg"
    strategy_class = WeightedFedAvg
    headline = "client-accuracy-mean"
    metrics = ("effective-clients", "own-weight-mean", "similarity-mean")

    def after_round(self, strategy: Strategy, server_round: int, folder: Path) -> None:
        """Write the mixing weights, ``similarity-<round>.npz``, unless nothing was mixed."""
        mixing = cast(WeightedFedAvg, strategy).mixing
        if mixing is not None and mixing.server_round == server_round:
            with whole(folder / f"similarity-{server_round:06}.npz") as file:
                np.savez(file, **mixing._asdict())


METHOD = _WeightedFedAvg()
