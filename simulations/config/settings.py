"""Settings with a type, limits and a description each: what configurations are made of."""

import contextlib
import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import ConfigError

__all__ = ["ConfigError", "Settings", "key_of", "nearest", "numbers", "setting"]

Value = bool | float | int | str

_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("at_least", operator.ge, "at least"),
    ("at_most", operator.le, "at most"),
    ("above", operator.gt, "more than"),
    ("below", operator.lt, "less than"),
)


def setting(default: Any, doc: str, *, formerly: str = "", **limits: Any) -> Any:
    """Declare one setting of a :class:`Settings` class.

    Parameters
    ----------
    default : bool, int, float or str
        Its type is the setting's type.
    doc : str
        Its meaning, in one line.
    formerly : str
        Another key that it once had, which error messages then explain.
    **limits
        ``at_least``, ``at_most``, ``above``, ``below``. Choices are written as the field's type:
        ``Literal["a", "b"]``.
    """
    return dataclasses.field(
        default=default, metadata={"doc": doc, "formerly": formerly, "limits": limits}
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of frozen dataclasses whose fields are options; checked when made.

    Attributes
    ----------
    table : str
        Name of the TOML table that holds them; empty for settings that stand in no table.
    types : dict
        Name -> type of each field, as annotated.

    Raises
    ------
    ConfigError
        If a value is of a wrong type or out of range, or two do not fit together.

    Examples
    --------
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Mine(Settings):
    ...     table = "mine"
    ...     local_steps: int = setting(5, "local steps a round", at_least=1)
    >>> Mine(local_steps=0)
    Traceback (most recent call last):
    fedntk.simulations.errors.ConfigError: mine.local-steps: expected at least 1, got 0
    """

    table: ClassVar[str] = ""
    types: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls.types = get_type_hints(cls)

    def __post_init__(self) -> None:
        for name in self.options():
            object.__setattr__(self, name, self.checked(name, getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Refuse settings that do not fit together, with a ConfigError."""

    @classmethod
    def options(cls) -> dict[str, "dataclasses.Field[Any]"]:
        """Name -> field of each setting."""
        return {field.name: field for field in fields(cls) if "doc" in field.metadata}

    @classmethod
    def key(cls, name: str) -> str:
        """Key of a setting for users: in kebab-case, after its table's name."""
        return f"{cls.table}.{key_of(name)}" if cls.table else key_of(name)

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return what a setting may be, if it is one of several words."""
        kind = cls.types[name]
        return get_args(kind) if get_origin(kind) is Literal else ()

    @classmethod
    def checked(cls, name: str, value: Any) -> Value:
        """Return a setting's value as its type.

        Raises
        ------
        ConfigError
            If it is of another type or out of range.
        """
        field, key = cls.options()[name], cls.key(name)
        expected: type[Any] = type(field.default)
        value = _plain(value, expected)
        if type(value) is not expected:
            raise ConfigError(
                f"{key}: expected {expected.__name__}, got {type(value).__name__} {value!r}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: expected a finite number, got {value}")
        if (choices := cls.choices(name)) and value not in choices:
            raise ConfigError(
                f"{key}: expected one of {', '.join(choices)}, "
                f"got {value!r}{nearest(str(value), choices)}"
            )
        limits = field.metadata["limits"]
        for limit, holds, words in _LIMITS:
            if limit in limits and not holds(value, limits[limit]):
                raise ConfigError(f"{key}: expected {words} {limits[limit]}, got {value}")
        checked: Value = value
        return checked

    @classmethod
    def convert(cls, name: str, text: str) -> Value:
        """Read a setting's value from text, as its type.

        Raises
        ------
        ConfigError
            If the text is no such value.
        """
        kind: type[Any] = type(cls.options()[name].default)
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        else:
            with contextlib.suppress(ValueError):
                value: Value = kind(text)
                return value
        raise ConfigError(f"{cls.key(name)}: expected {kind.__name__}, got {text!r}")

    def values(self) -> dict[str, Value]:
        """Key -> value, with the table's name in the keys."""
        return {self.key(name): getattr(self, name) for name in self.options()}

    @classmethod
    def describe(cls) -> list[str]:
        """One line for each key: default, choices, meaning."""
        lines = []
        for name, field in cls.options().items():
            choices = cls.choices(name)
            among = f" ({', '.join(choices)})" if choices else ""
            lines.append(f"{cls.key(name)} = {field.default!r}{among}: {field.metadata['doc']}")
        return lines


def nearest(value: str, known: Iterable[str]) -> str:
    """Say which of the known words is meant, if one is near; empty if none is."""
    near = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def key_of(name: str) -> str:
    """Return a field's name in kebab-case."""
    return name.replace("_", "-")


def numbers(key: str, text: str, kind: type) -> list[Any]:
    """Read numbers with commas between them.

    Raises
    ------
    ConfigError
        If the text is something else.
    """
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"{key}: expected numbers with commas between them, got {text!r}"
        ) from None


def _plain(value: Any, expected: type) -> Any:
    """Convert what users have at hand: NumPy's numbers, paths, whole numbers for floats."""
    if isinstance(value, np.generic):
        value = value.item()
    if expected is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    return float(value) if expected is float and type(value) is int else value
