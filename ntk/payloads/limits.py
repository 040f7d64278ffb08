"""Limits of what clients may send."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ..errors import BadReply
from ..support.arrays import require_array
from .compression import UNQUANTISED, Encoded, check_compression, num_kept


@dataclass(frozen=True)
class UploadLimits:
    """What a client may send; an upload that holds more is refused."""

    parameters: Mapping[str, Sequence[int]]  # shape of each array of the global model
    max_examples: int = 10_000_000
    sparsity: float = 0.0  # share of each tensor's numbers that is dropped, at least
    bits: int = UNQUANTISED  # of each of the others, at most

    def __post_init__(self) -> None:
        check_compression(self.sparsity, self.bits)

    def require_examples(self, num_examples: int) -> None:
        """Raise BadReply if a client has more examples than allowed."""
        if num_examples > self.max_examples:
            raise BadReply(
                "shape", f"expected at most {self.max_examples} examples, got {num_examples}"
            )

    def require(self, code: Encoded, num_examples: int) -> None:
        """Raise BadReply unless a tensor has so many examples, and is compressed enough."""
        size = code.size
        most = code.groups * num_kept(size // code.groups, self.sparsity)
        if not code.shape or code.shape[0] != num_examples:
            raise BadReply("shape", f"expected {num_examples} examples, got {code.shape}")
        if code.count > most:
            raise BadReply("compression", f"asked for {most} of {size} numbers, got {code.count}")
        if code.bits > self.bits:
            raise BadReply("compression", f"asked for {self.bits} bits a number, got {code.bits}")


def require_labels(labels: NDArray[Any], num_examples: int, num_outputs: int) -> None:
    """Raise BadReply unless these are classes 0 ... C - 1 of so many examples."""
    require_array("labels", labels, shape=(num_examples,), dtype="unsigned")
    if labels.max() >= num_outputs:
        raise BadReply("labels", f"expected 0 ... {num_outputs - 1}, got {labels.max()}")
