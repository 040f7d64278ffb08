"""Settings: what configurations are made of."""

from typing import Any, ClassVar

from fedntk.ntk.options import Declared, key_of, nearest, option

from ..errors import ConfigError

__all__ = ["ConfigError", "Settings", "key_of", "nearest", "setting"]

Value = bool | float | int | str


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare one setting; limits are those of :func:`fedntk.ntk.options.option`."""
    return option(meaning, default=default, **limits)


class Settings(Declared, frozen=True, eq=True):
    """Base of classes whose fields are settings; checked when made.

    Examples
    --------
    >>> class Mine(Settings, frozen=True, eq=True):
    ...     table = "mine"
    ...     local_steps: int = setting(5, "local steps a round", at_least=1)
    >>> Mine(local_steps=7)
    Mine({'mine.local-steps': 7})
    """

    table: ClassVar[str] = ""  # of TOML, which holds them; empty: none

    def __post_init__(self) -> None:
        for name in self.options():
            object.__setattr__(self, name, self.checked(name, getattr(self, name)))
        self.check()

    @classmethod
    def checked(cls, name: str, value: Any, *, from_text: bool = False) -> Any:
        """Return a setting's value as its type; several numbers may always come as text."""
        own = cls.options()[name]
        from_text = from_text or (isinstance(value, str) and isinstance(own.default, tuple))
        try:
            return (own.from_text if from_text else own.check)(value, cls.key(name))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __repr__(self) -> str:
        """Show the values that are no defaults."""
        defaults = type(self)().values()
        own = {key: value for key, value in self.values().items() if value != defaults.get(key)}
        return f"{type(self).__name__}({own or ''})"

    @classmethod
    def key(cls, name: str) -> str:
        """Key of a setting for users: in kebab-case, after its table's name."""
        return f"{cls.table}.{key_of(name)}" if cls.table else key_of(name)

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return what a setting may be, if it is one of several words."""
        return cls.options()[name].choices

    def values(self) -> dict[str, Value]:
        """Key -> value, with the table's name in the keys; lists are text."""
        return {self.key(n): own.plain(getattr(self, n)) for n, own in self.options().items()}

    @classmethod
    def describe(cls) -> list[str]:
        """One line for each key: default, choices, meaning."""
        return [
            own.describe(cls.key(name), cls.choices(name)) for name, own in cls.options().items()
        ]
