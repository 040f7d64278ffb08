"""What `compare` and `load_results` return: a table of all rounds that shows itself in Jupyter."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from . import report
from .figures import accuracy_curves, as_html
from .results import Run, read_runs
from .statistics import paired_differences, run_scores, summary_over_seeds


class Results(pd.DataFrame):
    """A tidy table of runs: run, method, seed, round, metric, value.

    A DataFrame in all that pandas does; rows that are selected from it are a plain one. In Jupyter
    it shows accuracies, costs and curves. `runs` has the runs themselves.
    """

    _metadata = ["runs"]  # noqa: RUF012 - so does pandas declare attributes that are no columns

    def __init__(self, runs: Sequence[Run]) -> None:
        table = pd.concat([run.rounds for run in runs], ignore_index=True)
        super().__init__(table)  # type: ignore[call-arg] # its stubs have __new__
        self.attrs = dict(runs[0].rounds.attrs)
        self.runs = list(runs)

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def plot(self, against: str = "rounds", **options: Any) -> Figure:  # type: ignore[override]
        """Draw accuracy or R^2 against rounds, bytes or seconds: `figures.accuracy_curves`."""
        quality = {"metric": report.quality_of(self.runs)}
        options = report.words_of_curves(self.runs) | quality | options
        return accuracy_curves(self, against=against, **options)

    def summary(self, metric: str = "") -> pd.DataFrame:
        """Return mean and interquartile mean of each run's last values, with 95 % intervals.

        The metric is by default the accuracy, or R^2 of real targets.
        """
        return summary_over_seeds(run_scores(self, metric or report.quality_of(self.runs)))

    def differences(self, metric: str = "", against: str | None = None) -> pd.DataFrame:
        """Return paired differences of last values over common seeds, with 95 % intervals.

        `against` is the name of the run to compare with; by default all pairs are returned.
        """
        scores = run_scores(self, metric or report.quality_of(self.runs))
        return paired_differences(scores, against and [against])

    def write_html(self, path: str | Path, *, targets: Sequence[float] | None = None) -> Path:
        """Write ``report.html``: one file with tables, curves and settings, for any browser."""
        return report.write_html(self.runs, path, targets=targets)

    def _repr_html_(self) -> str:
        return as_html(report.final_table(self.runs), self.plot())


def load_results(
    folders: str | Path | Iterable[str | Path | Run], *, trust: bool = False
) -> Results:
    """Read runs as :func:`read_runs`: one table of run, method, seed, round, metric, value."""
    return Results(read_runs(folders, trust=trust))
