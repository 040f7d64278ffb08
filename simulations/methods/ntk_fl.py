"""NTK-FL: clients send Jacobians, the server evolves their kernel."""

from typing import Any, ClassVar

from fedntk.clients import sample_size
from fedntk.ntk import jacobian, require_memory
from fedntk.ntk.evolution.learning_rate import AUTO
from fedntk.strategies import NTKFL, BaseStrategy

from ..config.config import Config
from ..config.settings import ConfigError, Settings, setting
from ..deploy.simulated_trust import projected
from .method import Method, Setup


class EvolvingSettings(Settings, frozen=True, eq=True):
    """What simulations add to the options of the methods whose server evolves a kernel."""

    auto_learning_rate: bool = setting(
        False, "take the learning rate of each round from its kernel's largest eigenvalue, instead "
        "of learning-rate",
    )  # fmt: skip


class EvolvingMethod(Method):
    """What NTK-FL and CP-NTK-FL share."""

    own_settings = EvolvingSettings
    apart = ("class_prior",)
    metrics: ClassVar[tuple[str, ...]] = (
        "t",
        "learning-rate",
        "candidate-loss",
        "linearised-loss",
        "losses-accepted",
        "kernel-products",
        "solver-steps",
        "solver-error-estimate",
    )

    def check(self, config: Config, settings: Any) -> None:
        """Refuse a choice by examples that are missing."""
        super().check(config, settings)
        examples, clients = config.validation_examples, config.validation_clients
        if (key := self.validates(config)) and bool(examples) == bool(clients):
            raise ConfigError(
                f"{key} = validation goes with one of validation-examples (kept on the server) and "
                f"validation-clients (held out), got {examples} and {clients}"
            )

    def validates(self, config: Config) -> str:
        """Return the key of `selection` if held-out examples choose t."""
        own = self.own(config)
        return str(own.key("selection")) if own.selection == "validation" else ""

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        """Make the strategy, with the automatic rate and the examples that choose t."""
        settings = self.own(setup.config)
        if settings.auto_learning_rate:
            options["learning_rate"] = AUTO
        if settings.selection == "validation":  # else what is held out is for others
            options["validation_partitions"] = sorted({*options["held_out"]} - setup.absent)
            options["held_out"] = sorted(setup.absent)
            if len(setup.split.validation):
                options["validation_loss"] = self.validation_loss(setup)
        return super().strategy(setup, options)

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Refuse a round of Jacobians, and their stack, that the server could not hold."""
        config, device = setup.config, setup.device
        x, _ = setup.data.train(setup.split.clients[0][:1])
        row = jacobian(setup.network.to(device), projected(config, x).to(device))
        size = sum(b.dense_size for b in row.blocks) * row.dtype.itemsize
        size = size if self.own(config).structure == "dense" else row.nbytes
        counts = [sample_size(len(own), config.sampling_rate) for own in setup.split.clients]
        largest = sorted(counts)[-config.clients_a_round :]
        require_memory(
            2 * size * sum(largest),
            f"a round of {len(largest)} clients, up to {sum(largest)} examples of "
            f"{size / 1e6:.1f} MB,",
            cure="lower clients-per-round or the examples of each, or use a smaller network",
        )


METHOD = EvolvingMethod("ntk-fl", NTKFL)
