"""One exchange of sums over features: the last layer by ridge regression."""

import math

from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.strategies import OneExchange

from ..config.config import BaseConfig
from .sums import SumsMethod

FEWEST, MOST = 200, 1000  # features that are chosen by the size of an example
BANDWIDTH = 1.6  # of these


class _OneExchange(SumsMethod):
    name = "one-exchange"
    strategy_class = OneExchange
    metrics = ("ridge", "epsilon", "delta")
    summarised = ("epsilon", "delta")

    def random_features(
        self, config: BaseConfig, input_shape: tuple[int, ...]
    ) -> tuple[int, float]:
        """Return as many features as make sums of up to 324 examples' bytes, if none are set.

        Their size is known, so rounding them needs no examples on the server.
        """
        if not self._chooses(config):
            return super().random_features(config, input_shape)
        number = 4 * round(18 / 4 * math.sqrt(math.prod(input_shape)))
        default = config.bandwidth == BaseConfig.options()["bandwidth"].default
        return min(max(number, FEWEST), MOST), BANDWIDTH if default else config.bandwidth

    def _chooses(self, config: BaseConfig) -> bool:
        """Whether the method chooses the number of features."""
        own = self.own(config)
        whole = own.sums.bits != UNQUANTISED and own.noise is None
        chosen = config.random_features or config.validation_examples
        return whole and not chosen and config.expand != "frequencies"

    def validates(self, config: BaseConfig) -> str:
        own = self.own(config)
        if own.ledger is not None:
            return str(own.key("ledger"))
        bounded = config.random_features and config.expand != "frequencies"
        is_known = bounded or own.noise is not None or self._chooses(config)
        in_steps = own.sums.bits != UNQUANTISED and not is_known
        return super().validates(config) or (own.sums.key("bits") if in_steps else "")


METHOD = _OneExchange()
