"""Other processes that run the trials of a search."""

import contextlib
import os
import signal
from collections.abc import Callable
from logging import getLogger
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

from ..data.data import Data, data_kept
from ..engine.processes import PATIENCE
from ..errors import RunFailed
from .search import Search


def run_in_processes(search: Search, count: int, show: Callable[[], None]) -> None:
    """Run the trials in `count` processes, each with its part of the cores.

    They get the examples that were passed in this process. If one is killed, its trial fails, and
    the others run what is left.
    """
    passed, context = data_kept(search.base.dataset), get_context("spawn")
    workers = [context.Process(target=_work, args=(search, passed)) for _ in range(count)]
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    try:
        for worker in workers:
            worker.daemon = True
            worker.start()
        while alive := [worker.sentinel for worker in workers if worker.is_alive()]:
            show()
            wait(alive, timeout=0.5)
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join(PATIENCE)
                worker.kill()
                worker.join()
    if search.has_next():
        codes = [worker.exitcode for worker in workers]
        raise RunFailed(f"the processes that run trials ended, with exit codes {codes}")


def _work(search: Search, passed: Data | None) -> None:
    if passed is not None:
        passed.keep()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    getLogger("flwr").disabled = True  # the main process says what went wrong
    with contextlib.suppress(KeyboardInterrupt):
        search.run(_require_parent)


def _require_parent() -> None:
    parent = parent_process()
    if parent is None or not parent.is_alive():
        raise KeyboardInterrupt
