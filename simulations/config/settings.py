"""Settings: what configurations are made of."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

from fedntk.ntk.options import Declared, Option, Part, key_of, nearest, option, part, parts_of

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
        for name, declared in parts_of(type(self)).items():
            object.__setattr__(self, name, declared.check(getattr(self, name), self.key(name)))
        self.check()

    @classmethod
    def sections(cls) -> dict[str, type["Settings"]]:
        """Return the table of each part -> the class of its settings."""
        kinds = [cast("type[Settings]", declared.kind) for declared in parts_of(cls).values()]
        return {kind.table: kind for kind in kinds}

    @classmethod
    def from_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> Self:
        """Make settings from table -> name -> value, with those of their parts."""
        parts = {name: cls.section_from(name, tables) for name in parts_of(cls)}
        return cls(**{**tables.get(cls.table, {}), **parts})

    @classmethod
    def section_from(cls, name: str, tables: Mapping[str, Mapping[str, Any]]) -> "Settings | None":
        """Return a part's settings; None if it is optional and neither set nor has settings."""
        declared, switch = parts_of(cls)[name], tables.get(cls.table, {}).get(name)
        kind = cls.sections()[cls.key(name)]
        values = tables.get(kind.table, {})
        defaults = {name: option.default for name, option in kind.options().items()}
        # Flower's run-config has all keys of a part that is not there, with their defaults
        section = kind(**{n: value for n, value in values.items() if value != defaults.get(n, ...)})
        if not declared.optional or switch is True:
            return section
        if switch not in (None, False):
            raise ConfigError(
                f"{cls.key(name)}: expected true, false or a table of settings, got {switch!r}"
            )
        return section if (values if switch is None else section != kind()) else None

    @classmethod
    def checked(cls, name: str, value: Any, *, from_text: bool = False) -> Any:
        """Return a setting's value as its type; several numbers may always come as text."""
        declared = cls.setting_of(name)
        from_text = from_text or (isinstance(value, str) and isinstance(declared.default, tuple))
        try:
            return (declared.from_text if from_text else declared.check)(value, cls.key(name))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __repr__(self) -> str:
        """Show the values that are no defaults."""
        defaults = type(self)().values()
        changed = {key: value for key, value in self.values().items() if value != defaults.get(key)}
        return f"{type(self).__name__}({changed or ''})"

    @classmethod
    def key(cls, name: str) -> str:
        """Key of a setting for users: in kebab-case, after its table's name."""
        return f"{cls.table}.{key_of(name)}" if cls.table else key_of(name)

    @classmethod
    def setting_of(cls, name: str) -> Option:
        """Return the declaration of a setting; that of an optional part is whether it is there."""
        if name in cls.options():
            return cls.options()[name]
        return Option(name, bool, False, parts_of(cls)[name].meaning, {}, False, True, True)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the settings, with those of the optional parts."""
        parts = parts_of(cls).items()
        return [*cls.options(), *(name for name, declared in parts if declared.optional)]

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return what a setting may be, if it is one of several words."""
        return cls.setting_of(name).choices

    @classmethod
    def places(cls) -> dict[str, tuple[str, str]]:
        """Return key -> table and name there, with those of the parts."""
        places = {cls.key(name): (cls.table, name) for name in cls.names()}
        for section in cls.sections().values():
            places |= section.places()
        return places

    def values(self) -> dict[str, Value]:
        """Key -> value, with the tables' names in the keys, those of parts last; lists are text."""
        values = {self.key(n): o.plain(getattr(self, n)) for n, o in self.options().items()}
        for name, declared in parts_of(type(self)).items():
            section: Settings | None = getattr(self, name)
            if declared.optional:
                values[self.key(name)] = section is not None
            values |= {} if section is None else section.values()
        return values

    @classmethod
    def describe(cls) -> list[str]:
        """One line for each key, those of parts last: default, choices, meaning."""
        lines = [
            cls.setting_of(name).describe(cls.key(name), cls.choices(name)) for name in cls.names()
        ]
        return lines + [line for section in cls.sections().values() for line in section.describe()]


def settings_class(
    table: str,
    options: Mapping[str, Option],
    parts: Mapping[str, Part],
    base: type[Settings] = Settings,
) -> Any:
    """Make a class of settings; a number that must be set is 0 until it is, and a word empty."""
    annotations, fields = dict[str, Any](), dict[str, Any]()
    for name, declared in options.items():
        default = declared.default
        if default is dataclasses.MISSING:
            default = declared.kind() if declared.kind in (bool, int, float) else ""
        annotations[name], fields[name] = declared.kind, declared.field(default=default)
    for name, declared_part in parts.items():
        in_files = {key: o for key, o in declared_part.kind.options().items() if o.in_files}
        if isinstance(declared_part.default, Declared):
            in_files = {
                key: dataclasses.replace(o, default=getattr(declared_part.default, key))
                for key, o in in_files.items()
            }
        section = settings_class(f"{table}.{key_of(name)}", in_files, {})
        annotations[name] = section | None if declared_part.optional else section
        default = None if declared_part.default is None else section
        fields[name] = part(declared_part.meaning, default=default)
    body = {"table": table, "__doc__": f"Settings of {table}.", "__annotations__": annotations}
    keywords = {"frozen": True, "eq": True}
    return types.new_class("TableSettings", (base,), keywords, lambda n: n.update(body | fields))
