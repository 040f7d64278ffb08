"""Discovery of the methods.

A module of :mod:`fedntk.simulations.methods` holds a
:class:`~fedntk.simulations.methods.method.Method` as ``METHOD``, or several as ``METHODS``. Another
package names such an object in the entry-point group ``fedntk.methods``::

    [project.entry-points."fedntk.methods"]
    my-method = "my_package.my_method:METHOD"

A method of a user's own has no such name. The setting ``method`` holds where its strategy is:
``/home/me/mymethod.py:FedAvgM`` or ``my_module:FedAvgM``, and after a comma the class of its
clients, if the strategy does not name it. ``__main__`` is a notebook's cells.
"""

import functools
import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Mapping
from logging import getLogger
from types import MappingProxyType
from typing import Any

import fedntk.clients
from fedntk.ntk.options import nearest

from ..errors import ConfigError, first_line
from .importing import (
    ID,
    import_named,
    name_object,
    object_named,
    place_of,
    require_importable,
    whole_name,
)

HOME = "fedntk.simulations.methods"
logger = getLogger("flwr")


@functools.cache
def own_methods() -> Mapping[str, Any]:
    """Return the methods of this package, by name."""
    modules = [
        importlib.import_module(f"{HOME}.{info.name}")
        for info in pkgutil.iter_modules(importlib.import_module(HOME).__path__)
    ]
    every = [[*getattr(m, "METHODS", ()), getattr(m, "METHOD", None)] for m in modules]
    found = {method.name: method for methods in every for method in methods if method}
    return MappingProxyType(dict(sorted(found.items())))


@functools.cache
def all_methods() -> Mapping[str, Any]:
    """Return the methods of this package and of others, by name.

    One that cannot be imported, or has the name of another, is left out with a warning.
    """
    methods = dict(own_methods())
    for entry in importlib.metadata.entry_points(group="fedntk.methods"):
        try:
            method = entry.load()
            if not isinstance(method, _kind()):
                raise TypeError(f"expected an object of a subclass of Method, got {method!r}")
            if method.name in methods:
                raise ValueError(f"there is a method {method.name!r} already")
        except Exception as error:  # another package's fault must not stop all other methods
            found = entry.name, entry.value, first_line(error)
            logger.warning("method %s (%s) is left out: %s", *found)
        else:
            methods[method.name] = method
    return MappingProxyType(methods)


_own: dict[str, Any] = {}  # name -> the newest method that is not installed


def known_methods() -> Mapping[str, Any]:
    """Return the methods, with users' own ones that this process has found, by name."""
    return {**all_methods(), **_own}


def find_method(given: Any) -> tuple[str, Any]:
    """Return what the setting ``method`` holds, and the method; ConfigError if there is none.

    `given` is a text, a Method or the class of a strategy. An object gets a name that no other call
    has, by which this process finds it again.
    """
    if isinstance(given, type):
        given = _make(given)
    if isinstance(given, _kind()):
        place, method = given.name, given
        if given not in all_methods().values():
            strategy, client = given.strategy_class, given.client_class
            other = "" if client is named_client(strategy) else f",{client.__qualname__}"
            place = name_object(given, place_of(strategy) + other)
    else:
        place = whole_name(str(given))
        method = all_methods().get(place) or object_named(place) or import_method(place)
    if place not in all_methods():
        common = importlib.import_module(f"{__package__}.config").Config.options()
        if method.name in all_methods() or method.name.replace("-", "_") in common:
            raise ConfigError(
                f"method = {place}: {method.name!r} is a method or a setting already; rename the "
                "class, or give name='...' to Method"
            )
        _own[method.name] = method
    return place, method


def import_method(place: str) -> Any:
    """Import the method that the setting names; ConfigError if there is none."""
    home, colon, names = ID.sub("", place).rpartition(":")
    if not colon:
        raise ConfigError(
            f"method: expected one of {', '.join(all_methods())}, or <file>.py:<strategy>, got "
            f"{place!r}{nearest(place, all_methods())}"
        )
    found = [import_named("method", f"{home}:{name}") for name in names.split(",")]
    return found[0] if isinstance(found[0], _kind()) else _make(*found)


def require_importable_method(place: str, method: Any) -> None:
    """Refuse a method that other processes cannot import, or would find to be another."""
    if place in all_methods():
        return
    require_importable("method", place)
    found, own = ({**vars(m), "settings": type(m)} for m in (import_method(place), method))
    require_importable("method", place, same=found == own)


def named_client(strategy: Any) -> Any:
    """Return the class of clients that a strategy names; None if it is nowhere.

    It is looked for in the module of the class that names it, and in :mod:`fedntk.clients`.
    """
    home = next(kind for kind in strategy.__mro__ if "client" in vars(kind)).__module__
    places = (sys.modules.get(home), fedntk.clients)
    return next(filter(None, (getattr(own, strategy.client, None) for own in places)), None)


@functools.cache
def _make(*classes: Any) -> Any:
    return _kind()(*classes)


def _kind() -> Any:
    return importlib.import_module(f"{HOME}.method").Method
