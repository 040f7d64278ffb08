"""Progress of runs: a bar in a terminal and in Jupyter; a line for each run that has ended."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from logging import StreamHandler, getLogger
from typing import Any

from rich.console import Console
from tqdm.auto import tqdm
from tqdm.contrib import DummyTqdmFile

from ..errors import CONTROL

logger = getLogger("flwr")


@dataclass
class Progress:
    """How far one run, or several that are run one after the other, have come.

    `rounds` counts those of all runs, without what was run before. `headline` names the metric
    shown: a share, such as accuracy.
    """

    rounds: int
    runs: int = 1
    enabled: bool = True
    bar: Any = None  # of tqdm
    run: int = 0
    name: str = ""
    round: int = 0
    run_rounds: int = 0
    state: str = ""
    headline: str = "accuracy"
    value: float | None = None  # of the headline
    done: int = 0  # rounds of all runs
    running: bool = False
    _start: float = field(default_factory=time.monotonic)

    def begin(self, name: str, rounds: int, done: int = 0, *, headline: str = "accuracy") -> None:
        """Begin the next run, with `done` rounds run before; show its metric `headline`."""
        self.run += 1
        self.rounds -= done
        self.name, self.run_rounds, self.round, self.running = name, rounds, done, True
        self.headline, self.value, self.state = headline, None, "starting"
        self._show()

    def on_answer(self, kind: str, answered: int, asked: int) -> None:
        """Show how many clients have answered."""
        verb = {"train": "training", "evaluate": "evaluating"}.get(kind, "answering")
        self.state = f"{verb} {answered}/{asked} clients"
        self._show()

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Show a round's metrics; one without the headline keeps the newest value."""
        number = int(record["round"])
        self.done += max(number - self.round, 0)
        self.round = number
        self.value = record.get(self.headline, self.value)
        if "replies-accepted" in record:
            rejected = int(record["replies-rejected"])
            few = f", {rejected} rejected" if rejected else ""
            self.state = f"{record['replies-accepted']:.0f} clients{few}"
        self._show(now=True)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.enabled:
            tqdm.write(CONTROL.sub(" ", text), file=_stream())

    def end(self, state: str = "done") -> None:
        """End the run that has begun, whether or not all its rounds were run; print its line."""
        if not self.running:
            return
        self.running = False
        self.rounds -= self.run_rounds - self.round
        self.state = CONTROL.sub(" ", state)
        self._show()
        elapsed = timedelta(seconds=int(time.monotonic() - self._start))
        self.say(f"{self}, {elapsed}")

    def __str__(self) -> str:
        parts = [f"round {self.round}/{self.run_rounds}", self.state]
        if self.runs > 1:
            parts.insert(0, f"run {self.run}/{self.runs}")
        if self.value is not None:
            parts.append(f"{self.headline} {100 * self.value:.1f} %")
        return f"{self.name}: " + ", ".join(parts)

    def _show(self, *, now: bool = False) -> None:
        if self.bar is not None:
            self.bar.total = self.rounds
            self.bar.set_description_str(str(self), refresh=False)
            self.bar.update(self.done - self.bar.n)
            if now:
                self.bar.refresh()


def _stream() -> Any:
    """Return where progress is shown: in Jupyter the output, as errors are red there."""
    return sys.stdout if Console().is_jupyter else sys.stderr


@contextlib.contextmanager
def _bar(rounds: int) -> Iterator[Any]:
    """Show a bar, with Flower's log above it."""
    handlers = [h for h in logger.handlers if isinstance(h, StreamHandler)]
    streams = [handler.setStream(DummyTqdmFile(handler.stream)) for handler in handlers]
    text = "{desc}, {elapsed}, {remaining} left {bar}"
    shown = {"bar_format": text, "dynamic_ncols": True, "leave": False, "file": _stream()}
    try:
        # not disabled, whatever `silence_bars` has set for the bars of others
        with tqdm(total=rounds, miniters=0, smoothing=0, disable=False, **shown) as bar:
            yield bar
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
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
    rounds: int, runs: int = 1, *, enabled: bool = True, or_else: str = ""
) -> Iterator[Progress]:
    """Show the progress of some runs, if `enabled`; log how an interrupted one goes on."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        bar = None
        if enabled and (console.is_terminal or console.is_jupyter):
            bar = stack.enter_context(_bar(rounds))
        state = Progress(rounds, runs, enabled, bar)
        try:
            yield state
        except KeyboardInterrupt:
            state.end("interrupted")
            logger.warning("interrupted; go on with the same call%s", or_else)
            raise
