"""CP-NTK-FL: NTK-FL with sampled, projected, compressed and shuffled rows, and with noise."""

from dataclasses import dataclass
from typing import Any

from flwr.client import NumPyClient

from fedntk.clients import CPNTKFLClient
from fedntk.ntk.payloads import check_compression, check_privacy
from fedntk.strategies import CPNTKFL, BaseStrategy

from ..config.config import Config
from ..config.settings import ConfigError, setting
from ..deploy.simulated_trust import run_name, shuffling_server
from .method import Setup
from .ntk_fl import EvolvingMethod, EvolvingSettings

__all__ = ["METHOD"]


@dataclass(frozen=True, kw_only=True)
class CPNTKFLSettings(EvolvingSettings):
    """Settings of CP-NTK-FL: those of NTK-FL, and of what it does to the rows that are sent."""

    table = "cp-ntk-fl"

    sparsity: float = setting(
        0.0, "share of each tensor's numbers that is dropped", at_least=0, below=1
    )
    bits: int = setting(32, "of each number sent, 1 ... 16; 32: as they are", at_least=1)
    shuffle: bool = setting(False, "have a shuffling server mix the clients' rows")
    clip: float = setting(0.0, "norm of a row under differential privacy; 0: none", at_least=0)
    noise_multiplier: float = setting(0.0, "noise on a row, in units of clip", at_least=0)
    label_noise: float = setting(
        0.0, "probability that a label is drawn anew", at_least=0, at_most=1
    )
    delta: float = setting(1e-5, "at which epsilon is reported", above=0, below=1)

    def check(self) -> None:
        """Refuse what cannot be quantised, and noise without a norm."""
        super().check()
        try:
            check_compression(self.sparsity, self.bits)
            check_privacy(self.clip, self.noise_multiplier, self.label_noise)
        except ValueError as error:
            raise ConfigError(f"{self.table}: {str(error).replace('_', '-')}") from None


class _CPNTKFL(EvolvingMethod[CPNTKFLSettings]):
    name = "cp-ntk-fl"
    settings = CPNTKFLSettings
    metrics = (*EvolvingMethod.metrics, "epsilon", "label-noise", "noise-multiplier")

    def check(self, config: Config, settings: CPNTKFLSettings) -> None:
        super().check(config, settings)
        if not settings.noise_multiplier:
            return
        noise = f"{settings.key('noise_multiplier')} = {settings.noise_multiplier:g}"
        by_clients = settings.selection == "validation" and config.validation_clients
        if settings.selection == "clients" or by_clients:
            raise ConfigError(
                f"{settings.key('selection')} = {settings.selection} asks clients for losses of "
                f"their examples, which {noise} does not cover; use linearised, or "
                "validation with validation-examples"
            )
        own_test = config.local_test_fraction or config.private_test
        if config.clients_per_evaluation and not own_test:
            raise ConfigError(
                f"evaluations on training examples are not covered by {noise}; set "
                "local-test-fraction, or clients-per-evaluation = 0, or private-test = true"
            )

    def seeded_protection(self, config: Config) -> list[str]:
        own = self.own(config)
        used = {"shuffle": own.shuffle, "noise_multiplier": own.noise_multiplier > 0}
        return [
            *super().seeded_protection(config),
            *(own.key(name) for name, is_used in used.items() if is_used),
        ]

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        own = self.own(setup.config)
        return CPNTKFL(
            sparsity=own.sparsity,
            bits=own.bits,
            shuffling_server=shuffling_server(setup.config) if own.shuffle else None,
            noise_multiplier=own.noise_multiplier,
            label_noise=own.label_noise,
            delta=own.delta,
            **self.evolution(setup, options),
        )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        config, own = setup.config, self.own(setup.config)
        return CPNTKFLClient(
            structure=own.structure,
            sparsity=own.sparsity,
            bits=own.bits,
            clip=own.clip,
            noise_multiplier=own.noise_multiplier,
            label_noise=own.label_noise,
            noise_seed=(config.seed, partition),
            shuffling_key=shuffling_server(config).public_key if own.shuffle else None,
            run=run_name(config),
            **options,
        )


METHOD = _CPNTKFL()
