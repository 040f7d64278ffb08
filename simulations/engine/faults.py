"""Grids with faults: clients that lie in their replies, are gone in a round, or answer too late."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MessageType
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.strategies import Strategy

from ..attacks import Attack, Changes, is_named
from ._flower import stamp
from .engines import NODE_UNAVAILABLE, ForwardingGrid


class LyingGrid(ForwardingGrid):
    """A grid on which some partitions' replies are false, by (seed, round, partition)."""

    def __init__(
        self, grid: Grid, liars: Iterable[int], attack: Attack, *, factor: float = 0, seed: int = 0
    ) -> None:
        super().__init__(grid)
        self.liars, self.attack, self.seed = frozenset(liars), attack, seed
        self.factor = factor or attack.factor
        self._sent: dict[int, Message] = {}  # node -> its newest message

    def sent(self, messages: list[Message]) -> list[Message]:
        """Remember what was sent."""
        self._sent |= {message.metadata.dst_node_id: message for message in messages}
        return messages

    def received(self, replies: Iterable[Message], messages: list[Message]) -> Iterable[Message]:
        """Change the liars' replies; they know the honest ones that come with theirs."""
        if self.attack.on_reply is None:
            return replies
        replies = list(replies)
        trained = [r for r in replies if r.metadata.message_type == "train" and r.has_content()]
        by_client = {_partition_of(reply): (reply, *self._changes(reply)) for reply in trained}
        honest = [changes for k, (_, changes, _) in by_client.items() if k not in self.liars]
        for k in sorted(self.liars & by_client.keys()):
            reply, changes, origins = by_client[k]
            alike = [other for other in honest if _shapes(other) == _shapes(changes)]
            rng = np.random.default_rng([self.seed, self._round_of(reply), k, *b"lie"])
            false = self.attack.on_reply(changes, alike or [changes], self.factor, rng)
            for key in changes:
                record, _, name = key.partition("/")
                array = np.asarray(origins[key] + false[key], changes[key].dtype)
                reply.content.array_records[record][name] = Array(array)
        return replies

    def _round_of(self, reply: Message) -> Any:
        configs = self._sent[reply.metadata.src_node_id].content.config_records.values()
        return next((c["server-round"] for c in configs if "server-round" in c), 0)

    def _changes(self, reply: Message) -> tuple[Changes, Changes]:
        """Return d and x of a reply's arrays that can be changed."""
        sent = self._sent[reply.metadata.src_node_id].content.array_records
        changes, origins = Changes(), Changes()
        for record, arrays in reply.content.array_records.items():
            for name, packed in arrays.items():
                array, key = packed.numpy(), f"{record}/{name}"
                if array.dtype.kind == "f" or is_named("gram", name):
                    origins[key] = _origin(sent, record, name, array)
                    changes[key] = array - origins[key]
        return changes, origins


def _partition_of(reply: Message) -> int:
    for record in reply.content.metric_records.values():
        if "partition-id" in record:
            return int(record["partition-id"])  # type: ignore[arg-type]
    return -1


def _shapes(changes: Changes) -> dict[str, tuple[int, ...]]:
    return {name: change.shape for name, change in changes.items()}


def _origin(
    sent: Mapping[str, ArrayRecord], record: str, name: str, array: NDArray[Any]
) -> NDArray[Any]:
    """Return the array that was sent under a name, in this record or the only one that has it."""
    homes = [record] if record in sent else [home for home in sent if name in sent[home]]
    origin = sent[homes[0]].get(name) if len(homes) == 1 else None
    if origin is None or tuple(origin.shape) != array.shape:
        return np.zeros_like(array)
    return origin.numpy().astype(array.dtype)


class LossyGrid(ForwardingGrid):
    """A grid on which clients are lost or late in a round's training, drawn by (seed, round).

    A lost client gets none of the round's training messages, and the server gets Flower's error for
    a node that is gone. A late one trains, and its replies come after the round: a strategy that
    still looks for them then gets them. Each client is drawn by itself: the shares `lost` and
    `late` are probabilities. Evaluation loses nothing.
    """

    def __init__(self, grid: Grid, strategy: Strategy, seed: int, lost: float, late: float) -> None:
        super().__init__(grid)
        self._strategy, self._seed = strategy, seed
        self._lost, self._late = lost, late
        self._errors: dict[str, Message] = {}
        self._late_since: dict[str, int] = {}  # id of a message to a late client -> its round

    def fate(self, client: int, server_round: int) -> Literal["lost", "late", "in time"]:
        """Return what becomes of a client in a round; `client` is its id in the registry."""
        key = [self._seed, server_round, client % 2**64, *b"losses"]
        drawn = float(np.random.default_rng(key).random())
        if drawn < self._lost:
            return "lost"
        return "late" if drawn < self._lost + self._late else "in time"

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send what arrives."""
        errors, in_time, late = self._sort(messages)
        ids = list(self.grid.push_messages([*in_time, *late]))
        now = self._strategy.server_round
        self._late_since |= {message.metadata.message_id: now for message in late}
        self._errors |= (lost := {error.metadata.reply_to_message_id: error for error in errors})
        return [*lost, *ids]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return errors, and the replies that are there by now."""
        ids, now = list(message_ids), self._strategy.server_round
        errors = [self._errors.pop(number) for number in ids if number in self._errors]
        due = [number for number in ids if self._late_since.get(number, -1) < now]
        return [*errors, *self.grid.pull_messages(due)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return errors, and the replies that come in time."""
        errors, in_time, late = self._sort(messages)
        replies = self.grid.send_and_receive([*in_time, *late], timeout=timeout)
        ids = {message.metadata.message_id for message in late}
        counted = (reply for reply in replies if reply.metadata.reply_to_message_id not in ids)
        return itertools.chain(errors, counted)

    def _sort(self, messages: Iterable[Message]) -> tuple[list[Message], ...]:
        """Return errors for what is lost, and the messages that are answered in time and late."""
        now, by_fate = self._strategy.server_round, defaultdict[str, list[Message]](list)
        for message in messages:
            client = self._strategy.channel.registry.client(message.metadata.dst_node_id)
            training = message.metadata.message_type == MessageType.TRAIN
            by_fate[self.fate(client, now) if training else "in time"].append(message)
        error = Error(NODE_UNAVAILABLE, f"lost in round {now}, as the settings say")
        errors = [Message(error, reply_to=stamp(message)) for message in by_fate["lost"]]
        return errors, by_fate["in time"], by_fate["late"]
