"""Data sets of several domains: the same classes in every one, and other pictures in each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config.settings import ConfigError

__all__ = ["Domain", "Part", "chosen", "joined"]


class Part(NamedTuple):
    """Examples x (n, ...) and their labels y (n,)."""

    x: NDArray[Any]
    y: NDArray[np.int64]


class Domain(NamedTuple):
    """One domain's examples."""

    train: Part
    test: Part


class Joined(NamedTuple):
    """The examples of all domains; `ids` say the domain of each, by its number."""

    train: Part
    test: Part
    ids: NDArray[np.int64]
    ids_test: NDArray[np.int64]


def joined(domains: Sequence[Domain]) -> Joined:
    """Put domains together, one after the other."""
    sides = []
    for parts in zip(*domains, strict=True):
        ids = np.repeat(np.arange(len(parts)), [len(part.y) for part in parts])
        whole = Part(np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts]))
        sides.append((whole, ids))
    (train, ids), (test, ids_test) = sides
    return Joined(train, test, ids, ids_test)


def chosen(
    y: NDArray[np.int64], count: int, *, key: str, whose: str, num_classes: int = 10, block: int = 0
) -> NDArray[np.int64]:
    """Return which examples are taken: as many of each class, the first ones.

    Parameters
    ----------
    y : ndarray of int64, shape (n,)
        Labels.
    count : int
        How many are taken; a multiple of `num_classes`.
    key, whose : str
        For errors: the setting that says the count, and what the labels are of.
    num_classes : int
        C.
    block : int
        So many times `count` examples are left out first.

    Returns
    -------
    ndarray of int64, shape (count,)
        Indices, in their order.

    Raises
    ------
    ConfigError
        If the count is no multiple, or a class has too few examples.
    """
    each, rest = divmod(count, num_classes)
    if rest:
        raise ConfigError(
            f"{key}: expected a multiple of {num_classes}, as many examples of each class, "
            f"got {count}"
        )
    most = int(np.bincount(y, minlength=num_classes).min())
    if each * (block + 1) > most:
        raise ConfigError(
            f"{key}: expected at most {num_classes * (most // (block + 1))}, as {whose} has "
            f"{most} examples of a class, got {count}"
        )
    own = [np.flatnonzero(y == k)[block * each : (block + 1) * each] for k in range(num_classes)]
    return np.sort(np.concatenate(own))
