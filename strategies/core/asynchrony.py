"""Replies that count in whichever round they come, for methods whose result no order changes.

Beyond the papers. Each message is answered once, by the node that was asked, and each client counts
once.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedntk.ntk import BadReply
from fedntk.ntk.options import Declared, option, state

from .channel import Channel, poll, push
from .registry import Exchange
from .round import Round
from .sampling import Sample
from .uploads import Uploads

T = TypeVar("T")


class Asynchrony(Declared):
    """A reply counts in whichever round it comes, and nobody waits for it.

    A round asks the live clients that have yet to answer, and ends when all have, when a new node
    is there, or at the strategy's ``round_deadline``, which is needed. A client without an answer
    after the run's timeout is asked again.

    A method passes it as ``r.ask(clients=asynchrony.to_ask(r), late=asynchrony)``, and lets
    :meth:`count_once` judge what comes. It is for sums of whole numbers, such as OneExchange's.

    Attributes
    ----------
    counted : set of int
        Clients whose replies are in the sum.
    left : set of int
        Clients that are neither asked nor counted any more.
    """

    stop_at_clients: int = option(
        "number of counted clients at which the run ends; 0: after all its rounds",
        default=0,
        at_least=0,
        compared=False,
    )
    counted: set[int] = state(set)
    left: set[int] = state(set)
    _open: dict[str, Metadata] = state(dict, saved=False)  # messages without a reply, by id
    _last: Exchange = state(Exchange, saved=False)  # of the round before

    @property
    def is_complete(self) -> bool:
        """Whether as many clients are counted as the run ends at."""
        return 0 < self.stop_at_clients <= len(self.counted)

    def to_ask(self, r: Round) -> Sample:
        """Return the live clients that have yet to answer; only the first round waits for nodes."""
        channel, registry = r.channel, r.registry
        if not registry.partitions:
            nodes = list(r.everyone().nodes)
        else:
            nodes = [] if channel.grid is None else sorted(channel.grid.get_node_ids())
            told = channel.ask_partitions(_new(channel, nodes))
            registry.add(told)
            registry.expect([node for node, partition in told.items() if partition is None])
            registry.set_present(nodes)
        r.sampled = 0  # a reply may come in any round
        unknown = set(registry.unknown(nodes))  # go by node ids, which may be others' numbers
        asked_since = time.time() - channel.timeout
        busy = {m.dst_node_id for m in self._open.values() if m.created_at >= asked_since}
        done = {*self.counted, *self.left, *r.held_out}
        to_ask = [n for n in nodes if n in unknown or registry.client(n) not in done]
        return Sample(tuple(node for node in to_ask if node not in busy), None, 0)

    def join(self, exchange: Exchange) -> None:
        """Let open messages of earlier rounds be answered in this exchange as well."""
        if self._open:
            exchange.include(self._last)
        self._last = exchange

    def receive(
        self,
        channel: Channel,
        grid: Grid,
        messages: Iterable[Message],
        timeout: float,
        at_once: int,
    ) -> Iterable[Message]:
        """Send messages; yield replies to these and to open ones until the round goes on."""
        asked = push(grid, messages)
        self._open |= asked
        waiting, counted = len(self._open), len(self.counted)

        def is_over() -> bool:
            came = counted + waiting - len(self._open)
            all_in = (bool(asked) and not self._open) or 0 < self.stop_at_clients <= came
            return all_in or bool(_new(channel, grid.get_node_ids()))

        return poll(grid, self._open, timeout, is_over, at_once)

    def count_once(self, uploads: Uploads[T], r: Round) -> Uploads[T]:
        """Return the replies of clients that have not been counted, which now are."""
        rejected, good = Counter[str](), []
        for upload in uploads:
            client, bad = upload.client, None
            gone = client < 0 and not r.registry.is_live(upload.node)
            if gone or client in {*self.left, *r.held_out}:
                bad = BadReply("left", f"client {client} is not, or no longer, in the run")
            elif client in self.counted:
                bad = BadReply("duplicate", f"client {client} has been counted before")
            if bad is None:
                self.counted.add(client)
                good.append(upload)
            else:
                uploads.channel.log_drop(upload.node, bad)
                rejected[bad.reason] += 1
        return Uploads(uploads.channel, good, uploads.rejected + rejected)


def _new(channel: Channel, nodes: Iterable[int]) -> list[int]:
    return [node for node in nodes if node not in channel.registry.partitions]
