"""One exchange of sums over features: the last layer by ridge regression."""

from fedntk.ntk.payloads import UNQUANTISED
from fedntk.strategies import OneExchange

from ..config.config import Config
from .sums import SumsMethod


class _OneExchange(SumsMethod):
    name = "one-exchange"
    strategy_class = OneExchange
    metrics = ("ridge",)

    def validated(self, config: Config) -> str:
        own = self.own(config)
        if own.remove_harmful:
            return "remove_harmful"
        if own.auto_ridge and not own.validation_share:
            return "auto_ridge"
        return "bits" if own.bits != UNQUANTISED and not config.random_features else ""


METHOD = _OneExchange()
