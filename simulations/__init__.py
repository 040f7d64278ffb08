"""The Flower app: data, models, engines, runs and their results.

Names are loaded when first used, so that the workers of a simulation, which need few of them, start
quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config, ConfigError
    from .results import Run, RunFailed, load_model, load_results
    from .runs import run

_HOMES = {
    "Config": "config",
    "ConfigError": "config",
    "Run": "results",
    "RunFailed": "results",
    "load_model": "results",
    "load_results": "results",
    "run": "runs",
}

__all__ = ["Config", "ConfigError", "Run", "RunFailed", "load_model", "load_results", "run"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
