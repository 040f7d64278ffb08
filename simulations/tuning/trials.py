"""One combination of settings, run with several seeds: here, or in processes of their own."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from logging import ERROR, getLogger
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ..config.config import Config
from ..config.settings import ConfigError
from ..engine._flower import log_from
from ..engine.processes import PATIENCE
from ..engine.runs import run
from ..errors import RunFailed, Stopped

__all__ = ["FINISHED", "PRUNED", "run_trials"]

FINISHED, PRUNED = "", "pruned"  # how a trial ended; anything else is what went wrong
T = TypeVar("T")
OnRound = Callable[[int, Mapping[str, Any]], bool]


def run_trials(
    trials: Iterator[tuple[T, Sequence[Config]]],
    on_round: Callable[[T, int, Mapping[str, Any]], bool],
    on_end: Callable[[T, str], None],
    parallel: int,
) -> None:
    """Run trials, `parallel` at a time; with 1, in this process.

    Parameters
    ----------
    trials : iterator of tuple
        A trial, and its configuration with each seed. Each is asked for when its turn has come.
    on_round : callable
        (trial, position of the seed, metrics of the round) -> whether to end the trial.
    on_end : callable
        (trial, how it ended).
    parallel : int
        More than one: each in a process, which ends with this one.
    """
    if parallel == 1:
        for trial, configs in trials:
            on_end(trial, _run_trial(configs, partial(on_round, trial)))
        return
    workers: list[_Worker] = []
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, T]] = {}
    try:
        while True:
            while len(busy) < parallel and (next_one := next(trials, None)) is not None:
                if not idle:
                    idle = [_Worker(max((os.cpu_count() or 1) // parallel, 1))]
                    workers += idle
                worker, (trial, configs) = idle.pop(), next_one
                worker.connection.send(configs)
                busy[worker.connection] = worker, trial
            if not busy:
                return
            for connection in wait(list(busy)):
                worker, trial = busy[connection]  # type: ignore[index]
                told = worker.told()
                if isinstance(told, str):
                    del busy[worker.connection]
                    idle += [worker] * worker.process.is_alive()
                    on_end(trial, told)
                else:
                    worker.connection.send(on_round(trial, *told))
    finally:
        for worker in workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join(PATIENCE)
            worker.process.kill()
            worker.process.join()


def _run_trial(configs: Sequence[Config], on_round: OnRound) -> str:
    """Run a combination with each seed in turn; return how it ended."""
    for position, config in enumerate(configs):

        def told(record: Mapping[str, Any], position: int = position) -> None:
            if on_round(position, record):
                raise Stopped(PRUNED)

        try:
            with log_from(ERROR):  # how to go on with a run is not how to go on with a search
                run(config, progress=False, on_round=told)
        except Stopped:
            return PRUNED
        except (RunFailed, ConfigError) as error:
            return f"seed {config.seed}: {error}"
    return FINISHED


class _Worker:
    """A process that runs one trial at a time, and asks after each round whether to go on."""

    def __init__(self, threads: int) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _environment("OMP_NUM_THREADS", str(threads)):
            self.process.start()
        theirs.close()

    def told(self) -> str | tuple[int, Mapping[str, Any]]:
        """Return the position of a seed and a round's metrics, or how the trial ended."""
        try:
            told: str | tuple[int, Mapping[str, Any]] = self.connection.recv()
            return told
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with exit code {self.process.exitcode}"


def _work(connection: Connection) -> None:
    """Run the trials that come through a connection, until it is closed."""
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


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a process that is started meanwhile, unless it is set."""
    was_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not was_set:
            del os.environ[name]
