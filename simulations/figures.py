"""Pictures of runs: colour-blind safe, labelled with units."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["COLOURS", "accuracy_curves"]

# Okabe and Ito's palette
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dvp*"


def accuracy_curves(
    rounds: pd.DataFrame,
    path: str | Path,
    *,
    title: str = "",
    target: float | None = None,
    bottom: float = 0.0,
) -> Path:
    """Draw test accuracy against communication rounds, one curve a run.

    Parameters
    ----------
    rounds : DataFrame
        Tidy, as :func:`~fedntk.simulations.load_results` returns it. Several seeds of one run
        become their mean, with a band from the lowest to the highest.
    path : path
        Of the PNG to write.
    title : str
        Above the picture.
    target : float, optional
        Accuracy to mark with a line.
    bottom : float
        Accuracy at which the axis begins; rounds under it are cut off.

    Returns
    -------
    Path
        `path`.
    """
    figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
    axes = figure.subplots()
    accuracy = rounds[rounds.metric == "accuracy"]
    for i, (name, rows) in enumerate(accuracy.groupby("run", sort=False)):
        by_round = rows.groupby("round").value.agg(["mean", "min", "max"]) * 100
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axes.plot(
            by_round.index, by_round["mean"], color=colour, marker=marker, ms=4, label=str(name)
        )
        if rows.seed.nunique() > 1:
            axes.fill_between(
                by_round.index, by_round["min"], by_round["max"], color=colour, alpha=0.2, lw=0
            )
    if target is not None:
        axes.axhline(100 * target, color="0.5", lw=1, ls="--", zorder=0)
        axes.annotate(
            f"{100 * target:g} %", (1.0, 100 * target), xycoords=("axes fraction", "data"),
            xytext=(3, 0), textcoords="offset points", ha="left", va="center", color="0.4",
        )  # fmt: skip
    axes.set(xlabel="communication round", ylabel="test accuracy (%)", title=title)
    axes.set_ylim(100 * bottom, 100 if bottom == 0 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path = Path(path)
    figure.savefig(path)
    return path
