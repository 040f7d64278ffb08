"""FedBE: an ensemble drawn around the clients' models, as it is or distilled into one network."""

from typing import Any

from fedntk.strategies import Distillation, FedBE, Strategy

from ..config.config import BaseConfig
from ..config.settings import ConfigError, Settings, setting
from .method import Method, Setup


class FedBESettings(Settings, frozen=True, eq=True):
    """What simulations add to the options of FedBE and of its distillation."""

    distill: bool = setting(
        False, "distil the ensemble into one network, on validation-examples without their labels"
    )


class _FedBE(Method):
    name = "fed-be"
    strategy_class = FedBE
    parts = (Distillation,)
    own_settings = FedBESettings
    apart = ("alpha", "learning_rate", "batch_size", "momentum", "weight_decay")
    baseline = True
    metrics = ("ensemble-size", "distilled", "distillation-loss-before", "distillation-loss")

    def check(self, config: BaseConfig, settings: Any) -> None:
        super().check(config, settings)
        if not (key := self.validates(config)):
            return
        if config.validation_examples < 2:
            raise ConfigError(
                "validation-examples: expected at least 2 for the server to distil on, got "
                f"{config.validation_examples}; set it, or {key} = false"
            )
        if config.loss != "cross-entropy":
            raise ConfigError(
                f"loss: expected cross-entropy with {key}, which needs probabilities, got "
                f"{config.loss}; set {key} = false"
            )
        if config.projection:
            raise ConfigError(
                f"projection: expected 0 with {key}, as the server does not know the projection "
                f"of the clients' examples, got {config.projection}; set {key} = false"
            )

    def validates(self, config: BaseConfig) -> str:
        return "fed-be.distill" if self.settings_in(config).distill else ""

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        if self.settings_in(setup.config).distill:
            examples, _ = setup.data.train(setup.split.validation)
            options["distill"] = self._make(Distillation, setup, {"examples": examples})
        return super().strategy(setup, options)


METHOD = _FedBE()
