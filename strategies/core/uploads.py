"""Replies to one exchange, checked and sorted by client, and what a round makes of them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedntk.ntk import BadReply

from .replies import INCOMPLETE, Aggregate, Reply

logger = getLogger("flwr")
WRITE = "write uploads = yield from r.ask(...)"
T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Upload(Generic[T]):
    """One client's reply.

    Attributes
    ----------
    client, node : int
        Id of the client in the registry, and of the node that sent the reply.
    num_examples : int
        Examples that the reply counts as.
    metrics : dict of str to int, float or list
        The other metrics; see :class:`~.replies.Reply`.
    left_out : tuple of str
        Names of metrics that were NaN or infinite.
    value : T
        What the exchange's ``parse`` made of the reply.
    """

    client: int
    node: int
    num_examples: int
    metrics: Mapping[str, Any]
    left_out: Sequence[str]
    value: T

    @classmethod
    def of(cls, reply: Reply, value: T) -> "Upload[T]":
        """Return what is needed of a reply; its message is let go of."""
        return cls(
            reply.client, reply.node, reply.num_examples, reply.metrics, reply.left_out, value
        )


class Registrar(Protocol):
    """Books what becomes of replies, such as :class:`~.channel.Channel`."""

    def log_drop(self, node: int, bad: BadReply) -> None:
        """Log why a reply is not used."""

    def settle(self, uploads: Sequence[Upload[T]], dropped: Collection[int]) -> list[Upload[T]]:
        """Give up the dropped nodes' claims to a partition; return uploads with new ids."""


class Uploads(Sequence[Upload[T]]):
    """The usable replies to one exchange, sorted by client.

    Nothing changes an object of this class: methods that drop replies return another one.

    Attributes
    ----------
    rejected : Counter of str
        Reason -> number of replies that were dropped for it.
    lost : tuple of int
        Clients that lost state which the server cannot send again.
    sampled : int
        Number of clients whose replies the round wants; 0 if it does not say.
    channel : Channel
        What the replies came through.
    """

    def __init__(
        self,
        channel: Registrar,
        uploads: Iterable[Upload[T]] = (),
        rejected: Mapping[str, int] | None = None,
        *,
        lost: Sequence[int] = (),
        sampled: int = 0,
    ) -> None:
        self.channel, self.sampled = channel, sampled
        self.rejected = Counter(rejected or {})
        self.lost = tuple(lost)
        self._uploads = sorted(uploads, key=lambda upload: (upload.client, upload.node))

    def __len__(self) -> int:
        return len(self._uploads)

    def __iter__(self) -> Iterator[Upload[T]]:
        return iter(self._uploads)

    def __getitem__(self, index: Any) -> Any:
        return self._uploads[index]

    @property
    def values(self) -> list[T]:
        """What was parsed, by client."""
        return [upload.value for upload in self]

    @property
    def nodes(self) -> list[int]:
        """Ids of the nodes, by client."""
        return [upload.node for upload in self]

    @property
    def clients(self) -> list[int]:
        """Ids of the clients."""
        return [upload.client for upload in self]

    @property
    def counts(self) -> list[int]:
        """Numbers of examples, by client."""
        return [upload.num_examples for upload in self]

    def judge(self, verdicts: Iterable[BadReply | None]) -> "Uploads[T]":
        """Drop, log and count the replies whose verdict is an error."""
        good, rejected = list[Upload[T]](), Counter(self.rejected)
        for upload, bad in zip(self, verdicts, strict=True):
            if bad is None:
                good.append(upload)
            else:
                self.channel.log_drop(upload.node, bad)
                rejected[bad.reason] += 1
        dropped = set(self.nodes) - {upload.node for upload in good}
        return self._with(self.channel.settle(good, dropped), rejected)

    def keep(self, nodes: Iterable[int]) -> "Uploads[T]":
        """Return only the replies of some nodes; the others are not counted as rejected."""
        chosen = set(nodes)
        return self._with([upload for upload in self if upload.node in chosen], self.rejected)

    def merge(self, other: "Uploads[T]") -> "Uploads[T]":
        """Return the replies of both, and the counts of those that either rejected."""
        return Uploads(
            self.channel,
            [*self, *other],
            self.rejected + other.rejected,
            lost=(*self.lost, *other.lost),
            sampled=self.sampled,
        )

    def settled(self, dropped: Collection[int], lost: Sequence[int]) -> "Uploads[T]":
        """Return the same replies after the claims of dropped nodes, with clients that are lost."""
        uploads = self.channel.settle(list(self), dropped)
        return Uploads(self.channel, uploads, self.rejected, lost=lost, sampled=self.sampled)

    def with_rejected(self, rejected: Mapping[str, int]) -> "Uploads[T]":
        """Return the same replies, and count others as rejected besides."""
        return self._with(self, self.rejected + Counter(rejected))

    def with_values(self, values: Iterable[S]) -> "Uploads[S]":
        """Return the same replies with other values."""
        every: Sequence[Upload[Any]] = self._uploads
        changed = [replace(one, value=value) for one, value in zip(every, values, strict=True)]
        return self._with(changed, self.rejected)

    def without_values(self) -> "Uploads[None]":
        """Return the replies without what was parsed, whose memory is then free."""
        return self.with_values([None] * len(self))

    def _with(self, uploads: Iterable[Any], rejected: Mapping[str, int]) -> "Uploads[Any]":
        return Uploads(self.channel, uploads, rejected, lost=self.lost, sampled=self.sampled)

    def metrics(
        self,
        aggregate: Aggregate,
        key: str,
        permitted: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> MetricRecord:
        """Aggregate the clients' metrics, weighted by the metric `key`, and count the replies.

        Lists with infinite numbers are left out of the aggregation, as is what is not `permitted`.
        """
        metrics = MetricRecord()
        if contents := self.metric_records(key, permitted):
            metrics = aggregate(contents, key)
        if incomplete := [upload for upload in self if upload.left_out]:
            metrics[INCOMPLETE] = len(incomplete)
            names = sorted({name[:80] for upload in incomplete for name in upload.left_out})
            logger.warning(
                "metrics of %d clients are NaN or infinite, and left out: %s",
                len(incomplete),
                str(names[:5])[:200],
            )
        metrics["num-examples"] = sum(self.counts)
        metrics["replies-accepted"] = len(self)
        metrics["replies-rejected"] = self.rejected.total()
        for reason, count in sorted(self.rejected.items()):
            metrics[f"rejected-{reason}"] = count
        return metrics

    def metric_records(
        self, key: str, permitted: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    ) -> list[RecordDict]:
        """Return each client's metrics, with its number of examples under `key`."""
        contents = []
        for upload in self:
            finite = {name: v for name, v in upload.metrics.items() if np.isfinite(v).all()}
            record = MetricRecord({**permitted(finite), key: upload.num_examples})
            contents.append(RecordDict({"metrics": record}))
        return contents


@dataclass(frozen=True)
class Update:
    """What a round of training made.

    Attributes
    ----------
    uploads : Uploads, optional
        The replies that were used, by which metrics are averaged; None if nobody was asked.
    arrays : ArrayRecord, optional
        The new global arrays; None: they stay as they were.
    metrics : dict of str to int or float
        Metrics of the round besides those that the replies report.
    record : MetricRecord, optional
        All metrics of the round, in place of those that follow from the replies.
    """

    uploads: Uploads[Any] | None
    arrays: ArrayRecord | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    record: MetricRecord | None = None

    def __post_init__(self) -> None:
        if self.uploads is not None and not isinstance(self.uploads, Uploads):
            raise TypeError(
                f"uploads: expected Uploads, got a {type(self.uploads).__name__}; {WRITE}"
            )
