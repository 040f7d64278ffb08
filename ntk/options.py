"""Options and state of a method, each declared once, as fields of its class.

From an option's one line come the constructor's keyword argument, its check, the row in the docs,
the key of the simulations' settings, what travels to clients, and what a checkpoint compares. From
a state's one line come its first value, what a checkpoint holds, and what a new run resets::

    class NTKFL(FlowOptions, BaseStrategy):
        selection: Literal["clients", "linearised"] = option("how t is chosen", default="clients")
        rounds_without_step: int = state(int)
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ForwardRef, Literal, Self, Union, dataclass_transform, get_args, get_origin

import numpy as np

OPTION, STATE, RESET = "option", "state", "reset"  # keys of a field's metadata
PREFIX = "option-"  # begins the names under which options travel
_LIMITS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "at least"),
    "at_most": (operator.le, "at most"),
    "above": (operator.gt, "more than"),
    "below": (operator.lt, "less than"),
}


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a class.

    `kind` is the type as annotated: ``bool``, ``int``, ``float``, ``str``, ``Literal``, a tuple or
    sequence of one of these, a function, or a union; values of other types are not checked.
    `limits` are ``at_least``, ``at_most``, ``above`` and ``below`` of a number, or of each in a
    tuple. Infinity is refused unless it is the value of ``at_most``.
    """

    name: str
    kind: Any
    default: Any  # dataclasses.MISSING if it must be given
    meaning: str  # one line
    limits: Mapping[str, float]
    to_clients: bool  # whether the value travels to clients
    compared: bool  # whether a checkpoint with another value is refused
    in_files: bool  # whether configuration files hold it, as numbers or words

    def check(self, value: Any, key: str = "") -> Any:
        """Return a value as the option's type; ValueError if it is of another or out of range.

        NumPy's numbers, paths, lists and whole numbers for floats are converted. `key` is the name
        for errors, by default the option's own.
        """
        key = key or self.name
        if value is self.default:
            return value
        found = _convert(self.kind, value)
        if found is _UNFIT:
            got = repr(value) if isinstance(value, str) else f"{type(value).__name__} {value!r}"
            near = nearest(value, self.choices) if isinstance(value, str) else ""
            raise ValueError(f"{key}: expected {_describe_kind(self.kind)}, got {got}{near}")
        for number in found if isinstance(found, tuple) else (found,):
            if type(number) in (int, float):
                self._check_number(number, key)
        return found

    def _check_number(self, number: float, key: str) -> None:
        if math.isnan(number) or (math.isinf(number) and self.limits.get("at_most") != math.inf):
            raise ValueError(f"{key}: expected a finite number, got {number}")
        for limit, bound in self.limits.items():
            holds, words = _LIMITS[limit]
            if not holds(number, bound):
                raise ValueError(f"{key}: expected {words} {bound:g}, got {number}")

    def field(self, **changes: Any) -> Any:
        """Declare the same option for another class, with some changes."""
        kept = {"default": self.default, "to_clients": self.to_clients, **self.limits}
        return option(**{"meaning": self.meaning, **kept, **changes})

    @property
    def choices(self) -> tuple[str, ...]:
        """What the value may be, if it is one of several words."""
        return tuple(arg for arg in _alternatives(self.kind) if isinstance(arg, str))

    def from_text(self, text: str, key: str = "") -> Any:
        """Read a value from text; numbers of a tuple have commas between them."""
        for kind in _alternatives(self.kind):
            value = _read(kind, text)
            if value is not _UNFIT:
                return self.check(value, key)
        return self.check(text, key)

    def plain(self, value: Any) -> bool | int | float | str:
        """Return a value as a text file holds it: tuples as text."""
        return ",".join(map("{:g}".format, value)) if isinstance(value, tuple) else value

    def describe(self, key: str = "", choices: Sequence[str] = ()) -> str:
        """Return one line: name, default, choices (the type's by default), meaning."""
        default = "" if self.default is dataclasses.MISSING else f" = {self.plain(self.default)!r}"
        words = choices or self.choices
        among = f" ({', '.join(words)})" if words else ""
        return f"{key or self.name}{default}{among}: {self.meaning}"

    @property
    def default_text(self) -> str:
        """The default as in a signature; empty if the value must be given."""
        if self.default is dataclasses.MISSING:
            return ""
        return str(getattr(self.default, "__qualname__", repr(self.default)))

    def document(self) -> str:
        """Return the option's entry in a NumPy docstring: name, type, default and meaning."""
        default = f", default {self.default_text}" if self.default_text else ""
        meaning = self.meaning[0].upper() + self.meaning[1:]
        return f"{self.name} : {_describe_kind(self.kind)}{default}\n    {meaning}."


def option(
    meaning: str,
    *,
    default: Any = dataclasses.MISSING,
    kw_only: bool = True,
    to_clients: bool = False,
    compared: bool = True,
    in_files: bool = True,
    **limits: float,
) -> Any:
    """Declare an option of a :class:`Declared` class; see :class:`Option`."""
    if not limits.keys() <= _LIMITS.keys():
        raise TypeError(f"limits: expected some of {', '.join(_LIMITS)}, got {sorted(limits)}")
    declared = (meaning, limits, to_clients, compared, in_files)
    return dataclasses.field(default=default, kw_only=kw_only, metadata={OPTION: declared})


def shared(meaning: str, *, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare an option that travels to clients."""
    return option(meaning, default=default, to_clients=True, **limits)


def argument(meaning: str, *, default: Any = dataclasses.MISSING, kw_only: bool = True) -> Any:
    """Declare an argument that no text file holds and no checkpoint compares, such as a model."""
    return option(meaning, default=default, kw_only=kw_only, compared=False, in_files=False)


def state(
    factory: Callable[[], Any],
    *,
    init: Literal[False] = False,
    saved: bool = True,
    reset: bool = True,
) -> Any:
    """Declare what an object keeps from round to round; `factory` makes the first value.

    A checkpoint holds what is `saved`; all else is made anew when a run begins or goes on. With
    `reset` a new run of the object begins with the first value. `init` is for type checkers: state
    is no argument of the constructor.
    """
    metadata = {STATE: saved, RESET: reset}
    return dataclasses.field(init=init, default_factory=factory, metadata=metadata)


@dataclass_transform(kw_only_default=True, field_specifiers=(option, shared, argument, state))
class Declared:
    """Base of classes with declared options and state; they become dataclasses.

    Examples
    --------
    >>> class Rate(Declared):
    ...     rate: float = option("learning rate", default=0.1, above=0, to_clients=True)
    >>> Rate(rate=1).rate, Rate.from_config(Rate(rate=2).to_config()).rate
    (1.0, 2.0)
    >>> Rate(rate=0)
    Traceback (most recent call last):
    ValueError: rate: expected more than 0, got 0.0
    """

    def __init_subclass__(cls, *, frozen: bool = False, eq: bool = False) -> None:
        super().__init_subclass__()
        # text with `from __future__ import annotations`
        cls.__annotations__ = inspect.get_annotations(cls, eval_str=True)
        init = not any(
            "__init__" in vars(base) and base.__init__ is not base.__dict__.get("_made_init")
            for base in cls.__mro__
            if issubclass(base, Declared)
        )  # a constructor written by hand is handed down
        dataclasses.dataclass(kw_only=True, eq=eq, repr=False, init=init, frozen=frozen)(cls)
        if init:
            cls._made_init = cls.__init__  # type: ignore[attr-defined]
        else:
            cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]
        _list_parameters(cls)

    def __post_init__(self) -> None:
        for name, own in self.options().items():
            object.__setattr__(self, name, own.check(getattr(self, name), self.key(name)))
        self.check()

    def check(self) -> None:
        """Refuse options that do not fit together; reads options only."""

    @classmethod
    @functools.cache
    def options(cls) -> Mapping[str, Option]:
        """Return the options by name, those of base classes first."""
        return {
            field.name: Option(field.name, field.type, field.default, *field.metadata[OPTION])
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if OPTION in field.metadata
        }

    @classmethod
    @functools.cache
    def states(cls) -> Mapping[str, Any]:
        """Return name -> type of the state that a checkpoint holds."""
        every = dataclasses.fields(cls)  # type: ignore[arg-type]
        return {field.name: field.type for field in every if field.metadata.get(STATE)}

    @classmethod
    def key(cls, name: str) -> str:
        """Return the name of an option in errors."""
        return name

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Run :meth:`check` on some options, the others at their defaults, and make no object."""
        bare = object.__new__(cls)
        for name, own in cls.options().items():
            object.__setattr__(bare, name, values.get(name, own.default))
        bare.check()

    def compared_options(self) -> dict[str, Any]:
        """Return the values on which results depend, as JSON holds them."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name, own in self.options().items()
            if own.compared
        }

    def reset_state(self, *, saved_too: bool = True) -> None:
        """Give all state its first value; or only the state that no checkpoint holds."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.metadata.get(RESET) and (saved_too or not field.metadata[STATE]):
                make: Any = field.default_factory
                setattr(self, field.name, make())

    def to_config(self) -> dict[str, Any]:
        """Return the options that travel, as a message's configuration holds them."""
        return {
            PREFIX + key_of(name): list(value) if isinstance(value, tuple) else value
            for name, own in self.options().items()
            if own.to_clients and (value := getattr(self, name)) is not None
        }

    @staticmethod
    def owns(key: str) -> bool:
        """Whether a key of a configuration is of an option."""
        return key.startswith(PREFIX)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_config` returned among other keys."""
        keys = {name: PREFIX + key_of(name) for name in cls.options()}
        required = [n for n, o in cls.options().items() if o.to_clients and o.default is not None]
        if missing := [keys[name] for name in required if keys[name] not in config]:
            raise ValueError(f"configuration: expected {', '.join(missing)}, got {sorted(config)}")
        return cls(**{name: config[key] for name, key in keys.items() if key in config})

    @classmethod
    def of_message(cls, config: Mapping[str, Any], needed: str = "step") -> Self | None:
        """Read a message's configuration; None if it lacks an option."""
        return cls.from_config(config) if PREFIX + key_of(needed) in config else None


def key_of(name: str) -> str:
    """Return a name in kebab-case."""
    return name.replace("_", "-")


def refuse_first(rules: Mapping[str, Any], kind: type[ValueError] = ValueError) -> None:
    """Raise the error with the first text whose rule is broken: text -> whether it is."""
    if broken := next((said for said, found in rules.items() if found), ""):
        raise kind(broken)


def nearest(value: str, known: Iterable[str]) -> str:
    """Say which of the known words is meant, if one is near; empty if none is."""
    near = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


_UNFIT: Any = object()


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types and words that a value may be."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(each for member in get_args(kind) for each in _alternatives(member))
    return (kind,)


def _item_of(kind: Any) -> Any:
    """Return the type of a tuple's or sequence's items; None if it is neither."""
    return get_args(kind)[0] if get_origin(kind) in (tuple, Sequence) else None


def _convert(kind: Any, value: Any) -> Any:
    """Return a value as a type, or _UNFIT."""
    given, value = value, value.item() if isinstance(value, np.generic) else value
    for one in _alternatives(kind):
        if isinstance(one, str):
            if isinstance(value, str) and value == one:
                return value
        elif one in (bool, int, types.NoneType):
            if type(value) is one:
                return value
        elif one is float:
            if type(value) in (int, float):
                return float(value)
        elif one is str:
            if isinstance(value, str | os.PathLike):
                return os.fspath(value)
        elif get_origin(one) is Callable:
            if callable(value):
                return value
        elif (item := _item_of(one)) is not None:
            several = isinstance(value, Sequence | np.ndarray | set | frozenset)
            if several and not isinstance(value, str):
                items = tuple(_convert(item, each) for each in value)
                if not any(each is _UNFIT for each in items):
                    return items
        else:  # a type that is not checked
            return given
    return _UNFIT


def _read(kind: Any, text: str) -> Any:
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), _UNFIT)
    if isinstance(kind, str):
        return text if text == kind else _UNFIT
    item = _item_of(kind)
    try:
        if item is not None:
            return tuple(item(part) for part in text.split(",") if part.strip())
        return kind(text) if kind in (int, float, str) else _UNFIT
    except ValueError:
        return _UNFIT


def _describe_kind(kind: Any) -> str:
    """Say in words what a value may be."""
    words, types_ = [], []
    for one in _alternatives(kind):
        if isinstance(one, str):
            words.append(one)
        elif (item := _item_of(one)) is not None:
            types_.append(f"a sequence of {item.__name__}")
        elif isinstance(one, ForwardRef):  # a name in quotes, of what is slow to import
            types_.append(one.__forward_arg__.rpartition(".")[2])
        else:
            types_.append("None" if one is types.NoneType else getattr(one, "__name__", str(one)))
    if not types_:
        return f"one of {', '.join(words)}"
    return " or ".join([*types_, *map(repr, words)])


def _signature(cls: type[Declared]) -> inspect.Signature:
    """Return the signature of a constructor written by hand, with the options among its ``**``."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        named = {parameter.name for parameter in parameters}
        parameters[-1:-1] = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if o.default is dataclasses.MISSING else o.default,
                annotation=o.kind,
            )
            for name, o in cls.options().items()
            if name not in named
        ]
    return inspect.Signature(parameters, return_annotation=None)


def _list_parameters(cls: type[Declared]) -> None:
    """Append all options to a class's docstring: its own first, then those of the nearest bases."""
    text = inspect.cleandoc(cls.__doc__ or "")
    depth = {
        name: number
        for number, base in reversed(list(enumerate(cls.__mro__)))
        for name in vars(base).get("__annotations__", {})
    }
    options = sorted(cls.options().values(), key=lambda option: depth[option.name])
    title = "Parameters"
    if f"{title}\n---" in text:  # some are described by hand
        title, options = "Other Parameters", [o for o in options if f"\n{o.name} :" not in text]
    if options:
        rows = "\n".join(option.document() for option in options)
        text += f"\n\n{title}\n{'-' * len(title)}\n{rows}"
    cls.__doc__ = f"{text}\n"
