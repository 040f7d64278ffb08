"""Uses of Flower's private parts: the one place to look when Flower changes."""

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Iterator
from logging import getLogger
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity

Record = TypeVar("Record", bound=RecordDict | ArrayRecord | MetricRecord | ConfigRecord)

START_SECONDS = 60.0  # that a new worker of Ray has to start
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


def outlive_workers() -> None:
    """Have the pool of Flower's simulation replace workers of Ray that died.

    As it stands it goes on using a dead worker, whose tasks fail at once: so it gets most of them,
    in every round. The task that a worker died in is lost, and its client's error is the reply.
    With a machine gone, the pool has the workers that the others hold. Without Ray nothing is done.
    """
    with contextlib.suppress(ImportError):
        import ray
        from flwr.simulation.ray_transport import ray_actor

        pool: Any = ray_actor.BasicActorPool
        if hasattr(pool, "replaces_workers"):
            return
        died = ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError
        fetch = pool.fetch_result_and_return_actor_to_pool
        lock = threading.Lock()

        def count(self: Any, change: int) -> None:
            with lock:
                self.num_actors += change

        def add_worker(self: Any) -> None:
            """Add a worker, when it has started, if the cluster holds one more."""
            with lock:
                if self.num_actors >= ray_actor.pool_size_from_resources(self.client_resources):
                    return
                self.num_actors += 1
            actor = self.create_actor_fn()
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=START_SECONDS)
                self.pool.append(actor)
            except ray.exceptions.RayError:  # a machine that is gone counts for a while
                ray.kill(actor)
                count(self, -1)

        def fetch_or_forget(self: Any, future: Any) -> Any:
            try:
                return fetch(self, future)
            except died:
                with contextlib.suppress(Exception):
                    ray.kill(self._future_to_actor[future])
                self._future_to_actor[future] = None
                count(self, -1)
                getLogger("flwr").warning("a worker of Ray died; its client's reply is lost")
                raise

        def put_back(self: Any, future: Any) -> None:
            if (actor := self._future_to_actor.pop(future)) is not None:
                self.pool.append(actor)

        def submit_to_live(self: Any, actor_fn: Any, job: Any) -> Any:
            """Wait for an idle worker: there may be fewer than threads that submit."""
            actor = wait_for_idle(self)
            try:
                future = actor_fn(actor, *job)
            except BaseException:  # a task that cannot be sent costs no worker
                self.pool.append(actor)
                raise
            self._future_to_actor[future] = actor
            return future

        def wait_for_idle(self: Any) -> Any:
            end = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(IndexError):  # no idle worker
                    return self.pool.pop()
                with contextlib.suppress(ValueError):  # the cluster holds none
                    add_worker(self)
                if self.num_actors:
                    end = time.monotonic() + START_SECONDS
                elif time.monotonic() > end:
                    raise RuntimeError("all workers of Ray died, and no new one could start")
                time.sleep(0.2)

        pool.replaces_workers = True
        pool.submit, pool.add_actor_back_to_pool = submit_to_live, put_back
        pool.fetch_result_and_return_actor_to_pool = fetch_or_forget
