"""Clients that lie in what they send: their replies change on the way to the server."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ..attacks import Attack, Changes, is_named
from .engines import ForwardingGrid


class LyingGrid(ForwardingGrid):
    """A grid on which the replies of some partitions to training messages are false.

    Draws depend on `seed`, the round and the partition, so a resumed run sees the same lies.
    """

    def __init__(
        self, grid: Grid, liars: Iterable[int], attack: Attack, *, factor: float = 0, seed: int = 0
    ) -> None:
        super().__init__(grid)
        self.liars, self.attack, self.seed = frozenset(liars), attack, seed
        self.factor = factor or attack.factor
        self._sent: dict[int, Message] = {}  # node -> its newest message

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and remember what was sent."""
        return self.grid.push_messages(self._remember(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive, with lies; liars know the honest replies that come with theirs."""
        return self._with_lies(self.grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and receive, with lies."""
        sent = self._remember(messages)
        return self._with_lies(self.grid.send_and_receive(sent, timeout=timeout))

    def _remember(self, messages: Iterable[Message]) -> list[Message]:
        sent = list(messages)
        self._sent |= {message.metadata.dst_node_id: message for message in sent}
        return sent

    def _with_lies(self, replies: Iterable[Message]) -> Iterable[Message]:
        if self.attack.on_reply is None:
            return replies
        replies = list(replies)
        trained = [r for r in replies if r.metadata.message_type == "train" and r.has_content()]
        found = {_partition_of(reply): (reply, *self._changes(reply)) for reply in trained}
        honest = [own for k, (_, own, _) in found.items() if k not in self.liars]
        for k in sorted(self.liars & found.keys()):
            reply, own, origins = found[k]
            alike = [other for other in honest if _shapes(other) == _shapes(own)]
            rng = np.random.default_rng([self.seed, self._round_of(reply), k, *b"lie"])
            false = self.attack.on_reply(own, alike or [own], self.factor, rng)
            for key in own:
                record, _, name = key.partition("/")
                array = np.asarray(origins[key] + false[key], own[key].dtype)
                reply.content.array_records[record][name] = Array(array)
        return replies

    def _round_of(self, reply: Message) -> Any:
        configs = self._sent[reply.metadata.src_node_id].content.config_records.values()
        return next((own["server-round"] for own in configs if "server-round" in own), 0)

    def _changes(self, reply: Message) -> tuple[Changes, Changes]:
        """Return d and x of a reply's arrays that can be changed."""
        sent = self._sent[reply.metadata.src_node_id].content.array_records
        changes, origins = Changes(), Changes()
        for record, arrays in reply.content.array_records.items():
            for name, own in arrays.items():
                array, key = own.numpy(), f"{record}/{name}"
                if array.dtype.kind == "f" or is_named("gram", name):
                    origins[key] = _origin(sent, record, name, array)
                    changes[key] = array - origins[key]
        return changes, origins


def _partition_of(reply: Message) -> int:
    found: Any = [own.get("partition-id") for own in reply.content.metric_records.values()]
    return next((int(number) for number in found if number is not None), -1)


def _shapes(changes: Changes) -> dict[str, tuple[int, ...]]:
    return {name: change.shape for name, change in changes.items()}


def _origin(
    sent: Mapping[str, ArrayRecord], record: str, name: str, array: NDArray[Any]
) -> NDArray[Any]:
    """Return the array that was sent under a name, in this record or the only one that has it."""
    homes = [record] if record in sent else [own for own in sent if name in sent[own]]
    found = sent[homes[0]].get(name) if len(homes) == 1 else None
    alike = found is not None and tuple(found.shape) == array.shape
    return found.numpy().astype(array.dtype) if found and alike else np.zeros_like(array)
