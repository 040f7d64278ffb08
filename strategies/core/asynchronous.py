"""Replies that count in whichever round they come, for methods whose result no order changes.

Beyond the papers. A round asks the live clients that have yet to answer, and goes on at its
deadline with what has come; a reply to the message of an earlier round counts when it comes. Each
message is answered once, by the node that was asked, and each client counts once.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from flwr.app import Message, MessageType, Metadata, RecordDict
from flwr.serverapp import Grid

from fedntk.ntk import BadReply
from fedntk.ntk.options import option, state

from .base import BaseStrategy
from .exchange import Pairs, push

T = TypeVar("T")


class AsynchronousStrategy(BaseStrategy):
    """A strategy that can add up replies of several rounds.

    Attributes
    ----------
    counted : set of int
        Clients whose replies are in the sum.
    left : set of int
        Clients that are neither asked nor counted any more.
    """

    asynchronous: bool = option(
        "whether a reply counts in whichever round it comes: a round asks the live clients that "
        "have yet to answer, and ends when all have, when a new node is there, or at its "
        "round_deadline, which is needed; a client without an answer after the run's timeout is "
        "asked again",
        default=False,
    )
    stop_at_clients: int = option(
        "number of counted clients at which an asynchronous run ends; 0: after all its rounds",
        default=0,
        at_least=0,
        compared=False,
    )

    counted: set[int] = state(set)
    left: set[int] = state(set)
    _open: dict[str, Metadata] = state(dict, saved=False)  # messages without a reply, by id

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.asynchronous:  # a new node's answer is not waited for any longer than others
            self.query_timeout = min(self.query_timeout, self.round_deadline)

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Share another strategy's clients; its rounds wait for all replies."""
        if self.asynchronous:
            raise ValueError(
                f"asynchronous: expected False within a {type(owner).__name__}, whose rounds wait "
                "for all replies, got True"
            )
        super().work_within(owner, everyone=everyone)

    @property
    def finished(self) -> bool:
        """Whether as many clients are counted as the run ends at."""
        return self.asynchronous and 0 < self.stop_at_clients <= len(self.counted)

    @property
    def gives_up(self) -> bool:
        """Whether the first rounds must bring a reply; an asynchronous run waits for late ones."""
        return not self.asynchronous

    # -------------------------------------------------------------------------- asking

    def sample(
        self, grid: Grid, server_round: int, stage: str, *how: Any, **named: Any
    ) -> list[int]:
        """Return the nodes to ask: of an asynchronous training, those that have yet to answer.

        Only its first round waits for nodes. Who joins later is first asked which client it is.
        """
        if not self.asynchronous or stage != MessageType.TRAIN:
            return super().sample(grid, server_round, stage, *how, **named)
        if not self.registry.partitions:
            nodes = super().sample(grid, server_round, stage, *how, **named)
            self.num_sampled = 0  # a reply may come in any round
        else:
            self._grid, nodes = grid, sorted(grid.get_node_ids())
            told = self._ask_partitions(self._new(nodes))
            self.registry.add(told)
            self.registry.expect([node for node, partition in told.items() if partition is None])
            self.registry.set_present(nodes)
        unknown = set(self.registry.unknown(nodes))  # go by node ids, which may be others' numbers
        asked_since = time.time() - self._timeout
        busy = {m.dst_node_id for m in self._open.values() if m.created_at >= asked_since}
        done = {*self.counted, *self.left, *self.held_out}
        to_ask = [n for n in nodes if n in unknown or self.registry.client(n) not in done]
        return [node for node in to_ask if node not in busy]

    def _new(self, nodes: Iterable[int]) -> list[int]:
        return [node for node in nodes if node not in self.registry.partitions]

    def address(
        self, nodes: Sequence[int], contents: Sequence[RecordDict], stage: str
    ) -> list[Message]:
        """Address contents; replies to open messages of earlier rounds go on counting."""
        earlier = self._exchanges.get(stage)
        messages = super().address(nodes, contents, stage)
        if stage == MessageType.TRAIN and self._open and earlier is not None:
            self._exchanges[stage].include(earlier)
        return messages

    # ----------------------------------------------------------------------- receiving

    def receive(self, grid: Grid, stage: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages; also return late replies to those of earlier rounds."""
        if not self.asynchronous or stage != MessageType.TRAIN:
            return super().receive(grid, stage, messages)
        asked = push(grid, messages)
        self._open |= asked
        waiting, counted = len(self._open), len(self.counted)

        def is_over() -> bool:
            came = counted + waiting - len(self._open)
            all_in = (bool(asked) and not self._open) or 0 < self.stop_at_clients <= came
            return all_in or bool(self._new(grid.get_node_ids()))

        return self.poll(grid, self._open, is_over)

    def count_once(self, pairs: Pairs[T], rejected: Counter[str]) -> Pairs[T]:
        """Return the replies of clients that have not been counted, which now are."""
        kept: Pairs[T] = []
        for reply, own in pairs:
            client = reply.client
            gone = client < 0 and not self.registry.is_live(reply.node)
            if gone or client in {*self.left, *self.held_out}:
                bad = BadReply("left", f"client {client} is not, or no longer, in the run")
                self.drop(reply.node, bad, rejected)
            elif client in self.counted:
                bad = BadReply("duplicate", f"client {client} has been counted before")
                self.drop(reply.node, bad, rejected)
            else:
                self.counted.add(client)
                kept.append((reply, own))
        return kept
