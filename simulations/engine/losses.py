"""Losses as part of an experiment: clients that are gone in a round, or answer too late."""

import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from flwr.app import Error, Message, MessageType
from flwr.serverapp import Grid

from fedntk.strategies import BaseStrategy

from ._flower import stamp
from .engines import NODE_UNAVAILABLE, WrappedGrid


class _Sorted(NamedTuple):
    """What arrives, what is late among it, and errors for the rest."""

    arriving: list[Message]
    late: list[Message]
    errors: list[Message]


class LossyGrid(WrappedGrid):
    """A grid on which clients are lost or late in a round's training, drawn by (seed, round).

    A lost client gets none of the round's training messages, and the server gets Flower's error for
    a node that is gone. A late one trains, and its replies come after the round: a strategy that
    still looks for them then gets them. Each client is drawn by itself: the shares `lost` and
    `late` are probabilities. Evaluation loses nothing.
    """

    def __init__(
        self, grid: Grid, strategy: BaseStrategy, *, seed: int, lost: float, late: float
    ) -> None:
        super().__init__(grid)
        self._strategy, self._seed, self._lost, self._late = strategy, seed, lost, late
        self._errors: dict[str, Message] = {}
        self._asked_in: dict[str, int] = {}  # id of a message to a late client -> its round

    def fate(self, client: int, server_round: int) -> Literal["lost", "late", "in time"]:
        """Return what becomes of a client in a round; `client` is its id in the registry."""
        key = [self._seed, server_round, client % 2**64, *b"losses"]
        drawn = float(np.random.default_rng(key).random())
        if drawn < self._lost:
            return "lost"
        return "late" if drawn < self._lost + self._late else "in time"

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send what arrives."""
        sent, server_round = self._sort(messages), self._strategy.server_round
        ids = list(self.grid.push_messages(sent.arriving))
        self._asked_in |= {m.metadata.message_id: server_round for m in sent.late}
        errors = {error.metadata.reply_to_message_id: error for error in sent.errors}
        self._errors |= errors
        return [*errors, *ids]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return errors, and the replies that are there by now."""
        ids, now = list(message_ids), self._strategy.server_round
        errors = [self._errors.pop(number) for number in ids if number in self._errors]
        ready = [number for number in ids if self._asked_in.get(number, -1) < now]
        return [*errors, *self.grid.pull_messages(ready)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return errors, and the replies that come in time."""
        sent = self._sort(messages)
        replies = self.grid.send_and_receive(sent.arriving, timeout=timeout)
        late = {message.metadata.message_id for message in sent.late}
        in_time = (reply for reply in replies if reply.metadata.reply_to_message_id not in late)
        return itertools.chain(sent.errors, in_time)

    def _sort(self, messages: Iterable[Message]) -> _Sorted:
        found, server_round = _Sorted([], [], []), self._strategy.server_round
        for message in messages:
            client = self._strategy.registry.client(message.metadata.dst_node_id)
            training = message.metadata.message_type == MessageType.TRAIN
            fate = self.fate(client, server_round) if training else "in time"
            if fate == "lost":
                reason = Error(NODE_UNAVAILABLE, f"client {client} is lost in this round")
                found.errors.append(Message(reason, reply_to=stamp(message)))
                continue
            found.arriving.append(message)
            if fate == "late":
                found.late.append(message)
        return found
