"""Uses of Flower's private parts: the one place to look when Flower changes."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from logging import getLogger
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity

Record = TypeVar("Record", bound=RecordDict | ArrayRecord | MetricRecord | ConfigRecord)

_message_ids = itertools.count(1)


def become_server() -> None:
    """Give this process the identity that Flower's messages ask for outside a run of Flower."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


def stamp(message: Message) -> Message:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = str(next(_message_ids))
    return message


def own_copy(message: Message) -> Message:
    """Copy a message's records, which a strategy may share among messages; arrays are shared."""
    content = _copy(message.content)
    for name, record in message.content.items():
        content.__dict__["_data"][name] = _copy(record)
    copied = copy.copy(message)
    copied.__dict__.update(message.__dict__)
    copied.content = content
    return copied


def _copy(record: Record) -> Record:
    """Copy a dictionary of Flower's without checking each value again."""
    copied = object.__new__(type(record))
    copied.__dict__.update(record.__dict__)
    copied.__dict__["_data"] = dict(record.__dict__["_data"])
    return copied


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
