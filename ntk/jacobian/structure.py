"""What may be kept about a network from one call to the next, and when it still holds.

A finding belongs to a :func:`structure_of` a network and to a :func:`graph_of` its outputs, which
is compared in each call: a network that computes something else is examined anew.
"""

import threading
import weakref
from collections.abc import Hashable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .rows import nodes_behind

_LOCK = threading.Lock()
PLAIN = (int, float, str, type(None), torch.dtype, torch.device, BuiltinFunctionType)
SETTINGS = (int, float, str, tuple)
SIZE = "_saved_size"  # of as_strided: it counts the examples
COPY = "CloneBackward0"


class _UnknownError(Exception):
    """A part of a network that cannot be compared with another's."""


def structure_of(model: nn.Module) -> Hashable | None:
    """Return modules, their settings, parameters and buffers without values; no tensor is held.

    None if the network has hooks, or an attribute that cannot be compared by value.
    """
    places: dict[int, int] = {}  # of what may come twice

    def describe(value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, torch.jit.ScriptModule):
            raise _UnknownError
        if isinstance(value, (Tensor, nn.Module)):
            if id(value) in places:
                return places[id(value)]
            places[id(value)] = len(places)
            kind = weakref.ref(type(value))
            if isinstance(value, nn.Module):
                return kind, weakref.ref(type(value).forward), settings(vars(value))
            return kind, value.dtype, value.device, value.requires_grad, value.shape, value.stride()
        if isinstance(value, (dict, tuple, list, set)):
            parts = value.items() if isinstance(value, dict) else value
            return (type(value), *map(describe, parts))
        is_plain = isinstance(value, FunctionType) and value.__closure__ is None
        if is_plain or isinstance(value, type):  # such as a kind of layer
            return weakref.ref(value)
        if isinstance(value, partial):
            return (partial, *map(describe, (value.func, value.args, value.keywords)))
        raise _UnknownError

    def settings(values: dict[str, Any]) -> Hashable:
        parts = []
        for name, value in values.items():
            if value is None or (isinstance(value, (dict, set)) and not value):
                continue
            if "hooks" in name:
                raise _UnknownError
            parts.append((name, describe(value)))
        return tuple(parts)

    try:
        return None if _has_any_global_hook() else describe(model)
    except _UnknownError:
        return None


def graph_of(outputs: Tensor, names: Mapping[nn.Parameter, str]) -> Hashable:
    """Return the operations behind `outputs`, their settings, and where parameters enter.

    Sizes are left out, so that any number of examples has the same graph; so are copies.
    """
    places: dict[Any, int] = {}
    graph = []
    for node, inputs in nodes_behind(outputs.grad_fn):
        if node.name() == COPY:
            continue
        parents = []
        for parent, output in inputs:
            while parent is not None and parent.name() == COPY:
                parent, output = parent.next_functions[0]
            name = names.get(parent.variable) if hasattr(parent, "variable") else None
            parents.append((places.get(parent), output, name))
        places[node] = len(places)
        graph.append((node.name(), _settings_of(node), *parents))
    return tuple(graph)


def keep(findings: dict[Hashable, Any], key: Hashable | None, finding: Any, most: int) -> None:
    """Keep a finding for further calls, and forget the one that was used least recently."""
    if key is None:
        return
    with _LOCK:
        findings.pop(key, None)
        while len(findings) >= most:
            del findings[next(iter(findings))]
        findings[key] = finding


def _settings_of(node: Any) -> Hashable:
    if (kind := node.name()) not in _SAVED:
        saved = [
            name
            for name in dir(node)
            if name.startswith("_saved_") and "_sym_" not in name and name != SIZE
        ]
        _SAVED[kind] = [name for name in saved if isinstance(getattr(node, name), SETTINGS)]
    values = (getattr(node, name, None) for name in _SAVED[kind])
    return tuple(
        tuple(item for item in value if isinstance(item, PLAIN))
        if isinstance(value, tuple)
        else value
        for value in values
    )


_SAVED: dict[str, list[str]] = {}  # operation -> names of its settings
