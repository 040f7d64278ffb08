"""What a strategy and its clients must agree on, sent with each message."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

PREFIX = "fedntk-"


@dataclass(frozen=True)
class Agreement:
    """What a strategy expects of its clients; travels in a message's configuration."""

    strategy: str  # its class name
    client: str  # class name of the clients that go with it
    replies: str  # such as "weights" or "Jacobians"
    loss: str = ""  # the clients' loss; empty if any will do
    projected: bool = False  # whether inputs are projected by a key server's seed
    schema: str = ""  # which columns, classes and units examples have; empty if not stated

    def to_config(self) -> dict[str, str | bool]:
        """Return keys that begin with ``fedntk-`` and their values."""
        return {PREFIX + field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self | None:
        """Read what :meth:`to_config` returned among other keys; None if it is absent."""
        values = {f.name: config[PREFIX + f.name] for f in fields(cls) if PREFIX + f.name in config}
        return cls(**values) if len(values) == len(fields(cls)) else None

    @staticmethod
    def owns(key: str) -> bool:
        """Whether a key of a configuration is one of these."""
        return key.startswith(PREFIX)
