"""Options and state of a method, each declared once, as fields of its class.

An option's line makes the constructor's keyword argument with its check, the entry in docstrings,
the key in configurations, what travels to clients and what a checkpoint compares. A state's line
has its first value and what a checkpoint holds. Options of one matter are an object, a part::

    class NTKFL(Strategy):
        selection: Literal["clients", "linearised"] = option("how t is chosen", default="clients")
        screening: Screening = part("how malicious replies are found", default=Screening)
        secure: SecureAggregation | None = part("sums under masks", default=None)
        rounds_without_step: int = state(int)
"""

import dataclasses
import difflib
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

import numpy as np

OPTION, PART, STATE, RESET = "option", "part", "state", "reset"  # keys of a field's metadata
PREFIX = "option-"  # begins the names under which options travel
D = TypeVar("D", bound="Declared")
_UNFIT: Any = object()  # what a value becomes that is not of a type
_LIMITS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "at least"),
    "at_most": (operator.le, "at most"),
    "above": (operator.gt, "more than"),
    "below": (operator.lt, "less than"),
}


@dataclasses.dataclass(frozen=True)
class _Parameter:
    name: str
    kind: Any  # the type as annotated; of a part without None
    default: Any  # MISSING if the constructor needs a value
    meaning: str  # one line

    @property
    def words(self) -> str:
        """What the value may be, in words."""
        return _describe_kind(self.kind)

    @property
    def default_text(self) -> str:
        """The default as in a signature; empty without one."""
        if self.default is MISSING:
            return ""
        return str(getattr(self.default, "__qualname__", repr(self.default)))

    def document(self) -> str:
        """Return the entry in a NumPy docstring: name, type, default and meaning."""
        default = f", default {self.default_text}" if self.default_text else ""
        meaning = self.meaning[0].upper() + self.meaning[1:]
        return f"{self.name} : {self.words}{default}\n    {meaning}."


@dataclasses.dataclass(frozen=True)
class Option(_Parameter):
    """One option of a class.

    `kind` is ``bool``, ``int``, ``float``, ``str``, ``Literal``, a tuple or sequence of one of
    these, a function, or a union; values of other types are not checked. `limits` hold for a
    number, or each in a tuple. Infinity is refused unless it is the value of ``at_most``.
    """

    limits: Mapping[str, float]
    to_clients: bool  # whether the value travels to clients
    compared: bool  # whether a checkpoint with another value is refused
    in_files: bool  # whether configuration files hold it, as numbers or words

    def check(self, value: Any, key: str = "") -> Any:
        """Return a value as the option's type; ValueError if it is of another or out of range.

        NumPy's numbers, paths, lists and whole numbers for floats are converted. `key` is the name
        for errors, by default the option's.
        """
        key = key or self.name
        if value is self.default:
            return value
        converted = _convert(self.kind, value)
        if converted is _UNFIT:
            is_text = isinstance(value, str)
            got = repr(value) if is_text else f"{type(value).__name__} {value!r}"
            near = nearest(value, self.choices) if is_text else ""
            raise ValueError(f"{key}: expected {self.words}, got {got}{near}")
        for number in converted if isinstance(converted, tuple) else (converted,):
            if type(number) in (int, float):
                self._check_number(number, key)
        return converted

    def _check_number(self, number: float, key: str) -> None:
        if math.isnan(number) or (math.isinf(number) and self.limits.get("at_most") != math.inf):
            raise ValueError(f"{key}: expected a finite number, got {number}")
        for limit, bound in self.limits.items():
            holds, words = _LIMITS[limit]
            if not holds(number, bound):
                raise ValueError(f"{key}: expected {words} {bound:g}, got {number}")

    def field(self, **changes: Any) -> Any:
        """Declare the same option for another class, with some changes."""
        same = {"meaning": self.meaning, "default": self.default, "to_clients": self.to_clients}
        return option(**{**same, **self.limits, **changes})

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the value may be."""
        return tuple(kind for kind in _alternatives(self.kind) if isinstance(kind, str))

    def from_text(self, text: str, key: str = "") -> Any:
        """Read a value from text; numbers of a tuple have commas between them."""
        values = (_read(kind, text) for kind in _alternatives(self.kind))
        return self.check(next((value for value in values if value is not _UNFIT), text), key)

    def plain(self, value: Any) -> bool | int | float | str:
        """Return a value as a text file holds it: tuples as text."""
        return ",".join(map("{:g}".format, value)) if isinstance(value, tuple) else value

    def describe(self, key: str = "", choices: Sequence[str] = ()) -> str:
        """Return one line: name, default, choices (the type's by default), meaning."""
        default = "" if self.default is MISSING else f" = {self.plain(self.default)!r}"
        words = ", ".join(choices or self.choices)
        return f"{key or self.name}{default}{words and f' ({words})'}: {self.meaning}"


@dataclasses.dataclass(frozen=True)
class Part(_Parameter):
    """One part of a class: a field with an object of another :class:`Declared` class, or None."""

    optional: bool  # whether it may be None

    def check(self, value: Any, key: str = "") -> Any:
        """Return a copy of a part with its first state; ValueError if it is none.

        For an optional part True is an object with the defaults, and False is None.
        """
        if isinstance(value, self.kind):
            return value.copy()
        if self.optional and (value is None or isinstance(value, bool)):
            return self.kind() if value else None
        is_class = isinstance(value, type)
        got = f"the class {value.__name__}" if is_class else f"{type(value).__name__} {value!r}"
        raise ValueError(
            f"{key or self.name}: expected {self.words}, got {got}; write "
            f"{self.name}={self.kind.__name__}(...)"
        )

    def make(self, options: Mapping[str, Any]) -> Any:
        """Return an object with some options, which errors name after the part: ``part.option``."""
        try:
            return self.kind(**options)
        except ValueError as error:
            is_option = str(error).partition(":")[0] in parameters_of(self.kind)
            raise ValueError(f"{self.name}{'.' if is_option else ': '}{error}") from None

    @property
    def words(self) -> str:  # noqa: D102
        return f"{self.kind.__name__}{' or None' if self.optional else ''}"


def option(
    meaning: str,
    *,
    default: Any = MISSING,
    kw_only: bool = True,
    to_clients: bool = False,
    compared: bool = True,
    in_files: bool = True,
    **limits: float,
) -> Any:
    """Declare an option of a :class:`Declared` class; see :class:`Option`."""
    if not limits.keys() <= _LIMITS.keys():
        raise TypeError(f"limits: expected some of {', '.join(_LIMITS)}, got {sorted(limits)}")
    metadata = {OPTION: (meaning, limits, to_clients, compared, in_files)}
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)


def shared(meaning: str, *, default: Any = MISSING, **limits: Any) -> Any:
    """Declare an option that travels to clients."""
    return option(meaning, default=default, to_clients=True, **limits)


def argument(meaning: str, *, default: Any = MISSING, kw_only: bool = True) -> Any:
    """Declare an argument that no text file holds and no checkpoint compares, such as a model."""
    return option(meaning, default=default, kw_only=kw_only, compared=False, in_files=False)


def part(meaning: str, *, default: Any = MISSING) -> Any:
    """Declare a part, of which each object has a copy; see :class:`Part`.

    A class as `default` stands for an object with its defaults.
    """
    default = default() if isinstance(default, type) else default
    return dataclasses.field(default=default, kw_only=True, metadata={PART: meaning})


def state(
    factory: Callable[[], Any],
    *,
    init: Literal[False] = False,
    saved: bool = True,
    reset: bool = True,
) -> Any:
    """Declare what an object holds from round to round; `factory` makes the first value.

    A checkpoint holds what is `saved`; all else is made anew when a run begins or goes on. With
    `reset` a new run of the object begins with the first value. `init` is for type checkers: state
    is no argument of the constructor.
    """
    metadata = {STATE: saved, RESET: reset}
    return dataclasses.field(init=init, default_factory=factory, metadata=metadata)


@typing.dataclass_transform(
    kw_only_default=True, field_specifiers=(option, shared, argument, part, state)
)
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

    _by_hand: ClassVar[bool] = False  # whether the constructor is, which is handed down
    _parameters: ClassVar[Mapping[str, Option | Part]] = {}
    _options: ClassVar[Mapping[str, Option]] = {}
    _parts: ClassVar[Mapping[str, Part]] = {}

    def __init_subclass__(cls, *, frozen: bool = False, eq: bool = False) -> None:
        super().__init_subclass__()
        # text with `from __future__ import annotations`
        cls.__annotations__ = inspect.get_annotations(cls, eval_str=True)
        cls._by_hand = "__init__" in vars(cls) or any(
            getattr(base, "_by_hand", False) for base in cls.__bases__
        )
        dataclasses.dataclass(
            kw_only=True, eq=eq, repr=False, init=not cls._by_hand, frozen=frozen
        )(cls)
        cls._parameters = {
            field.name: _parameter_of(cls, field)
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if field.metadata.keys() & {OPTION, PART}
        }
        cls._options = {n: p for n, p in cls._parameters.items() if isinstance(p, Option)}
        cls._parts = {n: p for n, p in cls._parameters.items() if isinstance(p, Part)}
        if cls._by_hand:
            cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]
        _list_parameters(cls)

    def __post_init__(self) -> None:
        for name, declared in parameters_of(type(self)).items():
            object.__setattr__(self, name, declared.check(getattr(self, name), self.key(name)))
        _run_checks(self)

    def __repr__(self) -> str:
        """Show the compared options and the parts that differ from their defaults."""
        listed = []
        for name, declared in parameters_of(type(self)).items():
            value = getattr(self, name, declared.default)
            if isinstance(declared, Part):
                differs = repr(value) != declared.default_text
            else:
                differs = declared.compared and bool(value != declared.default)
            if differs:
                listed.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(listed)})"

    def check(self) -> None:
        """Refuse options that do not fit together; reads options only.

        That of each class in the chain is run, base classes' first: none calls another.
        """

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """Return the options by name, those of base classes first."""
        return cls._options

    @classmethod
    def key(cls, name: str) -> str:
        """Return the name of an option in errors."""
        return name

    def part_of(self, kind: type[D]) -> D | None:
        """Return the part of a class, if this object has one."""
        members = _members(self).values()
        return next((member for member in members if isinstance(member, kind)), None)

    def copy(self, **changes: Any) -> Self:
        """Return an object with the same options and parts but for some, and its first state."""
        values = {name: getattr(self, name) for name in parameters_of(type(self))}
        return type(self)(**{**values, **changes})

    def compared_options(self) -> dict[str, Any]:
        """Return the values on which results depend, as JSON holds them; a part is a dictionary."""
        values: dict[str, Any] = {}
        for name, declared in self.options().items():
            value = getattr(self, name)
            if declared.compared:
                values[name] = list(value) if isinstance(value, tuple) else value
        for name, declared_part in parts_of(type(self)).items():
            member = getattr(self, name)
            values[name] = None if member is None else member.compared_options()
            if member is not None and type(member) is not declared_part.kind:
                values[name]["class"] = type(member).__name__
        return values

    def reset_state(self, *, saved_too: bool = True) -> None:
        """Give all state its first value; or only the state that no checkpoint holds."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.metadata.get(RESET) and (saved_too or not field.metadata[STATE]):
                make: Any = field.default_factory
                setattr(self, field.name, make())
        for member in _members(self).values():
            member.reset_state(saved_too=saved_too)

    def to_config(self) -> dict[str, Any]:
        """Return the options that travel, as a message's configuration holds them."""
        return {
            PREFIX + key_of(name): list(value) if isinstance(value, tuple) else value
            for name, declared in self.options().items()
            if declared.to_clients and (value := getattr(self, name)) is not None
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_config` returned among other keys."""
        keys = {name: PREFIX + key_of(name) for name in cls.options()}
        required = [n for n, o in cls.options().items() if o.to_clients and o.default is not None]
        if missing := [keys[name] for name in required if keys[name] not in config]:
            raise ValueError(f"configuration: expected {', '.join(missing)}, got {sorted(config)}")
        return cls(**{name: config[key] for name, key in keys.items() if key in config})


def read_task(kind: type[D], config: Mapping[str, Any], needed: str = "step") -> D | None:
    """Read options from a message's configuration; None if it lacks the one that is needed."""
    return kind.from_config(config) if PREFIX + key_of(needed) in config else None


def parts_of(kind: type[Declared]) -> Mapping[str, Part]:
    """Return the parts that objects of a class may have by name, those of base classes first."""
    return kind._parts


def parameters_of(kind: type[Declared]) -> Mapping[str, Option | Part]:
    """Return the options and parts of a class by name, in the order of its constructor."""
    return kind._parameters


def saved_state(declared: Declared) -> dict[str, tuple[Declared, str, Any]]:
    """Return the state that a checkpoint holds, of parts under dotted names.

    Each name has the object that holds the state, the name there, and the type.
    """
    fields = dataclasses.fields(declared)  # type: ignore[arg-type]
    saved = {f.name: (declared, f.name, f.type) for f in fields if f.metadata.get(STATE)}
    for name, member in _members(declared).items():
        saved |= {f"{name}.{below}": place for below, place in saved_state(member).items()}
    return saved


def check_together(kind: type[Declared], values: Mapping[str, Any]) -> None:
    """Run a class's rules on some options and parts, the others at their defaults."""
    bare = object.__new__(kind)
    for name, declared in parameters_of(kind).items():
        object.__setattr__(bare, name, values.get(name, declared.default))
    _run_checks(bare)


def key_of(name: str) -> str:
    """Return a name in kebab-case."""
    return name.replace("_", "-")


def nearest(value: str, words: Iterable[str]) -> str:
    """Say which of some words is meant, if one is near; empty if none is."""
    near = difflib.get_close_matches(value, list(words), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parameter_of(cls: type[Declared], field: "dataclasses.Field[Any]") -> Option | Part:
    if OPTION in field.metadata:
        return Option(field.name, field.type, field.default, *field.metadata[OPTION])
    kinds = _alternatives(field.type)
    classes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Declared)]
    optional = types.NoneType in kinds
    if len(classes) != 1 or len(kinds) != 1 + optional:
        raise TypeError(
            f"{cls.__name__}.{field.name}: expected a class derived from Declared, or that and "
            f"None, as the type of a part, got {field.type}"
        )
    return Part(field.name, classes[0], field.default, field.metadata[PART], optional)


def _members(declared: Declared) -> dict[str, Declared]:
    members = {name: getattr(declared, name) for name in parts_of(type(declared))}
    return {name: member for name, member in members.items() if member is not None}


def _run_checks(declared: Declared) -> None:
    for kind in reversed(type(declared).__mro__):
        if (check := vars(kind).get("check")) is not None:
            check(declared)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types and words that a value may be."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(one for member in get_args(kind) for one in _alternatives(member))
    return (kind,)


def _item_of(kind: Any) -> Any:
    """Return the type of a tuple's or sequence's items; None if it is neither."""
    return get_args(kind)[0] if get_origin(kind) in (tuple, Sequence) else None


def _convert(kind: Any, value: Any) -> Any:
    number = value.item() if isinstance(value, np.generic) else value
    for one in _alternatives(kind):
        if isinstance(one, str):
            if isinstance(number, str) and number == one:
                return number
        elif one in (bool, int, types.NoneType):
            if type(number) is one:
                return number
        elif one is float:
            if type(number) in (int, float):
                return float(number)
        elif one is str:
            if isinstance(number, str | os.PathLike):
                return os.fspath(number)
        elif get_origin(one) is Callable:
            if callable(number):
                return number
        elif (item := _item_of(one)) is not None:
            several = isinstance(number, Sequence | np.ndarray | set | frozenset)
            if several and not isinstance(number, str):
                items = tuple(_convert(item, member) for member in number)
                if not any(member is _UNFIT for member in items):
                    return items
        else:  # a type that is not checked
            return value
    return _UNFIT


def _read(kind: Any, text: str) -> Any:
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), _UNFIT)
    if isinstance(kind, str):
        return text if text == kind else _UNFIT
    item = _item_of(kind)
    try:
        if item is not None:
            return tuple(item(number) for number in text.split(",") if number.strip())
        return kind(text) if kind in (int, float, str) else _UNFIT
    except ValueError:
        return _UNFIT


def _describe_kind(kind: Any) -> str:
    words, types_ = [], []
    for one in _alternatives(kind):
        if isinstance(one, str):
            words.append(one)
        elif (item := _item_of(one)) is not None:
            types_.append(f"a sequence of {item.__name__}")
        elif isinstance(one, typing.ForwardRef):  # a name in quotes, of what is slow to import
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
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        parameters[-1:-1] = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=field.type,
            )
            for field in fields
            if field.name in cls._parameters.keys() - named
        ]
    return inspect.Signature(parameters, return_annotation=None)


def _list_parameters(cls: type[Declared]) -> None:
    """Append all options to a class's docstring: those of the nearest classes first."""
    text = inspect.cleandoc(cls.__doc__ or "")
    depth: dict[str, int] = {}
    for number, base in enumerate(cls.__mro__):
        for name in vars(base).get("__annotations__", {}):
            depth.setdefault(name, number)
    options = sorted(parameters_of(cls).values(), key=lambda option: depth[option.name])
    title = "Parameters"
    if f"{title}\n---" in text:  # some are described by hand
        title, options = "Other Parameters", [o for o in options if f"\n{o.name} :" not in text]
    if options:
        rows = "\n".join(option.document() for option in options)
        text += f"\n\n{title}\n{'-' * len(title)}\n{rows}"
    cls.__doc__ = f"{text}\n"
