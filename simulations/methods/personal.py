"""What the methods share whose clients have models of their own."""

from typing import ClassVar

from ..config.config import Config
from ..config.settings import ConfigError, Settings
from .method import Method


class PersonalMethod(Method[Settings]):
    """A method whose models are the clients' own: they are judged by the clients' evaluations."""

    headline: ClassVar[str] = "client-accuracy-mean"
    learns_on_server: ClassVar[bool] = True  # else the server's model keeps its first weights

    def check(self, config: Config, settings: Settings) -> None:
        """Refuse to stop early by a model that never changes."""
        super().check(config, settings)
        if config.patience and not (self.learns_on_server or config.monitor.startswith("client-")):
            raise ConfigError(
                f"patience = {config.patience}: with {self.name} the server's model never changes, "
                f"so monitor = {config.monitor} would stop every run; set monitor = {self.headline}"
            )
