"""Clients' own examples, standardised, and kept from one message to the next."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["KeptExamples", "Own"]

MOST_BYTES = 2**28


class Own(NamedTuple):
    """Examples that a client holds.

    Attributes
    ----------
    train, test : tuple of Tensor
        Examples (n, ...) and labels (n,), for training and for its own evaluations; n may be 0
        for these.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for pair in self for part in pair)

    @property
    def versions(self) -> list[int]:
        """How often each tensor has been changed in place, by whatever shares its memory."""
        return [part._version for pair in self for part in pair]


class KeptExamples:
    """Examples of the partitions that were asked for last, as many as fit; for one thread.

    Some networks change in place what they are given. Examples to which this has happened are made
    anew, so that no client finds what another message has left.

    Parameters
    ----------
    most_bytes : int
        Of all that is kept. A client that has more is not kept at all.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[int, tuple[Own, list[int]]] = OrderedDict()

    def of(self, partition: int, make: Callable[[], Own]) -> Own:
        """Return a partition's examples, made where they are not kept."""
        own, versions = self._kept.pop(partition, (None, []))
        if own is not None:
            self.nbytes -= own.nbytes
        if own is None or own.versions != versions:
            own = make()
        self._kept[partition] = own, own.versions
        self.nbytes += own.nbytes
        while self.nbytes > self.most_bytes:
            _, (oldest, _) = self._kept.popitem(last=False)
            self.nbytes -= oldest.nbytes
        return own
