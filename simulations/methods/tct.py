"""TCT: federated averaging of a network, then a convex problem in its tangent features."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedntk.clients import FeatureStore, shrink
from fedntk.clients.core.disk_store import data_digest
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import FeatureMap, TCTModel, require_disk
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.ntk.payloads.convex_task import ConvexTask
from fedntk.ntk.predictors.network import Evaluation, Predictor, arrays_of
from fedntk.ntk.predictors.tct_model import LINEAR
from fedntk.ntk.support.arrays import Arrays
from fedntk.strategies import TCT, Sampling, Screening, SeededFedAvg, Strategy

from ..config.config import BaseConfig
from ..config.settings import ConfigError, Settings, setting
from .method import Setup
from .sums import SumsMethod


class TCTSettings(Settings, frozen=True, eq=True):
    """What simulations add to the options of TCT; those of stage 1's SGD are common settings."""

    bootstrap_rounds: int = setting(
        10, "T_1, rounds of FedAvg; the others are for moments and stage 2", at_least=0
    )


class _TCT(SumsMethod):
    name = "tct"
    strategy_class = TCT
    own_settings = TCTSettings
    apart = ("learning_rate", "loss", "optimizer", "proximal_mu")
    metrics = ("examples-changed", "features-constant", "rate-times-lambda", "ridge")

    def validates(self, config: BaseConfig) -> str:
        sums = self.settings_in(config).sums
        if sums is not None and sums.bits != UNQUANTISED:
            return str(sums.key("bits"))
        return super().validates(config)

    def check(self, config: BaseConfig, settings: Any) -> None:
        super().check(config, settings)
        before = TCT.rounds_before_stage_2(settings)
        if settings.dtype == "float16" and not settings.normalise:
            raise ConfigError(
                "tct.dtype = float16 would lose small features without tct.normalise; use float32"
            )
        if 0 < config.rounds <= before:
            raise ConfigError(
                f"rounds: expected more than {before}, after which stage 2 begins "
                f"(tct.bootstrap-rounds = {settings.bootstrap_rounds}), got {config.rounds}; lower "
                "tct.bootstrap-rounds, or use method = fedavg, which is stage 1"
            )

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        settings, screening = self.settings_in(setup.config), setup.config.screening
        bootstrap = SeededFedAvg(
            sampling=Sampling(seed=setup.config.seed),
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=1,
            screening=Screening(
                rule="none" if screening.rule == "validation" else screening.rule,
                malicious=screening.malicious,
            ),
        )
        options["bootstrap"] = bootstrap if settings.bootstrap_rounds else None
        return super().strategy(setup, options)

    def learned_in(self, arrays: Arrays) -> str:
        return "linear-model" if LINEAR in arrays else "network"

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        options["cache"] = setup.config.cache
        return super().client(setup, partition, options)

    def predictor(
        self, setup: Setup, arrays: Arrays, learned: str, *, cache: Path | None = None
    ) -> Predictor:
        if learned == "network":
            return super().predictor(setup, arrays, learned)
        settings, network = self.settings_in(setup.config), setup.network.to(setup.device)
        if cache is None:
            return TCTModel.from_arrays(network, _feature_map(settings), arrays, loss=settings.loss)
        model = _KeptFeatures.from_arrays(
            network, _feature_map(settings), arrays, loss=settings.loss
        )
        model.cache, model.settings, model.device = cache, settings, setup.device
        return model

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Refuse features that would not fit on this machine's disk."""
        config, settings = setup.config, self.settings_in(setup.config)
        width = _feature_map(settings).width(setup.network)
        sizes = setup.split.sizes
        total, largest = sum(sizes), max(sizes)
        if settings.sums is not None:  # the strategy says
            return
        # all clients' as computed, in float32; one's as normalised beside them; the test set's,
        # which float16 may not hold
        tested = len(setup.evaluation_set()[1])
        if config.screening.rule == "validation":
            tested += len(setup.split.validation)
        rows = total * 4 + largest * np.dtype(settings.dtype).itemsize + tested * (4 + 4)
        require_disk(
            models * rows * width,
            "features of all examples",
            config.folder,
            cure="lower tct.num-features, or set tct.dtype = float16",
        )

    def clean_up(self, config: BaseConfig) -> None:
        shrink(config.cache)


def _feature_map(settings: Any) -> FeatureMap:
    return FeatureMap(
        settings.features, settings.num_features, settings.feature_seed, settings.head
    )


class _KeptFeatures(TCTModel):
    """Predicts from test features on disk, computed once for a network as clients' are."""

    cache: Path
    settings: Any
    device: str

    def _evaluate(self, x: Tensor, y: Tensor) -> Evaluation:
        network, moments = arrays_of(self.network), self.normaliser
        key = ConvexTask.key_of(self.feature_map, list(network.values()))
        bias = self.settings.bias
        store = FeatureStore(
            self.cache / f"test-{data_digest(x, y)}",
            f"{key} {bias}",
            self.network,
            self.feature_map,
            dtype=self.settings.dtype,
        )
        normaliser = {"mean": moments.mean, "inv_std": moments.inv_std}
        store.take({"network": network, "normaliser": normaliser})
        rows = store.rows("train", x, bias=bias, device=torch.device(self.device))
        return self._compare(self.in_units(rows @ self.linear), y)


METHOD = _TCT()
