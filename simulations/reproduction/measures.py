"""Figures of a run, defined so that the last bits of a computation do not move them.

A mean over the last evaluations stands for a run's end, and a mean of five evaluations for a round:
see :func:`~fedntk.simulations.report.results.round_at`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from ..config.importing import import_named
from ..report.results import Run, round_at

NO_ROUND = -1  # of a figure of the whole run
MOVED = "moved by the last bits"  # ends the measure that tells how much a nudge of weights did
NEIGHBOURS = 5  # evaluations of which a mean is taken
DECILES = range(0, 101, 10)
COSTS = {"seconds": "seconds", "bytes up": "bytes-up", "bytes down": "bytes-down"}


class Value(NamedTuple):
    """One figure: the name of its measure, its round or NO_ROUND, and the value."""

    measure: str
    round: int
    value: float


class Measure(BaseModel):
    """One kind of figure that a table or picture shows, and how it is read from a run.

    `at` says where the metric is read: ``"end"``, the mean of its last evaluations; ``"best"``, the
    largest mean of as many evaluations in a row; ``"rounds"``, at `rounds`; ``"curve"``, at all;
    ``"reach"``, the first round at which it reaches `target`; ``"total"``, its sum, up to the round
    at which `until` is reached by the accuracy, if given; ``"cumulative"``, its sums up to each
    round with an evaluation; ``"clients"``, the deciles of the clients' values at `rounds`, or in
    their last evaluation. Rounds after a sum in `within` has passed its limit do not count. The
    metric ``"headline"`` is what the method is judged by; with `client` it is of that partition's
    own evaluations.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )

    metric: str = "accuracy"
    client: int | None = None
    at: Literal["end", "best", "rounds", "curve", "reach", "total", "cumulative", "clients"] = "end"
    last: int = NEIGHBOURS
    rounds: list[int] = []
    target: float = 0.0
    until: float = 0.0
    within: dict[str, float] = {}  # sums of metrics, with + between them -> the most that counts
    function: str = ""  # <file>.py:<function> of a Run in place of all these
    label: str = ""
    unit: str = ""
    factor: float = 1.0  # from the metric's unit to that shown
    digits: int = 1
    each: bool = False  # of a table: each seed's figure in place of mean and standard deviation
    tolerance: float = 0.0  # in the unit shown: how far another machine's figure may differ

    def of(self, run: Run, name: str, folder: Path) -> Iterator[Value]:
        """Yield the figures of a run."""
        if self.function:
            file, _, function = self.function.partition(":")
            for number, value in import_named("function", f"{folder / file}:{function}")(
                run
            ).items():
                yield Value(name, number, float(value))
        elif self.at == "clients":
            yield from self._deciles(run, name)
        else:
            for number, value in READ[self.at](self, run).items():
                yield Value(name, int(number), self.factor * float(value))

    def _deciles(self, run: Run, name: str) -> Iterator[Value]:
        curves = {d: run.curve(f"{self.metric}-decile-{d}") for d in DECILES}
        if curves[0].empty:  # not of models that the server evaluates: clients do
            by_round = run.clients[run.clients.metric == self.metric].groupby("round").value
            curves = {d: by_round.quantile(d / 100) for d in DECILES}
        evaluated = curves[0].index
        for number in [n for n in self.rounds if n in evaluated] or evaluated[-1:]:
            for decile, curve in curves.items():
                yield Value(f"{name}, decile {decile}", int(number), self.factor * curve[number])


def _curve(measure: Measure, run: Run) -> dict[int, float]:
    name = run.summary["headline"] if measure.metric == "headline" else measure.metric
    curve = run.curve(name)
    if measure.client is not None:
        rows = run.clients[run.clients.partition == measure.client]
        curve = rows[rows.metric == name].set_index("round").value
    last = curve.index.max()
    for metrics, limit in measure.within.items():
        costs_so_far = [run.curve(metric).cumsum() for metric in metrics.split("+")]
        spent = pd.concat(costs_so_far, axis=1).sum(axis=1)
        last = min(last, spent[spent <= limit].index.max())
    return {int(number): float(curve[number]) for number in curve.index if number <= last}


def _trained(measure: Measure, run: Run) -> pd.Series:
    curve = pd.Series(_curve(measure, run), dtype=float)
    return curve[curve.index > 0]


def _end(measure: Measure, run: Run) -> dict[int, float]:
    return {NO_ROUND: _trained(measure, run).tail(measure.last).mean()}


def _best(measure: Measure, run: Run) -> dict[int, float]:
    means = _trained(measure, run).rolling(measure.last, min_periods=1).mean()
    return {NO_ROUND: means.max()}


def _at_rounds(measure: Measure, run: Run) -> dict[int, float]:
    curve = _curve(measure, run)
    return {number: curve.get(number, np.nan) for number in measure.rounds}


def _reach(measure: Measure, run: Run) -> dict[int, float]:
    number = round_at(_curve(measure, run), measure.target)
    return {NO_ROUND: np.nan if number is None else number}


def _total(measure: Measure, run: Run) -> dict[int, float]:
    curve = _curve(measure, run)
    last = max(curve, default=0)
    if measure.until:
        accuracy = measure.model_copy(update={"metric": "accuracy", "client": None})
        reached = round_at(_curve(accuracy, run), measure.until)
        if reached is None:
            return {NO_ROUND: np.nan}
        last = reached
    return {NO_ROUND: sum(value for number, value in curve.items() if number <= last)}


def _cumulative(measure: Measure, run: Run) -> dict[int, float]:
    sums = run.curve(measure.metric).cumsum()
    accuracy = run.curve()  # of personal methods it may be the clients' only
    evaluated = (run.curve(run.summary["headline"]) if accuracy.empty else accuracy).index
    return {int(number): float(sums[number]) for number in sums.index.intersection(evaluated)}


READ: dict[str, Callable[[Measure, Run], dict[int, float]]] = {
    "end": _end,
    "best": _best,
    "rounds": _at_rounds,
    "curve": _curve,
    "reach": _reach,
    "total": _total,
    "cumulative": _cumulative,
}


def costs(run: Run) -> Iterator[Value]:
    """Yield the seconds and bytes of a whole run, and its number of rounds."""
    for name, metric in COSTS.items():
        yield Value(name, NO_ROUND, float(run.curve(metric).sum()))
    yield Value("rounds run", NO_ROUND, float(run.summary["rounds"]))


def program_values(place: str, settings: dict[str, Any], seed: int) -> Iterator[Value]:
    """Yield what a declaration's own function measures: (measure, round or None, value)."""
    for measure, number, value in import_named("program", place)(settings, seed):
        yield Value(measure, NO_ROUND if number is None else int(number), float(value))
