"""All that fedntk needs of Flower's private parts: the one place to look when Flower moves."""

import contextlib
import itertools
from collections.abc import Iterator
from logging import getLogger

from flwr.app import Message
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["Run", "become_server", "log_from", "stamp"]

_message_ids = itertools.count(1)


def become_server() -> None:
    """Give this process the identity that Flower's messages ask for outside a run of Flower."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


def stamp(message: Message) -> Message:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = str(next(_message_ids))
    return message


@contextlib.contextmanager
def log_from(level: int) -> Iterator[None]:
    """Let only messages of at least `level` into Flower's log."""
    logger = getLogger("flwr")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
