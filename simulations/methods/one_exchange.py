"""One exchange of sums over features: the last layer by ridge regression."""

from typing import Any

from flwr.client import NumPyClient

from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.strategies import OneExchange

from ..config.config import Config
from .method import Setup
from .sums import SumsMethod


class _OneExchange(SumsMethod):
    name = "one-exchange"
    strategy_class = OneExchange
    metrics = ("ridge", "epsilon", "delta")
    summarised = ("epsilon", "delta")

    def validates(self, config: Config) -> str:
        own = self.own(config)
        bounded = config.random_features and config.expand != "frequencies"
        in_steps = own.bits != UNQUANTISED and not (bounded or own.epsilon)
        return super().validates(config) or str(own.key("bits") if in_steps else "")

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make the client, which agrees to the run's epsilon."""
        own = self.own(setup.config)
        options["privacy_limit"] = (own.epsilon, own.delta) if own.epsilon else None
        return super().client(setup, partition, options)


METHOD = _OneExchange()
