"""The Flower app: data, models, engines, runs and their results."""

from .config import Config, ConfigError
from .results import Run, RunFailed, load_model, load_results
from .runs import run

__all__ = ["Config", "ConfigError", "Run", "RunFailed", "load_model", "load_results", "run"]
