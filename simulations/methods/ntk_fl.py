"""NTK-FL, whose server evolves a kernel; CP-NTK-FL samples, projects and compresses rows."""

from typing import Any, ClassVar

from fedntk.clients import sample_size
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk import jacobian, require_memory
from fedntk.ntk.evolution.gradient_flow import AUTO
from fedntk.strategies import CPNTKFL, NTKFL, Sampling, Strategy

from ..config.config import BaseConfig
from ..config.settings import ConfigError, Settings, setting
from ..simulated_trust import client_key, projected, run_name, shuffling_server
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
        "t", "learning-rate", "candidate-loss", "linearised-loss", "losses-accepted",
        "kernel-products", "solver-steps", "solver-error-estimate",
    )  # fmt: skip

    def check(self, config: BaseConfig, settings: Any) -> None:
        """Refuse a choice by examples that are missing."""
        examples, clients = config.validation_examples, config.validation_clients
        if (key := self.validates(config)) and bool(examples) == bool(clients):
            raise ConfigError(
                f"{key} = validation goes with one of validation-examples (kept on the server) and "
                f"validation-clients (held out), got {examples} and {clients}"
            )
        super().check(config, settings)

    def arguments(self, config: BaseConfig, settings: Any) -> dict[str, Any]:
        """Return the clients whose examples choose t."""
        partitions = range(config.num_clients - config.validation_clients, config.num_clients)
        chosen = settings.selection == "validation"
        return {"validation_partitions": list(partitions) if chosen else []}

    def judges(self, config: BaseConfig) -> bool:
        """Whether examples on the server choose t."""
        chosen = bool(self.validates(config)) and config.validation_examples > 0
        return chosen or super().judges(config)

    def validates(self, config: BaseConfig) -> str:
        """Return the key of `selection` if held-out examples choose t."""
        settings = self.settings_in(config)
        return str(settings.key("selection")) if settings.selection == "validation" else ""

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        """Make the strategy, with the automatic rate and the clients that choose t."""
        if self.settings_in(setup.config).auto_learning_rate:
            options["learning_rate"] = AUTO
        if self.validates(setup.config):  # else what is held out is for others
            sampling: Sampling = options["sampling"]
            options["sampling"] = sampling.copy(held_out=sorted(setup.absent))
        return super().strategy(setup, options)

    def require_resources(self, setup: Setup, models: int = 1) -> None:
        """Refuse a round of Jacobians, and their stack, that the server could not hold."""
        config, device = setup.config, setup.device
        x, _ = setup.data.train(setup.split.clients[0][:1])
        row = jacobian(setup.network.to(device), projected(config, x).to(device))
        size = sum(b.dense_size for b in row.blocks) * row.dtype.itemsize
        size = size if self.settings_in(config).structure == "dense" else row.nbytes
        counts = [sample_size(size, config.sampling_rate) for size in setup.split.sizes]
        largest = sorted(counts)[-config.clients_a_round :]
        require_memory(
            2 * size * sum(largest),
            f"a round of {len(largest)} clients, up to {sum(largest)} examples of "
            f"{size / 1e6:.1f} MB,",
            cure="lower clients-per-round or the examples of each, or use a smaller network",
        )


class CPNTKFLSettings(EvolvingSettings, frozen=True, eq=True):
    """What simulations add to the options of CP-NTK-FL."""

    shuffle: bool = setting(False, "have a shuffling server mix the clients' rows")


class _CPNTKFL(EvolvingMethod):
    name = "cp-ntk-fl"
    own_settings = CPNTKFLSettings
    strategy_class = CPNTKFL
    metrics = EvolvingMethod.metrics

    def seeded_protection(self, config: BaseConfig) -> list[str]:
        settings = self.settings_in(config)
        shuffled = [settings.key("shuffle")] if settings.shuffle else []
        return [*super().seeded_protection(config), *shuffled]

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        if self.settings_in(setup.config).shuffle:
            options["shuffling_server"] = shuffling_server(setup.config)
        return super().strategy(setup, options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        config = setup.config
        options["run"] = run_name(config)
        if self.settings_in(config).shuffle:
            options["shuffling_key"] = shuffling_server(config).public_key
            options["private_key"] = client_key(config, partition)
        return super().client(setup, partition, options)


METHODS = EvolvingMethod("ntk-fl", NTKFL), _CPNTKFL()
