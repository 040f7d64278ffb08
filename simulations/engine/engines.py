"""Grids: an in-process one that needs no Ray, and one that meters any other."""

import itertools
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from logging import getLogger
from pathlib import Path
from typing import Any, Self

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedntk.strategies.core.sampling import patience_with

from ..errors import TRACEBACKS
from ._flower import Run, become_server, own_copy, stamp

logger = getLogger("flwr")
CLIENT_APP_RAISED_EXCEPTION, NODE_UNAVAILABLE = 2, 3  # of Flower's error codes
SET_UP = ("query.partition", "query.keys")  # asked once of each node, and not counted
METER = "fedntk.meter"  # name of the record that `meter` adds and MeteredGrid takes out
OnAnswer = Callable[[str, int, int], None]
UserConfig = dict[str, bool | float | int | str]
_run_ids = itertools.count(1)


class LocalGrid(Grid):
    """Virtual clients in this process: nodes 1 ... num_clients, with partitions from 0.

    A client that raises becomes an error reply, as on any other grid; its traceback is logged once
    for each kind and place of errors. Torch's number of threads is
    restored after each client. So many `workers` run at the same time, each in a thread if there
    are several: use the grid as a context manager then, so that the threads end with it. Replies
    are the same with any number, if the clients share nothing that they change. `on_answer` is
    called after each reply: kind of message, replies so far, messages in this exchange.
    """

    patience = 0.0  # no node comes later

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        run_config: UserConfig,
        *,
        workers: int = 1,
        on_answer: OnAnswer | None = None,
    ) -> None:
        become_server()
        self.app = app
        run_id = next(_run_ids)
        self._run = Run.create_empty(run_id=run_id)
        self.contexts: dict[int, Context] = {}
        for i in range(num_clients):
            node_config: UserConfig = {"partition-id": i, "num-partitions": num_clients}
            self.contexts[i + 1] = Context(
                run_id, i + 1, node_config, RecordDict(), dict(run_config)
            )
        self._replies: dict[str, Message] = {}
        self._on_answer = on_answer
        self._pool = ThreadPoolExecutor(workers, "client") if workers > 1 else None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        TRACEBACKS.end(self._run.run_id)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return 1 ... num_clients."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have each message answered at once; return the message ids."""
        messages = list(messages)
        replies = list(self._answers(messages))
        ids = [message.metadata.message_id for message in messages]
        self._replies |= zip(ids, replies, strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies in order; with one worker each is made when it is asked for."""
        if self._pool is None:
            return self._answers(messages)
        return self.pull_messages(self.push_messages(messages))

    def _answers(self, messages: Iterable[Message]) -> Iterable[Message]:
        messages = [stamp(message) for message in messages]
        numbers = itertools.count(1)

        def answer(message: Message) -> Message:
            reply = self._answer(message)
            if self._on_answer is not None:
                with self._lock:
                    self._on_answer(message.metadata.message_type, next(numbers), len(messages))
            return reply

        apply = map if self._pool is None else self._pool.map
        return apply(answer, messages)

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = self.contexts.get(node)
        if context is None:
            reason = f"there is no node {node}"
            logger.warning(reason)
            return Message(Error(NODE_UNAVAILABLE, reason), reply_to=message)
        threads = torch.get_num_threads()
        try:
            reply = self.app(own_copy(message), context)
            if not isinstance(reply, Message):
                raise TypeError(f"the app returned {type(reply).__name__}, expected a Message")
            return reply
        except (Exception, SystemExit) as error:  # a client must not end the run
            TRACEBACKS.log(context, error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        finally:
            torch.set_num_threads(threads)


class ForwardingGrid(Grid):
    """A grid that hands on what another does; subclasses say what becomes of messages."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def sent(self, messages: list[Message]) -> list[Message]:
        """Return messages as they are sent."""
        return messages

    def received(self, replies: Iterator[Message], messages: list[Message]) -> Iterable[Message]:
        """Return replies as they arrive; `messages` are those sent in the same call."""
        return replies

    def waiting(self) -> AbstractContextManager[None]:
        """Surround each wait for the other grid."""
        return nullcontext()

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self.grid.run

    @property
    def patience(self) -> float:
        """Seconds without a new node after which no more will come."""
        return patience_with(self.grid)

    def create_message(self, *args: Any, **options: Any) -> Message:
        """Make a message to a node."""
        return self.grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their ids."""
        messages = self.sent(list(messages))
        with self.waiting():
            return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        with self.waiting():
            replies = iter(self.grid.pull_messages(message_ids))
        return self.received(replies, [])

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages, and return their replies."""
        messages = self.sent(list(messages))
        with self.waiting():
            replies = iter(self.grid.send_and_receive(messages, timeout=timeout))
        return self.received(replies, messages)


class MeteredGrid(ForwardingGrid):
    """A grid that counts what every exchange through another grid costs."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._costs: defaultdict[str, float] = defaultdict(int)
        self._peak = 0.0

    def take(self) -> dict[str, float]:
        """Return what has been counted since the last call.

        Bytes are those of all replies and of all messages to clients, whether or not the transport
        stores a shared content once. ``seconds-clients`` is total client time, ``seconds-waiting``
        the server's time waiting for clients, and ``peak-memory-clients`` in MB is of the largest
        client process so far, 0 if clients do not report it.
        """
        names = [f"{kind}bytes-{way}" for kind in ("", "evaluation-") for way in ("up", "down")]
        costs = {name: self._costs[name] for name in (*names, "seconds-clients", "seconds-waiting")}
        self._costs.clear()
        return {**costs, "peak-memory-clients": self._peak}

    def sent(self, messages: list[Message]) -> list[Message]:  # noqa: D102
        sizes: dict[int, int] = {}  # messages of a round share their records
        for message in messages:
            self._count("down", message, message.metadata.message_type, sizes)
        return messages

    def received(  # noqa: D102
        self, replies: Iterator[Message], messages: list[Message]
    ) -> Iterator[Message]:
        kinds = {m.metadata.message_id: m.metadata.message_type for m in messages}
        while True:
            with self.waiting():
                reply = next(replies, None)
            if reply is None:
                return
            if reply.has_content() and METER in reply.content:
                record = reply.content.pop(METER)
                values = record if isinstance(record, MetricRecord) else {}
                claims = (values.get("seconds"), values.get("peak-memory"))
                # what cannot be counts nothing
                seconds, peak = (v if isinstance(v, float) and 0 <= v < 1e12 else 0 for v in claims)
                self._costs["seconds-clients"] += seconds
                self._peak = max(self._peak, peak)
            metadata = reply.metadata
            kind = kinds.get(metadata.reply_to_message_id, metadata.message_type)
            self._count("up", reply, kind, {})
            yield reply

    @contextmanager
    def waiting(self) -> Iterator[None]:  # noqa: D102
        start = time.perf_counter()
        yield
        self._costs["seconds-waiting"] += time.perf_counter() - start

    def _count(self, way: str, message: Message, kind: str, sizes: dict[int, int]) -> None:
        if kind not in SET_UP:
            prefix = "evaluation-" if kind.startswith("evaluate") else ""
            self._costs[f"{prefix}bytes-{way}"] += message_bytes(message, sizes)


def message_bytes(message: Message, sizes: dict[int, int] | None = None) -> int:
    """Size of a message's records on the wire; `sizes` holds those of shared records by id."""
    if message.has_error():
        return len(message.error.reason or "")
    sizes = {} if sizes is None else sizes
    for record in message.content.values():
        if id(record) not in sizes:
            sizes[id(record)] = 0
            with suppress(OverflowError, TypeError, ValueError):  # cannot have come over a wire
                arrays = isinstance(record, ArrayRecord)
                sizes[id(record)] = record.count_bytes() if arrays else len(record.deflate())
    return sum(sizes[id(record)] for record in message.content.values())


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
