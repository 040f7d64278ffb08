"""What the charts of ``report.html`` draw; ``page.html`` is its template."""

from typing import Any

import numpy as np
import pandas as pd

from .figures import curve
from .statistics import newest_accuracies, performance_profile

COSTS = ("bytes", "seconds", "replies", "rejected", "peak-memory", "num-examples", "models-")
MOST_POINTS = 300  # of a curve


def curves(rounds: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each run's seeds, and curves of at most 300 rounds of metrics that all runs have."""
    shared = set.intersection(*(set(rows.metric) for _, rows in rounds.groupby("run")))
    metrics = sorted(name for name in shared if not name.removeprefix("client-").startswith(COSTS))
    runs: list[dict[str, Any]] = []
    for name, rows in rounds.groupby("run"):
        run: dict[str, Any] = {"name": name, "seeds": rows.seed.nunique(), "metrics": {}}
        for metric in metrics:
            values = curve(rows, metric)
            some = values.iloc[:: -(-len(values) // MOST_POINTS) or 1]
            run["metrics"][metric] = some.to_dict("list")
        runs.append(run)
    return runs


def profiles(scores: pd.DataFrame) -> dict[str, Any]:
    """Return each run's performance profile, in per cent."""
    thresholds = np.quantile(scores.value, np.linspace(0, 1, 60), method="nearest")
    thresholds = np.unique([thresholds[0] - 0.01, *thresholds])  # where shares change
    profile = 100 * performance_profile(scores, thresholds).set_index("run")
    return {str(name): rows.to_dict("list") for name, rows in profile.groupby("run")}


def client_points(clients: pd.DataFrame) -> dict[str, Any]:
    """Return the newest accuracy of each client of each run, in per cent, with its name."""
    newest = newest_accuracies(clients)
    words = "client " + newest.partition.astype(str) + ", seed " + newest.seed.astype(str)
    newest = newest.assign(accuracy=100 * newest.accuracy, client=words)
    return {
        str(name): {"x": rows.accuracy.tolist(), "text": rows.client.tolist()}
        for name, rows in newest.groupby("run")
    }
