"""One combination of settings, run with several seeds: in this process, or in several others."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from logging import ERROR, getLogger
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess as Process
from typing import Any, TypeVar

from ..config.config import Config
from ..config.settings import ConfigError
from ..data.data import Data, data_kept
from ..engine._flower import log_from
from ..engine.processes import PATIENCE
from ..engine.runs import run
from ..errors import RunFailed, Stopped

FINISHED, PRUNED = "", "pruned"  # how a trial ended; anything else is what went wrong
T = TypeVar("T")
Worker = tuple[Any, Process]  # our end of its connection, and the process


def run_trials(
    trials: Iterator[tuple[T, Sequence[Config]]],
    on_round: Callable[[T, int, Mapping[str, Any]], bool],
    on_end: Callable[[T, str], None],
    parallel: int,
) -> None:
    """Run trials, `parallel` at a time: each in another process, or a single one in this.

    The next of `trials`, each with its configuration for each seed, is taken when it can begin.
    `on_round` is given a trial, the position of the seed and the metrics of the round, and says
    whether to end the trial; `on_end` is given the trial and how it ended.
    """
    if parallel == 1:
        for trial, configs in trials:
            on_end(trial, _run_trial(configs, partial(on_round, trial)))
        return
    idle: list[Worker] = []
    busy: dict[Any, tuple[Process, T]] = {}  # by connection
    try:
        while True:
            while len(busy) < parallel and (begun := next(trials, None)) is not None:
                trial, configs = begun
                passed = data_kept(configs[0].dataset)
                connection, process = idle.pop() if idle else _start_worker(parallel, passed)
                busy[connection] = process, trial
                connection.send(configs)
            if not busy:
                return
            for ready in wait(list(busy)):
                ours: Any = ready
                process, trial = busy[ours]
                try:
                    answer = ours.recv()  # a round's metrics, or how the trial ended
                except (EOFError, OSError):
                    process.join()
                    answer = f"its process ended with exit code {process.exitcode}"
                if isinstance(answer, str):
                    del busy[ours]
                    idle += [(ours, process)] * process.is_alive()
                    on_end(trial, answer)
                else:
                    ours.send(on_round(trial, *answer))
    finally:
        for connection, process in (workers := idle + [(c, p) for c, (p, _) in busy.items()]):
            connection.close()
            process.terminate()
        for _, process in workers:
            process.join(PATIENCE)
            process.kill()
            process.join()


def _run_trial(
    configs: Sequence[Config], on_round: Callable[[int, Mapping[str, Any]], bool]
) -> str:
    """Run a combination with each seed in turn; return how it ended."""
    for position, config in enumerate(configs):

        def end_if_bad(record: Mapping[str, Any], position: int = position) -> None:
            if on_round(position, record):
                raise Stopped(PRUNED)

        try:
            with log_from(ERROR):  # it would say how to go on with the run, not with the search
                run(config, progress=False, resume=True, on_round=end_if_bad)
        except Stopped:
            return PRUNED
        except (RunFailed, ConfigError) as error:
            return f"seed {config.seed}: {error}"
    return FINISHED


def _start_worker(parallel: int, passed: Data | None) -> Worker:
    """Start a process that runs one trial at a time, and asks after each round whether to go on.

    It is given the examples that were passed in this process, through a pipe.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, passed), daemon=True)
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // parallel, 1)))
    try:
        process.start()
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
    theirs.close()
    return ours, process


def _work(connection: Connection, passed: Data | None) -> None:
    """Run the trials that come through a connection, until it is closed."""
    if passed is not None:
        passed.keep()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    getLogger("flwr").disabled = True  # the main process says what went wrong

    def on_round(position: int, record: Mapping[str, Any]) -> bool:
        try:
            connection.send((position, record))
            return bool(connection.recv())
        except (EOFError, OSError):  # the main process is gone
            raise KeyboardInterrupt from None

    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            connection.send(_run_trial(connection.recv(), on_round))
