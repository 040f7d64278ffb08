"""OpenMP threads that sleep while they wait, so that a busy machine slows torch down less.

Torch's wheels for Linux bring GNU's OpenMP, whose threads spin for some milliseconds at the end of
each parallel loop before they sleep. Where other processes want the cores, a thread that is due to
work waits for one that spins: ``benchmarks/threads.py`` has the figures. The number of threads, and
so each bit of what is computed, is left alone.
"""

import functools
import os
import sys
import threading
from logging import WARNING, getLogger
from pathlib import Path

__all__ = ["OWN_SETTINGS", "stop_spinning", "wait_passively"]

logger = getLogger("flwr")
# OpenMP's own, GNU's, LLVM's and Intel's: each says how threads wait
OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# as it was when this module was imported: OpenMP has read its settings, and none says how to wait
TOO_LATE = "torch" in sys.modules and not any(name in os.environ for name in OWN_SETTINGS)
MOST_TEAMS = 4


def wait_passively() -> None:
    """Set ``OMP_WAIT_POLICY=PASSIVE`` for this process and those it starts.

    OpenMP reads it when torch loads it: call this before. A user's own settings win.
    """
    if not any(name in os.environ for name in OWN_SETTINGS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@functools.cache
def stop_spinning(threads: int) -> None:
    """Have threads spin less where torch was loaded before :func:`wait_passively`.

    GNU's OpenMP spins 300 times shorter while it manages more threads than there are cores: idle
    teams, kept by threads of their own, make them more. Where that does not help, and the machine
    is busy, the log says what would. A second call does nothing.

    Parameters
    ----------
    threads : int
        That torch works with; one alone does not wait.
    """
    if not TOO_LATE or threads < 2:
        return
    teams = (_cores() - threads) // (threads - 1) + 1
    if _has_gnu_openmp() and teams <= MOST_TEAMS:
        for _ in range(teams):
            _keep_idle_team(threads)
    elif os.getloadavg()[0] > _cores() / 2:
        logger.log(
            WARNING,
            "the machine is busy, and torch's threads spin while they wait, which makes them slow: "
            "import fedntk.ntk before torch, or set OMP_WAIT_POLICY=PASSIVE",
        )


def _cores() -> int:
    """Cores that this process may use, as OpenMP counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_gnu_openmp() -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and "libgomp" in maps.read_text(encoding="utf-8")


def _keep_idle_team(threads: int) -> None:
    """Start a thread that has a team of so many threads made for it, and keeps them asleep."""
    import torch

    ready = threading.Event()

    def keep() -> None:
        torch.zeros(2**15 * threads).add_(1.0)  # torch gives each thread as many numbers
        ready.set()
        threading.Event().wait()

    threading.Thread(target=keep, name="fedntk-idle-team", daemon=True).start()
    ready.wait()


wait_passively()
