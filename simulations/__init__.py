"""The Flower app: data, models, engines, runs and their results.

Names are loaded when first used, so that the workers of a simulation, which need few of them, start
quickly.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import fedntk.ntk  # noqa: F401 - before torch: how its threads wait

from .errors import with_extra_named

if TYPE_CHECKING:
    from .building import load_predictor
    from .config import Config, ConfigError
    from .errors import RunFailed
    from .federation import Federation
    from .report import write_report
    from .results import Run, load_model, load_results, read_runs
    from .runs import compare, run
    from .tuning import Tuning, tune
    from .uncertainty import Assessment, assess
    from .unlearning import Unlearned, unlearn

_HOMES = {
    "Assessment": "uncertainty",
    "Config": "config",
    "ConfigError": "config",
    "Federation": "federation",
    "Run": "results",
    "RunFailed": "errors",
    "Tuning": "tuning",
    "Unlearned": "unlearning",
    "assess": "uncertainty",
    "compare": "runs",
    "load_model": "results",
    "load_predictor": "building",
    "load_results": "results",
    "read_runs": "results",
    "run": "runs",
    "tune": "tuning",
    "unlearn": "unlearning",
    "write_report": "report",
}

__all__ = [
    "Assessment",
    "Config",
    "ConfigError",
    "Federation",
    "Run",
    "RunFailed",
    "Tuning",
    "Unlearned",
    "assess",
    "compare",
    "load_model",
    "load_predictor",
    "load_results",
    "read_runs",
    "run",
    "tune",
    "unlearn",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module; ModuleNotFoundError names the extra that is missing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with warnings.catch_warnings():  # of progress bars that Jupyter cannot show
            warnings.filterwarnings("ignore", "IProgress not found")
            return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise with_extra_named(error) from error
