"""CP-NTK-FL: NTK-FL with sampled, projected, compressed and shuffled rows."""

from typing import Any

from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.strategies import CPNTKFL, Strategy

from ..config.config import BaseConfig
from ..config.settings import setting
from ..simulated_trust import client_key, run_name, shuffling_server
from .method import Setup
from .ntk_fl import EvolvingMethod, EvolvingSettings


class CPNTKFLSettings(EvolvingSettings, frozen=True, eq=True):
    """What simulations add to the options of CP-NTK-FL."""

    shuffle: bool = setting(False, "have a shuffling server mix the clients' rows")


class _CPNTKFL(EvolvingMethod):
    name = "cp-ntk-fl"
    own_settings = CPNTKFLSettings
    strategy_class = CPNTKFL
    metrics = EvolvingMethod.metrics

    def seeded_protection(self, config: BaseConfig) -> list[str]:
        own = self.own(config)
        shuffled = [own.key("shuffle")] if own.shuffle else []
        return [*super().seeded_protection(config), *shuffled]

    def strategy(self, setup: Setup, options: dict[str, Any]) -> Strategy:
        if self.own(setup.config).shuffle:
            options["shuffling_server"] = shuffling_server(setup.config)
        return super().strategy(setup, options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        config = setup.config
        options["run"] = run_name(config)
        if self.own(config).shuffle:
            options["shuffling_key"] = shuffling_server(config).public_key
            options["private_key"] = client_key(config, partition)
        return super().client(setup, partition, options)


METHOD = _CPNTKFL()
