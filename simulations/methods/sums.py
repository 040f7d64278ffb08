"""What the methods share whose clients send sums over features."""

from typing import Any

from fedntk.ntk.options import refuse_first

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
        sums: Any = self.own(config).sums
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
        rules = {
            f"{'secure' if secure else settings.key('noise')}: clients refuse to evaluate on the "
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

    def mask_options(self, config: BaseConfig) -> dict[str, Any]:
        """Return that a simulation's clients send only masked sums if that is the method.

        They may repeat them: a run that was cut off asks again, and a simulation is of one owner.
        """
        return {"only_masked": config.secure is not None, "allow_repeats": True}
