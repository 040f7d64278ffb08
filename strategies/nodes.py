"""What a strategy knows of its nodes: which client each one is, and what it has been sent."""

from collections.abc import Iterable, Mapping

from flwr.app import Message

__all__ = ["Nodes"]


class Nodes:
    """The nodes of a run.

    Parameters
    ----------
    partitions : dict of int to int
        Node -> the partition that it told, or its id; nodes may be added later.
    """

    def __init__(self, partitions: Mapping[int, int]) -> None:
        self._partitions = partitions
        self._owners: dict[int, int] = {}  # partition -> the node that goes by it
        self._present: set[int] = set()
        self._held: dict[int, frozenset[str]] = {}

    def register(self, here: Iterable[int]) -> None:
        """Settle which node goes by a partition that several claim: the first, while it is here."""
        self._present = set(here) & self._partitions.keys()
        for node in sorted(self._present):
            partition = self._partitions[node]
            if self._owners.get(partition) not in self._present:
                self._owners[partition] = node

    def client(self, node: int) -> int:
        """Return a node's partition, or a negative number of its own if another goes by that."""
        partition = self._partitions.get(node, node)
        return partition if self._owners.get(partition, node) == node else -1 - node

    def clients(self) -> set[int]:
        """Return the clients that are here."""
        return {self.client(node) for node in self._present}

    def lacks(self, node: int, *parts: str) -> list[str]:
        """Return those of some parts that a node has not been sent."""
        return [part for part in parts if part not in self._held.get(node, ())]

    def now_hold(self, nodes: Iterable[int], *parts: str) -> None:
        """Note that nodes have been sent some parts."""
        for node in nodes:
            self._held[node] = self._held.get(node, frozenset()) | set(parts)

    def forget(self, node: int) -> None:
        """Send a node all parts again."""
        self._held.pop(node, None)

    def forget_failed(self, replies: Iterable[Message]) -> None:
        """Send all parts again to those whose reply is an error, whatever happened there."""
        for message in replies:
            if message.has_error():
                self.forget(message.metadata.src_node_id)

    def forget_all(self) -> None:
        """Send all parts again to everyone."""
        self._held = {}
