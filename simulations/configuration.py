"""The configuration of a run, with the table of all methods."""

from collections.abc import Mapping
from typing import Any, ClassVar

from . import methods
from .config.config import BaseConfig


class Config(BaseConfig, frozen=True, eq=False):
    """All settings of a run; a ConfigError says which of them cannot work.

    ``Config.describe()`` lists each key with its default, limits and meaning. Settings of one
    method are given as a dictionary under its name; those of other methods than the chosen one are
    checked and kept, and have no effect.

    Examples
    --------
    >>> config = Config(num_clients=20, method="tct", tct={"num_features": 1000})
    >>> config.clients_a_round, config.settings.num_features
    (10, 1000)
    >>> config.replace(tct={"local_steps": 50}).settings.num_features
    1000
    """

    method_table: ClassVar[Any] = methods

    def __init__(self, *layers: Mapping[str, Any], **overrides: Any) -> None:
        super().__init__(*layers, **overrides)
