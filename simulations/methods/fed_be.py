"""FedBE: an ensemble drawn around the clients' models, as it is or distilled into one network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flwr.client import NumPyClient
from numpy.typing import NDArray

from fedntk.clients import SGDClient
from fedntk.ntk import EnsemblePredictor, NetworkPredictor, Predictor
from fedntk.ntk.payloads import EnsembleArrays
from fedntk.strategies import BaseStrategy, Distillation, FedBE

from ..config.config import Config
from ..config.settings import ConfigError, Settings, setting
from .method import Method, Setup

__all__ = ["METHOD"]


class FedBESettings(Settings, frozen=True, eq=True):
    """Settings of FedBE."""

    table = "fed-be"

    distribution: Literal["gaussian", "dirichlet"] = setting(
        "gaussian", "from which models are drawn"
    )
    num_samples: int = setting(10, "M, models drawn a round", at_least=0)
    alpha: float = setting(
        1.0, "concentration of distribution = dirichlet", at_least=1e-6, at_most=1e12
    )
    client_models: bool = setting(True, "have the clients' models in the ensemble, too")
    distill: bool = setting(
        False, "distil the ensemble into one network, on validation-examples without their labels"
    )
    temperature: float = setting(0.5, "T that sharpens the labels of the distillation", above=0)
    epochs: int = setting(20, "of the distillation", at_least=1)
    batch_size: int = setting(128, "of the distillation", at_least=2)
    learning_rate: float = setting(
        1e-3, "of the distillation's SGD, at the beginning of each cycle", above=0
    )
    final_learning_rate: float = setting(4e-4, "at the end of each cycle", above=0)
    cycle: int = setting(25, "steps in which the rate falls", at_least=1)
    momentum: float = setting(0.9, "of the distillation's SGD", at_least=0, below=1)
    weight_decay: float = setting(1e-5, "of the distillation's SGD", at_least=0)
    swa: bool = setting(True, "take the mean of the weights at the ends of cycles, not the last")
    swa_start: float = setting(
        0.3, "share of the steps after which weights count in that mean", at_least=0, below=1
    )

    def check(self) -> None:
        """Refuse a rate that rises in a cycle."""
        if self.final_learning_rate > self.learning_rate:
            raise ConfigError(
                f"{self.key('final-learning-rate')}: expected at most "
                f"{self.key('learning-rate')} = {self.learning_rate:g}, got "
                f"{self.final_learning_rate:g}; lower it"
            )


class _FedBE(Method[FedBESettings]):
    name = "fed-be"
    settings = FedBESettings
    baseline = True
    metrics = ("ensemble-size", "distilled", "distillation-loss-before", "distillation-loss")

    def check(self, config: Config, settings: FedBESettings) -> None:
        if not settings.distill:
            return
        key = settings.key("distill")
        if config.validation_examples < 2:
            raise ConfigError(
                f"validation-examples: expected at least 2 for the server to distil on, got "
                f"{config.validation_examples}; set it, or {key} = false"
            )
        if config.evaluate_on == "validation":
            raise ConfigError(
                f"evaluate-on: expected test with {key}, which trains on the validation-examples, "
                f"got validation; set evaluate-on = test, or {key} = false"
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

    def validates(self, config: Config) -> bool:
        """Say whether the server distils on the held-out examples."""
        return self.own(config).distill

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return FedBE(
            distribution=own.distribution,
            num_samples=own.num_samples,
            alpha=own.alpha,
            client_models=own.client_models,
            distill=self._distillation(setup, own) if own.distill else None,
            **options,
        )

    def _distillation(self, setup: Setup, own: FedBESettings) -> Distillation:
        examples, _ = setup.data.train(setup.split.validation)
        return Distillation(
            setup.network,
            examples,
            temperature=own.temperature,
            epochs=own.epochs,
            batch_size=own.batch_size,
            learning_rate=own.learning_rate,
            final_learning_rate=own.final_learning_rate,
            cycle=own.cycle,
            momentum=own.momentum,
            weight_decay=own.weight_decay,
            swa=own.swa,
            swa_start=own.swa_start,
            device=setup.device,
        )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        del partition
        return SGDClient(**setup.config.local_sgd, **options)

    def predictor(
        self,
        setup: Setup,
        arrays: Mapping[str, NDArray[Any]],
        learned: str,
        *,
        cache: Path | None = None,
    ) -> Predictor:
        if learned == "network":
            return super().predictor(setup, arrays, learned, cache=cache)
        return EnsemblePredictor(
            NetworkPredictor.from_arrays(
                setup.network, model, loss=setup.config.loss, device=setup.device
            )
            for model in EnsembleArrays.from_arrays(arrays).models
        )


METHOD = _FedBE()
