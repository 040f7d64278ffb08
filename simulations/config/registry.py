"""Discovery of the methods.

A module of :mod:`fedntk.simulations.methods` holds a
:class:`~fedntk.simulations.methods.method.Method` as ``METHOD``, or several as ``METHODS``. Another
package names such an object in the entry-point group ``fedntk.methods``::

    [project.entry-points."fedntk.methods"]
    my-method = "my_package.my_method:METHOD"
"""

import functools
import importlib
import importlib.metadata
import itertools
import pkgutil
from collections.abc import Mapping
from logging import getLogger
from types import MappingProxyType
from typing import Any

HOME = "fedntk.simulations.methods"
logger = getLogger("flwr")


@functools.cache
def own_methods() -> Mapping[str, Any]:
    """Return the methods of this package, by name."""
    modules = [
        importlib.import_module(f"{HOME}.{info.name}")
        for info in pkgutil.iter_modules(importlib.import_module(HOME).__path__)
    ]
    found = [getattr(module, "METHODS", ()) for module in modules]
    found += [(module.METHOD,) for module in modules if hasattr(module, "METHOD")]
    methods = itertools.chain.from_iterable(found)
    return MappingProxyType({m.name: m for m in sorted(methods, key=lambda m: m.name)})


@functools.cache
def all_methods() -> Mapping[str, Any]:
    """Return the methods of this package and of others, by name.

    One that cannot be imported, or has the name of another, is left out with a warning.
    """
    methods = dict(own_methods())
    for entry in importlib.metadata.entry_points(group="fedntk.methods"):
        try:
            method = entry.load()
            if not isinstance(method, importlib.import_module(f"{HOME}.method").Method):
                raise TypeError(f"expected an object of a subclass of Method, got {method!r}")
            if method.name in methods:
                raise ValueError(f"there is a method {method.name!r} already")
        except Exception as error:  # another package's fault must not stop all other methods
            reason = f"{type(error).__name__}: {error}"
            logger.warning("method %s (%s) is left out: %s", entry.name, entry.value, reason)
        else:
            methods[method.name] = method
    return MappingProxyType(methods)
