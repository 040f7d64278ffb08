"""Limits of what clients may send."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from ..errors import BadReply
from .compression import UNQUANTISED, Encoded, check_compression, num_kept

__all__ = ["UploadLimits"]


@dataclass(frozen=True)
class UploadLimits:
    """What a client may send; an upload that holds more is refused.

    Attributes
    ----------
    parameters : mapping of str to sequence of int
        Shape of each array of the global model.
    max_examples : int
        Most examples of one client.
    sparsity : float
        Least share of each tensor's numbers that is dropped.
    bits : int
        Most bits of each number that stays.
    """

    parameters: Mapping[str, Sequence[int]]
    max_examples: int = 10_000_000
    sparsity: float = 0.0
    bits: int = UNQUANTISED

    def __post_init__(self) -> None:
        check_compression(self.sparsity, self.bits)

    def to_json(self) -> str:
        """Write all of it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        try:
            fields = json.loads(text)
            return cls(
                {str(k): [int(n) for n in shape] for k, shape in fields["parameters"].items()},
                int(fields["max_examples"]),
                float(fields["sparsity"]),
                int(fields["bits"]),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"expected the limits of uploads as JSON, got {text[:80]!r}"
            ) from error

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
