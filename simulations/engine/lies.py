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
