"""How declared state is written into a checkpoint, and read back."""

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import numpy as np
from flwr.app import ArrayRecord

from fedntk.ntk.options import Declared, saved_state

from .array_archive import under
from .averaging import named_arrays, record_of


def pack_state(declared: Declared) -> dict[str, Any]:
    """Return the declared state of an object and its parts: arrays, and what JSON holds."""
    packed: dict[str, Any] = {}
    for name, (holder, field, _) in saved_state(declared).items():
        packed |= pack(name, getattr(holder, field))
    return packed


def unpack_state(declared: Declared, state: Mapping[str, Any]) -> None:
    """Give an object the state that :func:`pack_state` returned."""
    for name, (holder, field, kind) in saved_state(declared).items():
        setattr(holder, field, unpack(name, kind, getattr(holder, field), state))


def require_same(expected: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a state with other settings, and name the first that differs."""
    one, other = (_flat(json.loads(json.dumps(settings))) for settings in (expected, saved))
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            raise ValueError(
                f"state: expected {name} = {one.get(name)}, got {other.get(name)}; it is of a "
                "strategy with other settings"
            )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of parts under dotted names."""
    flat = dict[str, Any]()
    for name, value in settings.items():
        flat[name] = value
        if isinstance(value, dict):
            flat[name] = "there"
            flat |= {f"{name}.{below}": member for below, member in _flat(value).items()}
    return flat


def pack(name: str, value: Any) -> dict[str, Any]:
    """Return one field's value as arrays and what JSON holds, by name.

    Parts of objects and of dictionaries of arrays have names with a dot, such as
    ``controls.<client>``.
    """
    plain: dict[str, Any] = {}
    if hasattr(value, "state_dict"):
        parts = value.state_dict()
    elif isinstance(value, ArrayRecord):
        parts = named_arrays(value)
    elif _is_of_objects(value):
        parts = {}
        for k, member in enumerate(value):
            plain |= pack(f"{name}.{k}", member)
    elif isinstance(value, dict):
        parts = {k: value[k] for k in sorted(value) if isinstance(value[k], np.ndarray)}
        plain[name] = {str(k): value[k] for k in sorted(value) if k not in parts}
    else:
        return {name: sorted(value) if isinstance(value, set | frozenset) else value}
    return plain | {f"{name}.{key}": part for key, part in parts.items()}


def unpack(name: str, kind: Any, fresh: Any, state: Mapping[str, Any]) -> Any:
    """Return a field's value from what :func:`pack` returned, among all of the state.

    `kind` is its annotation: ``dict[int, int]`` gets its integer keys back. `fresh` is its first
    value; objects load their state into it.
    """
    parts, whole = under(f"{name}.", state), get_origin(kind) or kind
    if hasattr(fresh, "load_state_dict"):
        fresh.load_state_dict(parts)
        return fresh
    if _is_of_objects(fresh):
        return tuple(unpack(f"{name}.{k}", kind, member, state) for k, member in enumerate(fresh))
    if isinstance(fresh, ArrayRecord):
        return record_of(parts)
    if isinstance(fresh, dict):
        key_type, *_ = get_args(kind) or [str]
        values = {**parts, **state.get(name, {})}
        return type(fresh)({key_type(key): _copy(value) for key, value in values.items()})
    value = _copy(state[name])
    return whole(value) if whole in (int, float, str, bool, list, set, tuple) else value


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and hasattr(value[0], "state_dict")


def _copy(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) else value
