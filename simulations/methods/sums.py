"""Methods whose clients send sums over features; one exchange of them."""

import math
from typing import Any

from fedntk.clients import CountedRows
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.strategies import OneExchange

from ..config.config import BaseConfig
from ..config.settings import ConfigError
from .method import Method, Setup


class SumsMethod(Method):
    """A method whose clients send sums, masked if wanted."""

    def part_arguments(self, name: str, config: BaseConfig, setup: Setup | None) -> dict[str, Any]:
        """Return where sums are kept, and the examples of the server that they need."""
        arguments = super().part_arguments(name, config, setup)
        if name == "storage":
            arguments["folder"] = config.folder / "details" / "sums"
        if name == "sums" and setup is not None:
            arguments["device"] = setup.device
            if self.validates(config):
                arguments["validation"] = setup.data.train(setup.split.validation)
        return arguments

    def validates(self, config: BaseConfig) -> str:
        """Return the key of the option for which the server needs examples."""
        sums: Any = self.settings_in(config).sums
        if sums is None or not sums.auto_ridge or sums.validation_share:
            return ""
        return str(sums.key("auto_ridge"))

    def check(self, config: BaseConfig, settings: Any) -> None:
        """Refuse evaluations that reveal sums, and missing examples."""
        super().check(config, settings)
        secure = config.secure is not None
        private = secure or self.mechanism(settings) is not None
        own_test = config.local_test_fraction or config.private_test
        key = self.validates(config)
        if private and config.clients_per_evaluation and not own_test:
            raise ConfigError(
                f"{'secure' if secure else settings.key('noise')}: clients refuse to evaluate on "
                "the examples of their sums, which losses would reveal; set "
                "clients-per-evaluation = 0, or local-test-fraction; got "
                f"{config.clients_per_evaluation} and 0"
            )
        if key and (not config.validation_examples or config.projection):
            raise ConfigError(
                f"{key} needs validation-examples, and no projection, as the server lacks its "
                f"seed; got {config.validation_examples} and {config.projection}"
            )

    def mask_options(self, config: BaseConfig) -> dict[str, Any]:
        """Return options of a simulation's clients, which may repeat: it is of one owner."""
        return {"only_masked": config.secure is not None, "allow_repeats": True}


def counted_rows(config: BaseConfig, partition: int) -> CountedRows:
    """Return which rows of a partition count in a run."""
    return CountedRows(config.folder / "details" / "rows" / str(partition))


FEWEST, MOST = 200, 1000  # features that are chosen by the size of an example
BANDWIDTH = 1.6  # of these


class _OneExchange(SumsMethod):
    name = "one-exchange"
    strategy_class = OneExchange
    metrics = ("ridge", "epsilon", "delta", "rows-deleted", "rows-added")
    summarised = ("epsilon", "delta")

    def part_arguments(self, name: str, config: BaseConfig, setup: Setup | None) -> dict[str, Any]:
        """Return where changes are recorded as well."""
        arguments = super().part_arguments(name, config, setup)
        if name == "changes":
            arguments["folder"] = config.folder / "details" / "changes"
        return arguments

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make a client that knows which of its rows count, if they may change."""
        if self.settings_in(setup.config).changes:
            default = counted_rows(setup.config, partition)
            named = options.setdefault("rows", default)
            if default.folder.is_dir() and not named.folder.is_dir():
                options["rows"] = default  # of a node that had no rows-path: deleted rows stay so
        return super().client(setup, partition, options)

    def random_features(
        self, config: BaseConfig, input_shape: tuple[int, ...]
    ) -> tuple[int, float]:
        """Return as many as make sums of up to 324 examples' bytes, if none are set."""
        if not self._chooses(config):
            return super().random_features(config, input_shape)
        number = 4 * round(18 / 4 * math.sqrt(math.prod(input_shape)))
        default = config.bandwidth == BaseConfig.options()["bandwidth"].default
        return min(max(number, FEWEST), MOST), BANDWIDTH if default else config.bandwidth

    def _chooses(self, config: BaseConfig) -> bool:
        """Whether the method chooses the number of features."""
        settings = self.settings_in(config)
        whole = settings.sums.bits != UNQUANTISED and settings.noise is None
        chosen = config.random_features or config.validation_examples
        has_features = config.is_pretrained or config.takes_features
        return whole and not chosen and not has_features and config.expand != "frequencies"

    def validates(self, config: BaseConfig) -> str:
        settings = self.settings_in(config)
        if settings.ledger is not None:
            return str(settings.key("ledger"))
        unit = config.is_pretrained or config.adapters == "tangent-lora"  # features of length 1
        bounded = unit or bool(config.random_features)
        bounded = bounded and config.expand != "frequencies"
        is_known = bounded or settings.noise is not None or self._chooses(config)
        in_steps = settings.sums.bits != UNQUANTISED and not is_known
        return super().validates(config) or (settings.sums.key("bits") if in_steps else "")


METHOD = _OneExchange()
