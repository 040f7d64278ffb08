"""Progress of runs: a bar in a terminal and in Jupyter, lines in a log."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from html import escape
from logging import StreamHandler, getLogger
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..errors import CONTROL

LOG_EVERY = 10.0  # seconds between lines in a log
JUPYTER_EVERY = 0.25
logger = getLogger("flwr")


@dataclass
class Progress:
    """How far one run, or several that are run one after the other, have come.

    `rounds` counts those of all runs, `headline` names the metric shown: a share, such as accuracy.
    """

    rounds: int
    runs: int = 1
    show: Callable[["Progress"], None] = lambda state: None
    every: float = 0.0  # least seconds between two looks, except those that are shown at once
    run: int = 0
    name: str = ""
    round: int = 0
    run_rounds: int = 0
    state: str = ""
    headline: str = "accuracy"
    value: float | None = None  # of the headline
    done: int = 0  # rounds of all runs, those found finished included
    ended: list[str] = field(default_factory=list)  # a line for each run
    _start: float = field(default_factory=lambda: time.monotonic())
    _last: float = 0.0  # when the last round ended, or the run began
    _shown: float = -float("inf")
    _seconds: list[float] = field(default_factory=list)  # of each round run here

    def begin(self, name: str, rounds: int, done: int = 0, *, headline: str = "accuracy") -> None:
        """Begin the next run, with `done` rounds run before; show its metric `headline`."""
        self.run += 1
        self.name, self.run_rounds, self.round, self.done = name, rounds, done, self.done + done
        self.headline, self.value, self.state = headline, None, "starting"
        self._last = time.monotonic()
        self._show(now=True)

    def on_answer(self, kind: str, answered: int, asked: int) -> None:
        """Show how many clients have answered."""
        verb = {"train": "training", "evaluate": "evaluating"}.get(kind, "answering")
        self.state = f"{verb} {answered}/{asked} clients"
        self._show()

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Show a round's metrics; one without the headline keeps the newest value."""
        number, now = int(record["round"]), time.monotonic()
        if step := max(number - self.round, 0):
            self._seconds += [(now - self._last) / step] * step
        self.done += step
        self.round, self._last = number, now
        self.value = record.get(self.headline, self.value)
        if "replies-accepted" in record:
            rejected = int(record["replies-rejected"])
            few = f", {rejected} rejected" if rejected else ""
            self.state = f"{record['replies-accepted']:.0f} clients{few}"
        self._show()

    def end(self, state: str = "done") -> None:
        """End the run that has begun, whether or not all its rounds were run."""
        if self.running:
            self.done += self.run_rounds - self.round
            self.state = CONTROL.sub(" ", state)
            self.ended.append(str(self))
            self._show(now=True)

    def __str__(self) -> str:
        parts = [f"round {self.round}/{self.run_rounds}", self.state]
        if self.runs > 1:
            parts.insert(0, f"run {self.run}/{self.runs}")
        if self.value is not None:
            parts.append(f"{self.headline} {100 * self.value:.1f} %")
        parts.append(str(timedelta(seconds=int(time.monotonic() - self._start))))
        if self._seconds and self.done < self.rounds:  # by the median round
            left = statistics.median(self._seconds) * (self.rounds - self.done)
            parts.append(f"{timedelta(seconds=round(left))} left")
        return f"{self.name}: " + ", ".join(parts)

    def _show(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._shown >= self.every:
            self._shown = time.monotonic()
            self.show(self)

    @property
    def running(self) -> bool:
        """Whether a run is going on."""
        return len(self.ended) < self.run


def _show_in_jupyter() -> Callable[[Progress], None]:
    """Return a function that rewrites one output of the cell."""
    from IPython.display import display

    handle = display({"text/plain": "..."}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def show(state: Progress) -> None:
        lines = [*state.ended[-3:], *[str(state)] * state.running]
        bar = f'<progress value="{state.done}" max="{state.rounds}" style="width: 24em"></progress>'
        html = "<br>".join([*map(escape, lines), *[bar] * (state.done < state.rounds)])
        handle.update({"text/plain": "\n".join(lines), "text/html": html}, raw=True)

    return show


def _print(state: Progress, console: Console) -> None:
    console.print(str(state), markup=False, highlight=False, soft_wrap=True)


def _show_in_terminal(live: Live) -> Callable[[Progress], None]:
    """Return a function that rewrites bar and line; the lines of ended runs stay above them."""

    def show(state: Progress) -> None:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=state.rounds, completed=state.done, width=24)
        row.add_row(bar, *[Text(str(state))] * state.running)
        live.update(row)
        if not state.running:
            _print(state, live.console)

    return show


@contextlib.contextmanager
def _log_above() -> Iterator[None]:
    """Print Flower's log above the live display: by the error output that rich has replaced."""
    handlers = [h for h in logger.handlers if isinstance(h, StreamHandler)]
    before = [(handler, handler.setStream(sys.stderr)) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in before:
            if stream is not None:
                handler.setStream(stream)


def silence_bars() -> None:
    """Have the libraries that load data show no bars of their own, loaded or not."""
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("datasets", "huggingface_hub.utils"):
        if name in sys.modules:
            sys.modules[name].disable_progress_bars()


@contextlib.contextmanager
def progress(
    rounds: int,
    runs: int = 1,
    *,
    enabled: bool = True,
    or_else: str = "",
    console: Console | None = None,
) -> Iterator[Progress]:
    """Show the progress of some runs on `console`, the error output by default, if `enabled`.

    An interrupt is logged with how to go on: by the same call, or by what `or_else` says.
    """
    state, console = Progress(rounds, runs), console or Console(stderr=True)
    with contextlib.ExitStack() as shown:
        if enabled and console.is_jupyter:
            state.show, state.every = _show_in_jupyter(), JUPYTER_EVERY
        elif enabled and console.is_terminal:
            live = Live(console=console, refresh_per_second=4, transient=True)
            state.show = _show_in_terminal(shown.enter_context(live))
            shown.enter_context(_log_above())
        elif enabled:
            state.show, state.every = partial(_print, console=console), LOG_EVERY
        try:
            yield state
        except KeyboardInterrupt:
            state.end("interrupted")
            logger.warning("interrupted; go on with the same call%s", or_else)
            raise
