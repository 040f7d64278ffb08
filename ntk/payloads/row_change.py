"""How a client's sums change when some of its rows go and others come.

Beyond the papers: sums of whole numbers subtract exactly, so a total from which a client's old sums
are taken, and to which its new ones are added, has the bits of one that never held the old ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadReply

WORDS = "change"  # name of the one array that travels
COUNTED, NEW = "counted-sums", "new-sums"  # configuration: names of a client's sums
BESIDE = 2  # numbers after those of the sums
MANY = 2**40  # examples, whose sums need words of 64 bits


@dataclass(frozen=True, eq=False)
class RowChange:
    """New sums less old ones, modulo 2^64, and how many rows went and came.

    `words`, uint64 (m,), are those of :meth:`.FeatureStatistics.to_words`. Changes add up.
    """

    words: NDArray[np.uint64]
    deleted: int
    added: int

    def __add__(self, other: "RowChange") -> "RowChange":
        deleted, added = self.deleted + other.deleted, self.added + other.added
        return RowChange(self.words + other.words, deleted, added)

    def without_words(self) -> "RowChange":
        """Return only the numbers of rows."""
        return RowChange(self.words[:0].copy(), self.deleted, self.added)

    def to_words(self) -> NDArray[np.uint64]:
        """Return all numbers in one array of uint64."""
        return np.append(self.words, np.array([self.deleted, self.added], np.uint64))

    @classmethod
    def from_words(cls, words: NDArray[Any], most_rows: int) -> "RowChange":
        """Read what :meth:`to_words` made, or sums of such; BadReply if it is of more rows."""
        deleted, added = map(int, words[-BESIDE:])
        if max(deleted, added) > most_rows:
            raise BadReply(
                "num-examples", f"expected up to {most_rows} rows, got {deleted} and {added}"
            )
        return cls(words[:-BESIDE], deleted, added)
