"""OpenMP threads that sleep while they wait, so that a busy machine slows torch down less.

Threads of GNU's OpenMP, in torch's wheels for Linux, spin for some milliseconds after each parallel
loop. If other processes want the cores, a thread that is due to work waits for one that spins:
``benchmarks/threads.py`` has the figures. The number of threads, and so each bit of the results,
stays as it is.
"""

import functools
import os
import sys
from logging import getLogger

logger = getLogger("flwr")
# variables of OpenMP, GNU, LLVM and Intel that say how threads wait
OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SET = any(name in os.environ for name in OWN_SETTINGS)
# OpenMP reads its settings when torch loads it: too late if they do not say how to wait
TOO_LATE = "torch" in sys.modules and not _SET
if not _SET:  # for this process and those it starts
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@functools.cache
def warn_of_spinning(threads: int) -> None:
    """Log once that torch's threads spin, if it was loaded too early and the machine is busy."""
    if TOO_LATE and threads > 1 and os.getloadavg()[0] > _cores() / 2:
        logger.warning(
            "the machine is busy, and torch's threads spin while they wait, which makes them slow: "
            "import fedntk.ntk before torch, or set OMP_WAIT_POLICY=PASSIVE"
        )


def _cores() -> int:
    """Cores that this process may use, as OpenMP counts them."""
    own = getattr(os, "sched_getaffinity", None)
    return len(own(0)) if own else os.cpu_count() or 1
