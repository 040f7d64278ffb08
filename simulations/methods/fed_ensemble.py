"""Fed-ensemble: several models, each by another of the methods here."""

import itertools
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from fedntk.clients import FedEnsembleClient, ModelClient
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import EnsemblePredictor, Predictor
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.support.arrays import Arrays
from fedntk.strategies import FedEnsemble, Sampling, Strategy

from ..config.config import BaseConfig
from ..config.settings import ConfigError, Settings, setting
from ..models import build_model
from .method import Method, Setup

FAR = 1_000_003  # between the seeds of two models, so that no other run has them


class FedEnsembleSettings(Settings, frozen=True, eq=True):
    """What simulations add to the options of Fed-ensemble."""

    inner: str = setting("fedavg", "method of each model; its own settings are in its own table")
    init: Literal["he", "xavier", "network"] = setting(
        "he",
        "first weights of all K models: he or xavier, with biases of 0; or network, drawn as the "
        "network's layers draw them",
    )


class _FedEnsemble(Method):
    name = "fed-ensemble"
    strategy_class = FedEnsemble
    own_settings = FedEnsembleSettings
    metrics = ("models-updated",)
    evaluation_metrics = (
        "model-accuracy-max", "model-accuracy-mean", "model-accuracy-min", "model-entropy-mean",
        "mutual-information",
    )  # fmt: skip

    def inner(self, config: BaseConfig) -> Method:
        """Return the method of each model."""
        inner: Method = config.method_table.all_methods()[self.settings_in(config).inner]
        return inner

    def reads(self, name: str, config: BaseConfig) -> bool:
        return self.inner(config).reads(name, config)

    def check(self, config: BaseConfig, settings: Any) -> None:
        super().check(config, settings)
        strata = settings.num_strata or settings.num_models
        methods, key = sorted(config.method_table.all_methods().keys() - {self.name}), settings.key
        if settings.inner not in methods:
            raise ConfigError(
                f"{key('inner')}: expected one of {', '.join(methods)}, got {settings.inner!r}"
            )
        if config.clients_a_round < strata:
            raise ConfigError(
                f"clients-per-round: expected at least one client of each of the {strata} strata, "
                f"got {config.clients_a_round}; sample more, or set {key('num-strata')}"
            )
        if config.weights:
            raise ConfigError(
                f"weights = {config.weights}: expected none with {self.name}, which draws the "
                f"first weights of all models ({key('init')})"
            )
        if config.adapters in ("lora", "ffa-lora") and settings.init != "network":
            raise ConfigError(
                f"{key('init')} = {settings.init} would draw adapters anew, which begin with 0; "
                f"set {key('init')} = network"
            )
        self.inner(config).check(config, config.settings_of(settings.inner))

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        settings, inner = self.settings_in(setup.config), self.inner(setup.config)

        def drawn(k: int) -> nn.Module:
            config = setup.config.replace(seed=setup.config.seed + k * FAR)
            return build_model(config, setup.data.input_shape, setup.data.num_classes)

        seeds = itertools.count(setup.config.seed, step=FAR)
        of_inner = {**options, "key_server": None, "min_completed": 1}
        if inner.can_have("average"):  # the ensemble averages for all of them
            of_inner["average"] = None
        sampling: Sampling = options["sampling"]

        def make_inner() -> Strategy:
            drawn = sampling.copy(seed=next(seeds))
            return inner.strategy(setup, {**of_inner, "sampling": drawn})

        options["inner"] = make_inner
        options["init"] = drawn if settings.init == "network" else settings.init
        return super().strategy(setup, options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        client = self.inner(setup.config).client(setup, partition, options)
        return FedEnsembleClient(cast(ModelClient, client))

    def predictor(
        self, setup: Setup, arrays: Arrays, learned: str, *, cache: Path | None = None
    ) -> Predictor:
        models = EnsembleArrays.from_arrays(arrays).models
        inner = self.inner(setup.config)
        return EnsemblePredictor(
            inner.predictor(setup, model, kind)
            for model, kind in zip(models, learned.split(","), strict=True)
        )

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        settings = self.settings_in(setup.config)
        self.inner(setup.config).require_resources(setup, models * settings.num_models)

    def validates(self, config: BaseConfig) -> str:
        return self.inner(config).validates(config)

    def seeded_protection(self, config: BaseConfig) -> list[str]:
        return self.inner(config).seeded_protection(config)

    def clean_up(self, config: BaseConfig) -> None:
        self.inner(config).clean_up(config)


METHOD = _FedEnsemble()
