"""Cost of a client's work: a mod of the ClientApp measures, and the server takes it out."""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flwr.app import Context, Message, MetricRecord

METER = "fedntk.meter"  # name of the record; MeteredGrid removes it before a strategy sees it


def meter(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Add to a reply the seconds that it took, and the process's peak of memory in MB."""
    start = time.perf_counter()
    reply = call_next(message, context)
    if reply.has_content():
        seconds = time.perf_counter() - start
        reply.content[METER] = MetricRecord({"seconds": seconds, "peak-memory": peak_memory()})
    return reply


def peak_memory() -> float:
    """Return the largest memory of this process so far, in MB (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def reset_peak_memory() -> None:
    """Let the peak begin anew, if the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
