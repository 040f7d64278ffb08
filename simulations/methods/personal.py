"""What the methods share whose clients have models of their own."""

from pathlib import Path
from typing import Any, ClassVar

from flwr.client import NumPyClient

from fedntk.clients import PersonalisedClient

from ..config.config import Config
from ..config.settings import ConfigError
from .method import Method, S, Setup

__all__ = ["PersonalMethod", "personal_cache"]


def personal_cache(config: Config) -> Path:
    """Return the folder in which the clients of a run keep what is theirs."""
    return config.folder / "cache" / "personal"


class PersonalMethod(Method[S]):
    """A method whose models are the clients' own: they are judged by the clients' evaluations.

    Attributes
    ----------
    learns_on_server : bool
        Whether the server's model changes from its first weights.
    """

    headline: ClassVar[str] = "client-accuracy-mean"
    learns_on_server: ClassVar[bool] = True

    def check(self, config: Config, settings: S) -> None:
        """Refuse to stop early by a model that never changes."""
        super().check(config, settings)
        if config.patience and not (self.learns_on_server or config.monitor.startswith("client-")):
            raise ConfigError(
                f"patience = {config.patience}: with {self.name} the server's model never changes, "
                f"so monitor = {config.monitor} would stop every run; set monitor = {self.headline}"
            )

    def client(self, setup: Setup, partition: int, options: dict[str, Any]) -> NumPyClient:
        """Make a client that keeps its personal arrays in the run's folder."""
        del partition
        cache = personal_cache(setup.config)
        return PersonalisedClient(cache=cache, **setup.config.local_sgd, **options)
