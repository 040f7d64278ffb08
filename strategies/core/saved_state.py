"""How declared state is written into a checkpoint, and read back."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import numpy as np
import torch
from flwr.app import ArrayRecord

from .array_archive import under
from .averaging import named_arrays, record_of


def pack(name: str, value: Any) -> dict[str, Any]:
    """Return one field's value as arrays and what JSON holds, by name.

    Parts of objects and of dictionaries of arrays have names with a dot, such as
    ``controls.<client>``.
    """
    if hasattr(value, "state_dict"):
        return {f"{name}.{part}": own for part, own in value.state_dict().items()}
    if _is_of_objects(value):
        each = [pack(f"{name}.{k}", own) for k, own in enumerate(value)]
        return {part: own for packed in each for part, own in packed.items()}
    if isinstance(value, ArrayRecord):
        return {f"{name}.{key}": array for key, array in named_arrays(value).items()}
    if isinstance(value, torch.Tensor):
        return {name: value.numpy()}
    if isinstance(value, set | frozenset):
        return {name: sorted(value)}
    if isinstance(value, dict):
        arrays = {k: value[k] for k in sorted(value) if isinstance(value[k], np.ndarray)}
        plain = {str(k): value[k] for k in sorted(value) if k not in arrays}
        return {name: plain, **{f"{name}.{key}": own for key, own in arrays.items()}}
    return {name: value}


def unpack(name: str, kind: Any, fresh: Any, state: Mapping[str, Any]) -> Any:
    """Return a field's value from what :func:`pack` returned, among all of the state.

    `kind` is its annotation: ``dict[int, int]`` gets its integer keys back. `fresh` is its first
    value; objects load their state into it.
    """
    parts = under(f"{name}.", state)
    if hasattr(fresh, "load_state_dict"):
        fresh.load_state_dict(parts)
        return fresh
    if _is_of_objects(fresh):
        return tuple(unpack(f"{name}.{k}", kind, own, state) for k, own in enumerate(fresh))
    if isinstance(fresh, ArrayRecord):
        return record_of(parts)
    whole = get_origin(kind) or kind
    if whole in (dict, Counter):
        key_type = get_args(kind)[0]
        values = {**parts, **state.get(name, {})}
        return whole({key_type(key): _copy(own) for key, own in values.items()})
    value = _copy(state[name])
    if isinstance(fresh, torch.Tensor):
        return torch.from_numpy(value)
    return whole(value) if whole in (int, float, str, bool, list, set, tuple) else value


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and hasattr(value[0], "state_dict")


def _copy(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) else value
