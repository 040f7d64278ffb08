"""Replies to one exchange, checked and sorted by client, and what a round makes of them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedntk.ntk import BadReply

from .replies import INCOMPLETE, Aggregate

logger = getLogger("flwr")
WRITE = "write uploads = yield from r.ask(...)"
Channel = Any  # that of channel.py, which imports this file
Metrics = Mapping[str, Any]
T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Upload(Generic[T]):
    """One client's reply: what is left of its message."""

    client: int  # its id in the registry
    node: int
    num_examples: int  # that the reply counts as
    metrics: Metrics  # the others; see replies.Reply
    left_out: Sequence[str]  # names of metrics that were NaN or infinite
    value: T  # what the exchange's `parse` made of the reply


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
    """

    def __init__(
        self,
        channel: Channel,
        uploads: Iterable[Upload[T]] = (),
        rejected: Mapping[str, int] | None = None,
        *,
        lost: Sequence[int] = (),
        sampled: int = 0,
    ) -> None:
        self.channel, self.lost, self.sampled = channel, tuple(lost), sampled
        self.rejected = Counter(rejected or {})
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
        merged = self._with([*self, *other], self.rejected + other.rejected)
        merged.lost = (*self.lost, *other.lost)
        return merged

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
        self, aggregate: Aggregate, key: str, permitted: Callable[[Metrics], Metrics] = dict
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
        self, key: str, permitted: Callable[[Metrics], Metrics] = dict
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
    metrics: Metrics = field(default_factory=dict)
    record: MetricRecord | None = None

    def __post_init__(self) -> None:
        if self.uploads is not None and not isinstance(self.uploads, Uploads):
            kind = type(self.uploads).__name__
            raise TypeError(f"uploads: expected Uploads, got a {kind}; {WRITE}")
