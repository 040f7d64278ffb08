"""CP-NTK-FL: NTK-FL with sampled, projected, compressed and shuffled rows, and with noise."""

from typing import Any

from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.strategies import CPNTKFL, BaseStrategy

from ..config.config import Config
from ..config.settings import ConfigError, setting
from ..deploy.simulated_trust import client_key, run_name, shuffling_server
from .method import Setup
from .ntk_fl import EvolvingMethod, EvolvingSettings


class CPNTKFLSettings(EvolvingSettings, frozen=True, eq=True):
    """What simulations add to the options of CP-NTK-FL."""

    shuffle: bool = setting(False, "have a shuffling server mix the clients' rows")


class _CPNTKFL(EvolvingMethod):
    name = "cp-ntk-fl"
    own_settings = CPNTKFLSettings
    strategy_class = CPNTKFL
    metrics = (*EvolvingMethod.metrics, "epsilon", "label-noise", "noise-multiplier")

    def check(self, config: Config, settings: Any) -> None:
        super().check(config, settings)
        if not settings.noise_multiplier:
            return
        noise = f"{settings.key('noise_multiplier')} = {settings.noise_multiplier:g}"
        own_test = config.local_test_fraction or config.private_test
        if config.clients_per_evaluation and not own_test:
            raise ConfigError(
                f"evaluations on training examples are not covered by {noise}; set "
                "local-test-fraction, or clients-per-evaluation = 0, or private-test = true"
            )

    def seeded_protection(self, config: Config) -> list[str]:
        own = self.own(config)
        used = [name for name in ("shuffle", "noise_multiplier") if getattr(own, name)]
        return [*super().seeded_protection(config), *map(own.key, used)]

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        if self.own(setup.config).shuffle:
            options["shuffling_server"] = shuffling_server(setup.config)
        return super().strategy(setup, options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        config = setup.config
        options["run"] = run_name(config)
        if not config.may_be_private:  # else noise that nobody can draw again
            options["noise_seed"] = (config.seed, partition)
        if self.own(config).shuffle:
            options["shuffling_key"] = shuffling_server(config).public_key
            options["private_key"] = client_key(config, partition)
        return super().client(setup, partition, options)


METHOD = _CPNTKFL()
