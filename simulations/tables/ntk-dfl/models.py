"""Clients' models against their mean, and means of some of them: measures of a finished run."""

import pandas as pd

from fedntk.simulations import Run
from fedntk.simulations.reproduction.measures import NEIGHBOURS, NO_ROUND


def gap(run: Run) -> dict[int, float]:
    """Return by how many points the mean model is ahead of the mean client in the last rounds."""
    gaps = run.curve("accuracy") - run.curve("trained-accuracy-mean")
    return {NO_ROUND: 100 * gaps.dropna().tail(NEIGHBOURS).mean()}


def best_first(run: Run) -> dict[int, float]:
    """Return number of clients -> accuracy of the mean of as many of the best models."""
    return _selected(run, "best to worst")


def random_order(run: Run) -> dict[int, float]:
    """Return number of clients -> accuracy of the mean of as many models, drawn at random."""
    return _selected(run, "random")


def worst_first(run: Run) -> dict[int, float]:
    """Return number of clients -> accuracy of the mean of as many of the worst models."""
    return _selected(run, "worst to best")


def first_at_85(run: Run) -> dict[int, float]:
    """Return the first round with an evaluation at 85 %; NaN if there is none."""
    accuracies = run.curve("accuracy")
    reached = accuracies.index[accuracies >= 0.85]
    return {NO_ROUND: float(reached[0]) if len(reached) else float("nan")}


def _selected(run: Run, order: str) -> dict[int, float]:
    means = pd.read_parquet(run.folder / "details" / "selection.parquet")
    rows = means[means.order == order]
    return {int(n): 100 * float(a) for n, a in zip(rows.clients, rows.accuracy, strict=True)}
