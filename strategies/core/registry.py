"""Which node is which client, what it has been sent, and which message a reply answers."""

import secrets
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from flwr.app import Message, Metadata

from fedntk.ntk import BadReply
from fedntk.ntk.payloads import wire


class ClientRegistry:
    """The clients of a run.

    A client is known by the partition that its node reports, or by the node's id if it reports
    none. If two live nodes claim one partition, the first that reported it keeps it, and the other
    is a client with a negative placeholder id. What is kept from round to round is kept by client,
    since Flower draws node ids anew whenever a node registers.
    """

    def __init__(self) -> None:
        self.partitions: dict[int, int] = {}  # node -> what it reported, or its own id
        self._owners: dict[int, int] = {}  # partition -> node that holds it
        self._silent: set[int] = set()  # nodes that reported no partition
        self._expected: set[int] = set()  # nodes that have yet to report
        self._present: set[int] = set()

    def unknown(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that have not reported."""
        return [n for n in nodes if n not in self.partitions or n in self._expected]

    def expect(self, nodes: Collection[int]) -> None:
        """Add nodes that have yet to report, and go by their ids until then."""
        self.add(dict.fromkeys(nodes))
        self._expected.update(nodes)

    def add(self, partitions: Mapping[int, int | None]) -> None:
        """Add nodes with the partitions that they report, None for those that report none."""
        for node, partition in partitions.items():
            earlier = self.partitions.get(node, node)
            if self._owners.get(earlier) == node:
                del self._owners[earlier]
            self._expected.discard(node)
            self.partitions[node] = node if partition is None else partition
            (self._silent.add if partition is None else self._silent.discard)(node)
        self._settle()

    def set_present(self, nodes: Iterable[int]) -> None:
        """Take note of who is live, and settle which of them holds a partition."""
        self._present = set(nodes) & self.partitions.keys()
        self._settle()

    def _settle(self) -> None:
        for node in sorted(self._present, key=lambda node: (node in self._silent, node)):
            owner = self._owners.get(self.partitions[node])
            usurped = owner in self._silent and node not in self._silent
            if owner not in self._present or usurped:
                self._owners[self.partitions[node]] = node

    def client(self, node: int) -> int:
        """Return the id of a node's client."""
        partition = self.partitions.get(node, node)
        return partition if self._owners.get(partition, node) == node else -1 - node

    def clients(self, *, without: Collection[int] = (), departed: bool = False) -> set[int]:
        """Return the ids of the live clients, and of the `departed`, without some partitions."""
        live = {self.client(n) for n in self._present if self.partitions[n] not in without}
        return live | (self._owners.keys() - set(without) if departed else set())

    def reports(self, node: int) -> bool:
        """Whether a node has reported a partition."""
        return node in self.partitions and node not in self._silent

    def is_live(self, node: int) -> bool:
        """Whether a node is among those present."""
        return node in self._present

    def nodes_of(self, partitions: Collection[int]) -> list[int]:
        """Return the live nodes that report one of some partitions."""
        return sorted(n for n in self._present if self.partitions[n] in partitions)


class SentParts:
    """What each client has been sent, and so need not be sent again."""

    def __init__(self) -> None:
        self._parts: dict[int, frozenset[str]] = {}

    def lacks(self, client: int, *parts: str) -> list[str]:
        """Return the parts that a client has not been sent."""
        return [part for part in parts if part not in self._parts.get(client, ())]

    def mark(self, client: int, *parts: str) -> None:
        """Note that a client has been sent some parts."""
        self._parts[client] = self._parts.get(client, frozenset()) | set(parts)

    def forget(self, client: int) -> None:
        """Have a client sent all parts again."""
        self._parts.pop(client, None)

    doubt = forget  # a client that failed may have lost them

    def state_dict(self) -> dict[str, list[str]]:
        """Return what each client was sent; placeholders end with their nodes."""
        return {str(k): sorted(parts) for k, parts in sorted(self._parts.items()) if k >= 0}

    def load_state_dict(self, state: Mapping[str, Iterable[str]]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._parts = {int(client): frozenset(parts) for client, parts in state.items()}


class ClientRounds:
    """Which rounds count, in one run, of the arrays that clients keep on their disks."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}  # client -> the last round in which its reply was accepted
        self.run_key = secrets.token_hex(8)  # names the run for the clients' folders

    def __contains__(self, client: int) -> bool:
        return client in self.last

    def set(self, clients: Iterable[int], server_round: int) -> None:
        """Note that what some clients keep is of a round."""
        self.last |= dict.fromkeys(clients, server_round)

    def forget(self, client: int) -> None:
        """Have a client that lost what it kept begin anew."""
        self.last.pop(client, None)

    def doubt(self, client: int) -> None:
        """Keep counting on a client that failed: what it keeps is on its disk."""

    def config(self, client: int) -> dict[str, str | int]:
        """Return what a client is told: the run, and the round of its arrays that counts."""
        run = self.run_key
        if client < 0:  # another node has its partition, and on one machine also its folder
            run = f"{run}-{-1 - client}"
        told: dict[str, str | int] = {wire.RUN: run}
        if client in self.last:
            told[wire.ROUND] = self.last[client]
        return told

    def state_dict(self) -> dict[str, Any]:
        """Return all but placeholder ids of clients: what their nodes keep ends with the run."""
        last = {str(k): self.last[k] for k in sorted(self.last) if k >= 0}
        return {"last": last, "run-key": self.run_key}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.last = {int(client): int(number) for client, number in state["last"].items()}
        self.run_key = str(state["run-key"])


class Exchange:
    """Messages that were sent together, and which of them have been answered.

    Messages are told apart by the ids that the grid gives them when it sends them; on a grid that
    gives none, by their nodes, and there is one message to a node.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        # not the messages themselves, whose contents may be large
        self._asked: list[Metadata] = [message.metadata for message in messages]
        self._nodes = {metadata.dst_node_id for metadata in self._asked}
        self._answered: set[int | str] = set()  # messages' ids, or nodes

    def include(self, earlier: "Exchange") -> None:
        """Before messages are sent: let those of an earlier exchange be answered as well."""
        self._asked += [m for m in earlier._asked if m.message_id not in earlier._answered]

    @cached_property
    def _node_by_id(self) -> dict[str, int]:
        """Message id -> node; formed with the first reply, when all messages have been sent."""
        return {m.message_id: m.dst_node_id for m in self._asked if m.message_id}

    def node_asked(self, reply: Message) -> int | None:
        """Return the node whose message a reply answers, whoever sent the reply; None if none."""
        if self._node_by_id:
            return self._node_by_id.get(reply.metadata.reply_to_message_id)
        source = reply.metadata.src_node_id
        return source if source in self._nodes else None

    def take(self, reply: Message) -> int:
        """Return the node that a reply comes from, and count its message as answered."""
        node, source = self.node_asked(reply), reply.metadata.src_node_id
        if node is None or node != source:
            raise BadReply(
                "not-asked", f"node {source} was not asked, or answers an earlier message"
            )
        message = reply.metadata.reply_to_message_id if self._node_by_id else node
        if message in self._answered:
            raise BadReply("duplicate", f"node {node} has answered this message before")
        self._answered.add(message)
        return node
