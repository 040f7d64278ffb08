"""Progress of runs: in a terminal, in Jupyter, or in a log."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from logging import StreamHandler, getLogger
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LOG_EVERY = 10.0  # seconds between lines in a log
JUPYTER_EVERY = 0.25
Sink = Callable[["Progress"], None]


@dataclass
class Progress:
    """How far one run, or a comparison of several, has come.

    `rounds` counts those of all runs, `headline` names the metric shown: a share, such as accuracy.
    """

    rounds: int
    runs: int = 1
    sink: Sink | None = None  # shows the state
    every: float = 0.0  # least seconds between two looks, except those that are shown at once
    run: int = 0
    name: str = ""
    round: int = 0
    run_rounds: int = 0
    state: str = ""
    headline: str = "accuracy"
    value: float | None = None  # of the headline
    ended: bool = False
    _done: int = 0  # rounds of all runs, those found finished included
    _start: float = field(default_factory=lambda: time.monotonic())
    _last: float = 0.0  # when the last round ended, or the run began
    _shown: float = -float("inf")
    _seconds: list[float] = field(default_factory=list)  # of each round run here

    def begin(self, name: str, rounds: int, done: int = 0, *, headline: str = "accuracy") -> None:
        """Begin the next run, with `done` rounds run before; show its metric `headline`."""
        self.run += 1
        self.name, self.run_rounds, self.round, self._done = name, rounds, done, self._done + done
        self.headline, self.value = headline, None
        self.state, self.ended = "starting", False
        self._last = time.monotonic()
        self._show(now=True)

    def on_answer(self, kind: str, answered: int, asked: int) -> None:
        """Show how many clients have answered."""
        verb = {"train": "training", "evaluate": "evaluating"}.get(kind, "answering")
        self.state = f"{verb} {answered}/{asked} clients"
        self._show()

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Show a round's metrics."""
        number, now = int(record["round"]), time.monotonic()
        if step := max(number - self.round, 0):
            self._seconds += [(now - self._last) / step] * step
        self._done += step
        self.round, self.value, self._last = number, record.get(self.headline), now
        if "replies-accepted" in record:
            rejected = int(record["replies-rejected"])
            few = f", {rejected} rejected" if rejected else ""
            self.state = f"{record['replies-accepted']:.0f} clients{few}"
        self._show()

    def end(self, state: str = "done") -> None:
        """End the current run, whether or not all its rounds were run."""
        self._done += self.run_rounds - self.round
        self.state, self.ended = state, True
        self._show(now=True)

    @property
    def left(self) -> str:
        """Time that the other rounds will take, by the median; empty before the first round."""
        if not self._seconds:
            return ""
        seconds = statistics.median(self._seconds) * (self.rounds - self._done)
        return str(timedelta(seconds=round(seconds)))

    def __str__(self) -> str:
        parts = [f"round {self.round}/{self.run_rounds}", self.state]
        if self.runs > 1:
            parts.insert(0, f"run {self.run}/{self.runs}")
        if self.value is not None:
            parts.append(f"{self.headline} {100 * self.value:.1f} %")
        parts.append(str(timedelta(seconds=int(time.monotonic() - self._start))))
        if self.left and self._done < self.rounds:
            parts.append(f"{self.left} left")
        return f"{self.name}: " + ", ".join(parts)

    def _show(self, *, now: bool = False) -> None:
        if self.sink is not None and (now or time.monotonic() - self._shown >= self.every):
            self._shown = time.monotonic()
            self.sink(self)


def _to_log(console: Console) -> Sink:
    return lambda state: console.print(str(state), markup=False, highlight=False, soft_wrap=True)


def _to_jupyter() -> Sink:
    """Rewrite one output of the cell in place."""
    from IPython.display import display

    handle = display({"text/plain": "..."}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
    ended: list[str] = []

    def show(state: Progress) -> None:
        handle.update({"text/plain": "\n".join([*ended[-3:], str(state)])}, raw=True)
        if state.ended:
            ended.append(str(state))

    return show


def _to_terminal(live: Live) -> Sink:
    """Rewrite a bar and a line in place; the lines of ended runs stay above them."""

    def show(state: Progress) -> None:
        row = Table.grid(padding=(0, 1))
        name, _, rest = str(state).partition(": ")
        bar = ProgressBar(total=max(state.run_rounds, 1), completed=state.round, width=24)
        row.add_row(Text(name), bar)
        live.update(Group(row, Text(rest)))
        if state.ended and state.run < state.runs:
            live.console.print(str(state), markup=False, highlight=False)

    return show


@contextlib.contextmanager
def _log_above() -> Iterator[None]:
    """Print Flower's log above the live display: by the error output that rich has replaced."""
    handlers = [h for h in getLogger("flwr").handlers if isinstance(h, StreamHandler)]
    before = [(handler, handler.setStream(sys.stderr)) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in before:
            if stream is not None:
                handler.setStream(stream)


@contextlib.contextmanager
def progress(
    rounds: int, runs: int = 1, *, enabled: bool = True, console: Console | None = None
) -> Iterator[Progress]:
    """Show the progress of some runs on `console`, the error output by default, if `enabled`."""
    state = Progress(rounds, runs)
    console = console or Console(stderr=True)
    if not enabled:
        yield state
    elif console.is_jupyter:
        state.sink, state.every = _to_jupyter(), JUPYTER_EVERY
        yield state
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live, _log_above():
            state.sink = _to_terminal(live)
            yield state
    else:
        state.sink, state.every = _to_log(console), LOG_EVERY
        yield state
