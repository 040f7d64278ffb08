"""OpenMP threads that sleep while they wait, so that a busy machine slows torch down less.

Torch's wheels for Linux bring GNU's OpenMP, whose threads spin for some milliseconds at the end of
each parallel loop before they sleep. Where other processes want the cores, a thread that is due to
work waits for one that spins: ``benchmarks/threads.py`` has the figures. The number of threads, and
so each bit of what is computed, is left alone.
"""

import functools
import os
import sys
from logging import WARNING, getLogger

__all__ = ["OWN_SETTINGS", "wait_passively", "warn_if_spinning"]

logger = getLogger("flwr")
# OpenMP's own, GNU's, LLVM's and Intel's: each says how threads wait
OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# as it was when this module was imported: torch's threads spin, and cannot be told otherwise
TOO_LATE = "torch" in sys.modules and not any(name in os.environ for name in OWN_SETTINGS)


def wait_passively() -> None:
    """Set ``OMP_WAIT_POLICY=PASSIVE`` for this process and those it starts.

    OpenMP reads it when torch loads it: call this before. A user's own settings win.
    """
    if not any(name in os.environ for name in OWN_SETTINGS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@functools.cache
def warn_if_spinning(threads: int) -> None:
    """Say once, on a busy machine, that torch was loaded before :func:`wait_passively`.

    Parameters
    ----------
    threads : int
        That torch works with; one alone does not wait.
    """
    if TOO_LATE and threads > 1 and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        logger.log(
            WARNING,
            "the machine is busy, and torch's threads spin while they wait, which makes them slow: "
            "import fedntk.simulations before torch, or set OMP_WAIT_POLICY=PASSIVE",
        )
