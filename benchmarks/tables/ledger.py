"""What the ledger of a run takes: all models without one client, from sums on the disk."""

import time

from fedntk.simulations import Run, ledger


def seconds(run: Run) -> dict[int, float]:
    """Return the seconds of the processor that the ledger takes."""
    start = time.process_time()
    ledger(run)
    return {-1: time.process_time() - start}
