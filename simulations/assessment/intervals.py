"""Conformal intervals of real targets, and how many test examples they hold."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from scipy.stats import betabinom

from fedntk.ntk.predictors.conformal import calibrate_intervals, rank

from ..config.settings import ConfigError
from ..data.load import load_data
from ..engine.building import load_predictor
from ..errors import naming
from ..report.results import Run, run_with_its_data
from .uncertainty import held_out_examples


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    """Intervals f - q ... f + q of a run's predictions f.

    Attributes
    ----------
    coverage : float
        Share of new examples that each target's interval is to hold.
    calibrated_on, note : str
        The examples that gave q, and how the run had used them, if it had.
    table : DataFrame
        A row for each target: ``half_width`` q, in the target's unit; ``test_coverage``, the share
        of test examples within; ``expected_low`` and ``expected_high``, between which that share
        is in 95 % of all draws of calibration and test examples, if all are exchangeable and no two
        residuals the same.
    """

    coverage: float
    calibrated_on: str
    note: str
    table: pd.DataFrame


def intervals(
    run: Run | str | Path,
    coverage: float,
    *,
    calibrate_on: Literal["clients", "examples"] | None = None,
    which: Literal["model", "best"] = "model",
    trust: bool = False,
) -> ConformalIntervals:
    """Calibrate intervals of a finished run of regression on examples that nobody trained on.

    :mod:`fedntk.ntk.predictors.conformal` says what guarantees the coverage, which is between 0 and
    1. The other arguments are those of :func:`~fedntk.simulations.assess`. ConfigError if the run
    has no real targets, or held out too little for the coverage.
    """
    run = run_with_its_data(run, trust=trust)
    config, data = run.config, load_data(run.config)
    if not data.has_real_targets:
        raise ConfigError("intervals: expected a run of regression; classes have assess(coverage=)")
    predictor = load_predictor(run, which)
    indices, described, note = held_out_examples(config, which, calibrate_on)
    tested = slice(config.test_examples or None)
    parts = [(data.x_train[indices], data.y_train[indices])]
    parts.append((data.x_test[tested], data.y_test[tested]))
    (f, y), (f_test, y_test) = ((predictor.predict(x), torch.from_numpy(y)) for x, y in parts)
    with naming("coverage", ValueError):
        half_widths = calibrate_intervals(f, y, coverage)
    k = rank(len(y), coverage)
    low, high = betabinom(len(y_test), k, len(y) + 1 - k).interval(0.95)
    table = pd.DataFrame(
        {
            "target": data.inputs.classes,
            "half_width": half_widths.numpy(),
            "test_coverage": ((y_test - f_test).abs() <= half_widths).double().mean(0).numpy(),
            "expected_low": float(low / len(y_test)),
            "expected_high": float(high / len(y_test)),
        }
    )
    return ConformalIntervals(coverage, described, note, table)
