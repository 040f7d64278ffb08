"""Clients' own examples, standardised, and kept from one message to the next."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

MOST_BYTES = 2**28


class Own(NamedTuple):
    """A client's examples (n, ...) and labels (n,), for training and for its own evaluations.

    A file's are `raw` as they stand there; `owner` has arguments of clients that mask.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    raw: NDArray[Any] | None = None
    owner: Mapping[str, Any] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for pair in self[:2] for part in pair)

    @property
    def versions(self) -> list[int]:
        """Numbers of changes in place to each tensor."""
        return [part._version for pair in self[:2] for part in pair]


class KeptExamples:
    """Examples of the partitions that were used last, up to `most_bytes`; for one thread.

    Examples that a network changed in place are made anew.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[int, tuple[Own, list[int]]] = OrderedDict()

    def of(self, partition: int, make: Callable[[], Own]) -> Own:
        """Return a partition's kept examples, or make them."""
        examples, versions = self._kept.pop(partition, (None, []))
        if examples is not None:
            self.nbytes -= examples.nbytes
        if examples is None or examples.versions != versions:
            examples = make()
        self._kept[partition] = examples, examples.versions
        self.nbytes += examples.nbytes
        while self.nbytes > self.most_bytes:
            _, (oldest, _) = self._kept.popitem(last=False)
            self.nbytes -= oldest.nbytes
        return examples
