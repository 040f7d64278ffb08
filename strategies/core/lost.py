"""A client's word that it lost what it keeps from round to round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedntk.ntk import BadReply
from fedntk.ntk.payloads import wire

from .replies import Reply


@dataclass(frozen=True)
class LostState:
    """What a reply without arrays says with the metric ``lost-state``.

    Attributes
    ----------
    final : bool
        Whether the client also lost what it made itself, which the server cannot send again.
    """

    final: bool


def parse_or_lost(parse: Callable[[Reply], Any]) -> Callable[[Reply], Any]:
    """Return what parses a reply, or reads that its client lost its state."""

    def read(reply: Reply) -> Any:
        if wire.LOST_STATE not in reply.metrics:
            return parse(reply)
        value = reply.metrics[wire.LOST_STATE]
        if value not in (0, 1) or any(map(len, reply.message.content.array_records.values())):
            raise BadReply(wire.LOST_STATE, "expected 0 or 1, and no arrays beside it")
        return LostState(final=value == 1)

    return read
