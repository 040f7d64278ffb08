"""Losses as part of an experiment: clients that are gone in a round, or answer too late."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import numpy as np
from flwr.app import Error, Message, MessageType
from flwr.serverapp import Grid

from fedntk.strategies import Strategy

from ._flower import stamp
from .engines import NODE_UNAVAILABLE, ForwardingGrid


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
        self._errors |= (own := {error.metadata.reply_to_message_id: error for error in errors})
        return [*own, *ids]

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
