"""Statistics over seeds, and over the clients of a run.

Over seeds: bootstrap intervals, interquartile means, paired differences, profiles.

Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
NeurIPS 2021, section 4; definitions as in its library rliable.

A score is one number of one run, and a task a data set with its split. `scores` is a table with the
columns run, task, seed and value, as :func:`run_scores` makes. Intervals are percentile bootstrap
intervals: seeds are drawn with replacement within each task, by a generator of fixed seed.

With few seeds such an interval is too narrow: of normal scores, the 95 % interval of the mean
covers it in about 75 % of all cases with 3 seeds, 85 % with 5 and 90 % with 10.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.stats import bootstrap, trim_mean

Statistic = Callable[..., NDArray[np.float64]]
RECENT = 5  # last rounds of a run: more clients evaluate in several rounds than in one
MARGIN = 0.01  # largest difference of accuracy that is neither gain nor loss


class Estimate(NamedTuple):
    """A value and the ends of its interval, which are NaN if a task has fewer than two seeds."""

    value: float
    low: float
    high: float

    def text(self, factor: float = 100.0, digits: int = 1) -> str:
        """Return such as ``71.2 [70.1, 72.0]``, or ``71.2`` without an interval."""
        value, low, high = (f"{factor * number:.{digits}f}" for number in self)
        return "-" if np.isnan(self.value) else value + f" [{low}, {high}]" * (low != "nan")


def mean(*tasks: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """Return the mean of all tasks' scores."""
    return np.asarray(np.concatenate(tasks, axis).mean(axis))


def interquartile_mean(*tasks: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """Return the mean of the middle half of all tasks' scores (section 4.3)."""
    return np.asarray(trim_mean(np.concatenate(tasks, axis), 0.25, axis))


def estimate(
    tasks: Sequence[ArrayLike],
    statistic: Statistic = mean,
    *,
    confidence: float = 0.95,
    resamples: int = 9_999,
) -> Estimate:
    """Return a statistic of each task's scores, (n,), and its stratified bootstrap interval."""
    # in order, so that the interval does not depend on that of the runs
    ordered = [np.sort(np.asarray(scores, np.float64)) for scores in tasks]
    fewest = min(map(len, ordered), default=0)
    value = float(statistic(*ordered, axis=-1)) if fewest else np.nan
    if fewest < 2 or np.isnan(value):
        return Estimate(value, np.nan, np.nan)
    options: Any = {"confidence_level": confidence, "n_resamples": resamples, "vectorized": True}
    generator = np.random.default_rng(0)
    interval = bootstrap(ordered, statistic, method="percentile", axis=-1, rng=generator, **options)
    return Estimate(value, *map(float, interval.confidence_interval))


def run_scores(
    rounds: pd.DataFrame, metric: str = "accuracy", *, tasks: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return a metric's last value in each run and seed: columns run, task, seed, value.

    `tasks` has each run's task by its name: by default all have the same.
    """
    rows = rounds[rounds.metric == metric].sort_values("round")
    if rows.empty:
        names = ", ".join(sorted(rounds.metric.unique()))
        raise ValueError(f"metric: expected one of {names}; got {metric!r}")
    scores = rows.groupby(["run", "seed"]).value.last().reset_index()
    scores["task"] = [(tasks or {}).get(run, "") for run in scores.run]
    return scores[["run", "task", "seed", "value"]]


def summary_over_seeds(scores: pd.DataFrame) -> pd.DataFrame:
    """Return mean and interquartile mean of each run, with their 95 % intervals; one row a run."""
    rows = []
    for run, table in scores.groupby("run"):
        tasks = _by_task(table)
        row = {"run": run, "seeds": table.seed.nunique(), "scores": len(table)}
        for name, statistic in (("mean", mean), ("iqm", interquartile_mean)):
            value, low, high = estimate(tasks, statistic)
            row |= {name: value, f"{name}-low": low, f"{name}-high": high}
        rows.append(row)
    return pd.DataFrame(rows)


def paired_differences(scores: pd.DataFrame, against: Sequence[str] | None = None) -> pd.DataFrame:
    """Return mean differences between runs over the seeds that both have, with 95 % intervals.

    A row has run, against, pairs, difference, low, high; `against` names the runs to compare with,
    by default all.
    """
    table = scores.pivot_table(index=["task", "seed"], columns="run", values="value")
    rows = []
    for other in table.columns if against is None else against:
        for run in table.columns.drop(other):
            pairs = (table[run] - table[other]).dropna().rename("value").reset_index()
            rows.append((run, other, len(pairs), *estimate(_by_task(pairs))))
    names = ["run", "against", "pairs", "difference", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def performance_profile(
    scores: pd.DataFrame, thresholds: ArrayLike, *, resamples: int = 1_999
) -> pd.DataFrame:
    """Return which share of a run's scores lies above each threshold (section 4.2).

    A row has run, threshold, share and the ends low and high of its 95 % interval.
    """
    rows = [
        (
            run,
            threshold,
            *estimate([task > threshold for task in _by_task(table)], resamples=resamples),
        )
        for run, table in scores.groupby("run")
        for threshold in np.asarray(thresholds, np.float64)
    ]
    return pd.DataFrame(rows, columns=["run", "threshold", "share", "low", "high"])


def _by_task(scores: pd.DataFrame) -> list[NDArray[np.float64]]:
    return [rows.value.to_numpy(np.float64) for _, rows in scores.groupby("task")]


# ----------------------------------------------------------------------- clients


def newest_accuracies(clients: pd.DataFrame) -> pd.DataFrame:
    """Return each client's newest accuracy in the last five rounds of each run.

    `clients` is :attr:`~fedntk.simulations.Run.clients` of one or more runs. The result has the
    columns run, seed, partition, accuracy.
    """
    accuracy = clients[clients.metric == "accuracy"]
    last = accuracy.groupby(["run", "seed"])["round"].transform("max")
    recent = accuracy[accuracy["round"] > last - RECENT].sort_values("round")
    newest = recent.groupby(["run", "seed", "partition"], sort=False).value.last()
    return newest.rename("accuracy").reset_index()


def client_accuracy_table(clients: pd.DataFrame) -> pd.DataFrame:
    """Return accuracies with a row for each seed and client and a column for each run."""
    newest = newest_accuracies(clients)
    table = newest.pivot_table(index=["seed", "partition"], columns="run", values="accuracy")
    return table[list(dict.fromkeys(clients.run))]


def client_summary(clients: pd.DataFrame) -> pd.DataFrame:
    """Return mean, worst and standard deviation over a seed's clients, as means over seeds."""
    by_seed = newest_accuracies(clients).groupby(["run", "seed"], sort=False).accuracy
    spread = by_seed.std(ddof=0)
    runs = by_seed.agg(["size", "mean", "min"]).assign(std=spread).groupby("run", sort=False)
    table = runs.agg(
        mean=("mean", "mean"),
        worst=("min", "mean"),
        std=("std", "mean"),
        **{"mean-std": ("mean", "std")},
        seeds=("size", "size"),
        clients=("size", "mean"),
    )
    return table.astype({"clients": int}).loc[[*dict.fromkeys(clients.run)]].reset_index()


def client_gains(clients: pd.DataFrame, against: Sequence[str]) -> pd.DataFrame:
    """Count the clients that gain or lose by more than 0.01 with each run against the named ones.

    A row is a pair of runs: shares that gain and that lose, mean gain, largest gain and loss,
    clients that evaluated in both.
    """
    table, rows = client_accuracy_table(clients), []
    for other in [name for name in against if name in table]:
        for run in table.columns.drop(other):
            gain = (table[run] - table[other]).dropna()
            if len(gain):
                shares = (gain > MARGIN).mean(), (gain < -MARGIN).mean()
                ends = gain.clip(0).max(), gain.clip(None, 0).min()
                rows.append((run, other, *shares, gain.mean(), *ends, len(gain)))
    changes = ["gain", "lose", "mean-gain", "largest-gain", "largest-loss"]
    return pd.DataFrame(rows, columns=["run", "against", *changes, "clients"])
