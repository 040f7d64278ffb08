"""``report.html``: one file for any browser, without a network: tables to sort, curves to explore.

``page.html`` is its template. It holds Plotly's script, and draws from the data that the functions
here return.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from plotly.offline import get_plotlyjs

from ..data.client_tables import newest_accuracies
from .figures import curve
from .statistics import performance_profile

COSTS = ("bytes", "seconds", "replies", "rejected", "peak-memory", "num-examples", "models-")
MOST_POINTS = 300  # of a curve


@dataclass(frozen=True)
class Section:
    """A part of the report: a title, what it shows, and a table or a chart or both."""

    title: str
    text: str
    frame: pd.DataFrame | None = None
    chart: str = ""


def write_page(
    path: Path, setting: str, warnings: Sequence[str], sections: Sequence[Section], data: Any
) -> Path:
    """Write the page; `data` is what its charts draw, by their names."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("page.html")
    text = template.render(
        setting=setting,
        warnings=warnings,
        sections=sections,
        styles=data["styles"],
        # pandas writes NaN as null; "<" could end the script that holds the data
        data=pd.Series(data).to_json(double_precision=6).replace("<", r"\u003c"),
        plotly=get_plotlyjs(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def curves(rounds: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each run's style, costs by round, and mean and range of its metrics over seeds.

    Metrics are those that all runs have; of many rounds, every so many are kept.
    """
    shared = set.intersection(*(set(own.metric) for _, own in rounds.groupby("run")))
    metrics = sorted(each for each in shared if not each.removeprefix("client-").startswith(COSTS))
    found: list[dict[str, Any]] = []
    for name, own in rounds.groupby("run"):
        run: dict[str, Any] = {"name": name, "seeds": own.seed.nunique(), "metrics": {}}
        for metric in metrics:
            values = curve(own, metric)
            some = values.iloc[:: -(-len(values) // MOST_POINTS) or 1]
            run["metrics"][metric] = some.to_dict("list")
        found.append(run)
    return found


def profiles(scores: pd.DataFrame) -> dict[str, Any]:
    """Return each run's performance profile, in per cent."""
    thresholds = np.quantile(scores.value, np.linspace(0, 1, 60), method="nearest")
    thresholds = np.unique([thresholds[0] - 0.01, *thresholds])  # where shares change
    found = 100 * performance_profile(scores, thresholds).set_index("run")
    return {str(name): own.to_dict("list") for name, own in found.groupby("run")}


def client_points(clients: pd.DataFrame) -> dict[str, Any]:
    """Return the newest accuracy of each client of each run, in per cent, with its name."""
    newest = newest_accuracies(clients)
    words = "client " + newest.partition.astype(str) + ", seed " + newest.seed.astype(str)
    newest = newest.assign(accuracy=100 * newest.accuracy, client=words)
    return {
        str(name): {"x": own.accuracy.tolist(), "text": own.client.tolist()}
        for name, own in newest.groupby("run")
    }
