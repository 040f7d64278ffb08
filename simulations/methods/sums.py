"""What the methods share whose clients send sums over features."""

from typing import Any, ClassVar

from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk.options import refuse_first
from fedntk.strategies import BaseStrategy
from fedntk.strategies.core.feature_sums import SumsStrategy

from ..config.config import Config
from ..config.settings import ConfigError, Settings, setting
from .method import Method, Setup


class SumsSettings(Settings, frozen=True, eq=True):
    """What simulations add to the options of sums."""

    keep_sums: bool = setting(
        False,
        "keep each client's sums, as many bytes as it sent, in details/sums of the run's folder, "
        "for fedntk unlearn",
    )


class SumsMethod(Method):
    """A method whose clients send sums, masked if wanted."""

    strategy_class: ClassVar[type[SumsStrategy]]
    own_settings = SumsSettings

    def arguments(self, config: Config, settings: Any) -> dict[str, Any]:
        """Return where sums are kept."""
        return {"keep_sums": config.folder / "details" / "sums" if settings.keep_sums else None}

    def validates(self, config: Config) -> str:
        """Return the key of the option for which the server needs examples."""
        name = self.strategy_class.validated(own := self.own(config))
        return str(own.key(name)) if name else ""

    def check(self, config: Config, settings: Any) -> None:
        """Refuse evaluations that reveal sums, and missing examples."""
        super().check(config, settings)
        secure, masks = settings.secure_aggregation, settings.key("secure_aggregation")
        private = secure or getattr(settings, "epsilon", 0.0)
        own_test = config.local_test_fraction or config.private_test
        key = self.validates(config)
        rules = {
            f"{masks if secure else settings.key('epsilon')}: clients refuse to evaluate on the "
            "examples of their sums, which losses would reveal; set clients-per-evaluation = 0, or "
            "local-test-fraction; "
            f"got {config.clients_per_evaluation} and 0": (
                private and config.clients_per_evaluation and not own_test
            ),
            f"{key} needs validation-examples, and no projection, as the server lacks its seed; "
            f"got {config.validation_examples} and {config.projection}": (
                key and (not config.validation_examples or config.projection)
            ),
        }
        refuse_first(rules, ConfigError)

    def strategy(self, setup: Setup, options: dict[str, Any]) -> BaseStrategy:
        """Make the strategy, with the server's examples if it needs them."""
        if self.validates(setup.config):
            options["validation"] = setup.data.train(setup.split.validation)
        return super().strategy(setup, options)

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make the client; a simulation's sends only masked sums if that is the method.

        It may repeat them: a run that was cut off asks again, and a simulation is of one owner.
        """
        secure = self.own(setup.config).secure_aggregation
        options = {"only_masked": secure, "allow_repeats": True, **options}
        return super().client(setup, partition, options)
