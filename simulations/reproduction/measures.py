"""Figures of a run, defined so that the last bits of a computation do not move them.

A mean over the last evaluations stands for a run's end, and a mean of five evaluations for a round:
see :func:`~fedntk.simulations.report.results.round_at`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from ..config.importing import import_named
from ..report.results import Run, round_at

NO_ROUND = -1  # of a figure of the whole run
NEIGHBOURS = 5  # evaluations of which a mean is taken
COSTS = {"seconds": "seconds", "bytes up": "bytes-up", "bytes down": "bytes-down"}


class Value(NamedTuple):
    """One figure: what it measures, of which round or NO_ROUND."""

    measure: str
    round: int
    value: float


class Measure(BaseModel):
    """One kind of figure that a table or picture shows, and how it is read from a run.

    `at` says where the metric is read: ``"end"``, the mean of its last evaluations; ``"best"``, the
    largest mean of five evaluations in a row; ``"rounds"``, at `rounds`; ``"curve"``, at all;
    ``"reach"``, the first round at which it reaches `target`; ``"total"``, its sum, up to the round
    at which `until` is reached by the accuracy, if given; ``"clients"``, the deciles of the
    clients' values at `rounds`, or in their last evaluation.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )

    metric: str = "accuracy"
    at: Literal["end", "best", "rounds", "curve", "reach", "total", "clients"] = "end"
    last: int = NEIGHBOURS
    rounds: list[int] = []
    target: float = 0.0
    until: float = 0.0
    function: str = ""  # <file>.py:<function> of a Run in place of all these
    label: str = ""
    unit: str = ""
    factor: float = 1.0  # from the metric's unit to that shown
    digits: int = 1
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
            yield from self._deciles(run.clients, name)
        else:
            for number, value in READ[self.at](self, run).items():
                yield Value(name, int(number), self.factor * float(value))

    def _deciles(self, clients: pd.DataFrame, name: str) -> Iterator[Value]:
        table = clients[clients.metric == self.metric]
        for number in self.rounds or [table["round"].max()]:
            values = table[table["round"] == number].value
            for decile in range(0, 101, 10):
                figure = float(np.percentile(values, decile)) if len(values) else np.nan
                yield Value(f"{name}, decile {decile}", int(number), self.factor * figure)


def _by_round(run: Run, metric: str) -> dict[int, float]:
    return {int(number): float(value) for number, value in run.curve(metric).items()}  # type: ignore[call-overload]


def _end(measure: Measure, run: Run) -> dict[int, float]:
    curve = run.curve(measure.metric)
    return {NO_ROUND: curve[curve.index > 0].tail(measure.last).mean()}


def _best(measure: Measure, run: Run) -> dict[int, float]:
    curve = run.curve(measure.metric)
    return {NO_ROUND: curve[curve.index > 0].rolling(NEIGHBOURS, min_periods=1).mean().max()}


def _at_rounds(measure: Measure, run: Run) -> Mapping[int, float]:
    curve = run.curve(measure.metric)
    return {number: curve.get(number, np.nan) for number in measure.rounds}


def _curve(measure: Measure, run: Run) -> Mapping[int, float]:
    return _by_round(run, measure.metric)


def _reach(measure: Measure, run: Run) -> dict[int, float]:
    number = round_at(_by_round(run, measure.metric), measure.target)
    return {NO_ROUND: np.nan if number is None else number}


def _total(measure: Measure, run: Run) -> dict[int, float]:
    curve = run.curve(measure.metric)
    if measure.until:
        number = round_at(_by_round(run, "accuracy"), measure.until)
        return {NO_ROUND: np.nan if number is None else curve[curve.index <= number].sum()}
    return {NO_ROUND: curve.sum()}


READ: dict[str, Callable[[Measure, Run], Mapping[int, float]]] = {
    "end": _end,
    "best": _best,
    "rounds": _at_rounds,
    "curve": _curve,
    "reach": _reach,
    "total": _total,
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
