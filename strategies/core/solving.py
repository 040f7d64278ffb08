"""Errors that clients' numbers can cause, and that must not end a run."""

from collections.abc import Callable
from logging import getLogger
from typing import TypeVar

logger = getLogger("flwr")
UNUSABLE = (ArithmeticError, RuntimeError, ValueError, MemoryError)
T = TypeVar("T")


def result_of(make: Callable[[], T], what: str = "solution") -> T | None:
    """Return what `make` makes of clients' numbers; None, and say so, if they allow none."""
    try:
        return make()
    except UNUSABLE as error:
        logger.warning("no %s (%s): the model stays as it was", what, error)
        return None
