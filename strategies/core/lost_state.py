"""Clients that lost what they keep from round to round are sent it again, in the same round."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from flwr.app import Message, MessageType

from fedntk.ntk import BadReply

from .base import BaseStrategy
from .exchange import Accepted, Pairs, Parse, logger
from .replies import Reply, accuracy_of, screen_accuracies

T = TypeVar("T")


@dataclass(frozen=True)
class Lost:
    """A client's word that it no longer has what it was sent."""

    own: bool  # whether it also lost what it made itself, which the server cannot send again


class Answers(NamedTuple, Generic[T]):
    """Good replies by client; reasons of the rejected; clients whose own state is lost."""

    pairs: list[tuple[Reply, T]]
    rejected: Counter[str]
    lost: list[int]


class ResendingStrategy(BaseStrategy):
    """A strategy whose clients keep something from round to round, and may lose it.

    Such a client replies with no arrays and the metric ``lost-state``: 0 if the server can send
    what is lost, 1 if it cannot.
    """

    def forget_lost(self, client: int) -> None:
        """Have a client that lost what it kept sent all of it again."""
        self.sent.forget(client)

    def answers(self, replies: Iterable[Message], parse: Parse[T], stage: str) -> Answers[T]:
        """Check replies; clients that lost what they were sent are sent it, and asked, once more.

        A client that lost its own state is dropped, as is one that loses again what it got.
        """
        parse_any = _or_lost(parse)
        return self._answered(*self.accepted(replies, parse_any, stage), parse_any, stage)

    def ask_again(self, nodes: Sequence[int], parse: Parse[T], stage: str) -> Answers[T]:
        """Make one more exchange within a round, as :meth:`exchange`, with clients that lose."""
        parse_any = _or_lost(parse)
        found = self.exchange(nodes, stage, self.global_arrays, parse_any)
        return self._answered(*found, parse_any, stage)

    def _answered(
        self,
        found: Pairs[T | Lost],
        rejected: Counter[str],
        parse_any: Callable[[Reply], T | Lost],
        stage: str,
    ) -> Answers[T]:
        lost = [(reply, own) for reply, own in found if isinstance(own, Lost)]
        nodes_found, claimants = {reply.node for reply, _ in found}, self._claimants
        for reply, _ in lost:
            self.forget_lost(reply.client)
        if nodes := [reply.node for reply, own in lost if not own.own]:
            logger.warning("%d clients lost what they kept: it is sent again", len(nodes))
            more, failed = self.exchange(nodes, stage, self.global_arrays, parse_any)
            found = sorted([*found, *more], key=lambda pair: (pair[0].client, pair[0].node))
            rejected += failed
            lost = [pair for pair in lost if pair[1].own]
            lost += [(reply, own) for reply, own in more if isinstance(own, Lost)]
        for reply, _ in lost:
            self.drop(reply.node, BadReply("lost-state", "it lost what it kept"), rejected)
        good = [(reply, own) for reply, own in found if not isinstance(own, Lost)]
        self._claimants |= claimants  # the second exchange had none
        good = self._remaining(good, nodes_found - {reply.node for reply, _ in good})
        return Answers(good, rejected, [reply.client for reply, own in lost if own.own])

    def evaluations(self, replies: Iterable[Message]) -> Accepted[Any]:
        """Return the accepted evaluations, and how many were rejected for which reason."""
        pairs, rejected, _ = self.answers(replies, accuracy_of, MessageType.EVALUATE)
        return self.apply_screen(pairs, rejected, screen_accuracies), rejected


def _or_lost(parse: Parse[T]) -> Callable[[Reply], T | Lost]:
    def parse_any(reply: Reply) -> T | Lost:
        if "lost-state" not in reply.metrics:
            return parse(reply)
        said = reply.metrics["lost-state"]
        if said not in (0, 1) or any(map(len, reply.message.content.array_records.values())):
            raise BadReply("lost-state", "expected 0 or 1, and no arrays beside it")
        return Lost(own=said == 1)

    return parse_any
