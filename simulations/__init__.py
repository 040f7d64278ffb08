"""The Flower app: data, models, engines, runs and their results.

Names are loaded when first used, so that the workers of a simulation, which need few of them, start
quickly.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from .errors import with_extra_named

if TYPE_CHECKING:
    from .assessment.clients import Unlearned, delete, ledger, unlearn
    from .assessment.intervals import ConformalIntervals, intervals
    from .assessment.uncertainty import Assessment, assess
    from .check import check_method, make_fixture
    from .configuration import Config
    from .data.own import OwnData
    from .deploy.federation import Federation
    from .engine.building import load_predictor
    from .engine.runs import compare, run
    from .errors import ConfigError, RunFailed
    from .methods.method import Method
    from .report.comparison import Results, load_results
    from .report.report import write_report
    from .report.results import Run, load_model, read_runs
    from .tuning.tuning import Tuning, tune

# module -> its public names
_HOMES = {
    "assessment.clients": ("Unlearned", "delete", "ledger", "unlearn"),
    "assessment.intervals": ("ConformalIntervals", "intervals"),
    "assessment.uncertainty": ("Assessment", "assess"),
    "check": ("check_method", "make_fixture"),
    "configuration": ("Config",),
    "data.own": ("OwnData",),
    "deploy.federation": ("Federation",),
    "engine.building": ("load_predictor",),
    "engine.runs": ("compare", "run"),
    "errors": ("ConfigError", "RunFailed"),
    "methods.method": ("Method",),
    "report.comparison": ("Results", "load_results"),
    "report.report": ("write_report",),
    "report.results": ("Run", "load_model", "read_runs"),
    "tuning.tuning": ("Tuning", "tune"),
}

__all__ = [
    "Assessment",
    "Config",
    "ConfigError",
    "ConformalIntervals",
    "Federation",
    "Method",
    "OwnData",
    "Results",
    "Run",
    "RunFailed",
    "Tuning",
    "Unlearned",
    "assess",
    "check_method",
    "compare",
    "delete",
    "intervals",
    "ledger",
    "load_model",
    "load_predictor",
    "load_results",
    "make_fixture",
    "read_runs",
    "run",
    "tune",
    "unlearn",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module; ModuleNotFoundError names the extra that is missing."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with warnings.catch_warnings():  # of progress bars that Jupyter cannot show
            warnings.filterwarnings("ignore", "IProgress not found")
            return getattr(importlib.import_module(f".{home}", __name__), name)
    except ModuleNotFoundError as error:
        raise with_extra_named(error) from error
