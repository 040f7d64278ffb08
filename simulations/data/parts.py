"""Examples of a set, and sets of several domains: the same classes, and other pictures in each."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config.settings import ConfigError


class Part(NamedTuple):
    """Examples x (n, ...), their labels y (n,), and the owner of each (n,), if there are owners.

    A table has names of its columns; `classes` are names of the labels 0 ... C - 1.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    owners: NDArray[Any] | None = None
    columns: tuple[str, ...] = ()
    classes: tuple[str | int, ...] = ()

    def select(self, chosen: NDArray[np.bool_]) -> "Part":
        """Return some of the examples."""
        owners = None if self.owners is None else self.owners[chosen]
        return self._replace(x=self.x[chosen], y=self.y[chosen], owners=owners)


class Domain(NamedTuple):
    """Training and test examples of one domain, or of a whole set."""

    train: Part
    test: Part


def join_domains(domains: Iterable[Domain]) -> Domain:
    """Put domains together, one after the other; they own their examples, by their numbers."""
    sides = []
    for parts in zip(*domains, strict=True):
        owners = np.repeat(np.arange(len(parts)), [len(part.y) for part in parts])
        x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        sides.append(Part(x, y, owners))
    return Domain(*sides)


def select_balanced(
    y: NDArray[np.int64], count: int, part: str, name: str, block: int = 0
) -> NDArray[np.int64]:
    """Return the indices of the first `count` examples, as many of each of ten classes.

    `part`, "train" or "test", and the set's `name` are for errors. Those of the first `block`
    calls, each of `count`, are passed over.
    """
    key = "examples-per-domain" if part == "train" else "test-examples-per-domain"
    per_class, rest = divmod(count, 10)
    if rest:
        raise ConfigError(
            f"{key}: expected a multiple of 10, as many examples of each class, got {count}"
        )
    most = int(np.bincount(y, minlength=10).min())
    if per_class * (block + 1) > most:
        raise ConfigError(
            f"{key}: expected at most {10 * (most // (block + 1))}, as {name} has {most} examples "
            f"of a class, got {count}"
        )
    indices = [
        np.flatnonzero(y == k)[block * per_class : (block + 1) * per_class] for k in range(10)
    ]
    return np.sort(np.concatenate(indices))
