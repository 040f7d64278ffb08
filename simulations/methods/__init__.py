"""The methods: each is a module here, or an object that another package names.

A module here holds its :class:`~fedntk.simulations.methods.method.Method` as ``METHOD``. Another
package names such an object in the entry-point group ``fedntk.methods``::

    [project.entry-points."fedntk.methods"]
    my-method = "my_package.my_method:METHOD"
"""

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from logging import WARNING, getLogger
from types import MappingProxyType
from typing import Any

from .method import Method

__all__ = ["GROUP", "all_methods", "own_methods"]

GROUP = "fedntk.methods"
logger = getLogger("flwr")


@functools.cache
def own_methods() -> Mapping[str, Method[Any]]:
    """Return the methods of this package, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
    ]
    methods = [module.METHOD for module in modules if hasattr(module, "METHOD")]
    return MappingProxyType({m.name: m for m in sorted(methods, key=lambda m: m.name)})


@functools.cache
def all_methods() -> Mapping[str, Method[Any]]:
    """Return the methods of this package and of others, by name.

    One that cannot be imported, or has the name of another, is left out with a warning.
    """
    methods = dict(own_methods())
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            method = entry.load()
            if not isinstance(method, Method):
                raise TypeError(f"expected an object of a subclass of Method, got {method!r}")
            if method.name in methods:
                raise ValueError(f"there is a method {method.name!r} already")
        except Exception as error:  # another package's fault must not stop all other methods
            logger.log(
                WARNING, "method %s (%s) is left out: %s: %s",
                entry.name, entry.value, type(error).__name__, error,
            )  # fmt: skip
            continue
        methods[method.name] = method
    return MappingProxyType(methods)
