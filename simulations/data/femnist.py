"""FEMNIST: handwritten characters, or the digits among them, of 3,597 writers.

Sources: Caldas et al., *LEAF: A Benchmark for Federated Settings*, 2018; its digits alone, ten
classes, in Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, section 5.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config.settings import ConfigError
from .hugging_face import HuggingFaceSet, pictures

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["HUB", "Femnist", "femnist"]

HUB = "flwrlabs/femnist"
LABEL, WRITER = "character", "writer_id"  # columns there
TEST_EVERY = 10  # of a writer's examples, one is for testing
CHUNK = 10_000  # pictures decoded at a time


class Femnist(NamedTuple):
    """Training and test examples, whose they are, and how many classes.

    Attributes
    ----------
    train, test : tuple of ndarray
        Pictures (n, 1, 28, 28) of uint8, and classes (n,) of int64.
    writers, writers_test : ndarray of str, shape (n,)
        Who wrote each.
    num_classes : int
        62, or 10.
    """

    train: tuple[NDArray[Any], NDArray[np.int64]]
    test: tuple[NDArray[Any], NDArray[np.int64]]
    writers: NDArray[Any]
    writers_test: NDArray[Any]
    num_classes: int


def femnist(folder: str, *, digits: bool) -> Femnist:
    """Load FEMNIST, of whose writers each has every tenth example kept for testing.

    Parameters
    ----------
    folder : str
        With its Parquet files; empty: from the hub, which has one split, with writers.
    digits : bool
        Whether only digits count.

    Raises
    ------
    ConfigError
        If it cannot be had, or has other columns or classes.
    """
    place = Path(folder).expanduser()
    if folder and not place.is_dir():
        raise ConfigError(f"dataset = femnist: expected a folder, got {place}")
    source = HuggingFaceSet(str(place) if folder else HUB)
    split = source.split("train")
    writers = np.asarray(split[source.column(split, "femnist", WRITER)])
    y, names = _classes(split, source.column(split, "femnist", LABEL))
    if digits:
        wanted = [position for position, name in enumerate(names) if name in "0123456789"]
        if len(wanted) != 10:
            raise ConfigError(f"dataset = femnist-digits: expected 10 digits, got {len(wanted)}")
        chosen = np.flatnonzero(np.isin(y, wanted))
        renumbered = np.full(len(names), -1)
        renumbered[wanted] = [int(names[position]) for position in wanted]
        split, writers, y, names = split.select(chosen), writers[chosen], y[chosen], names[:10]
        y = renumbered[y]
    if not len(y):
        raise ConfigError("dataset = femnist: expected examples, got none")
    image = source.image_column(split)
    x = np.concatenate(
        [
            pictures(split.select(range(start, min(start + CHUNK, len(y)))), image, _grey)
            for start in range(0, len(y), CHUNK)
        ]
    )
    test = _kept_for_testing(writers)
    return Femnist(
        (x[~test], y[~test]), (x[test], y[test]), writers[~test], writers[test], len(names)
    )


def _classes(split: "Dataset", column: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return the labels, and what their classes are called; without names, their numbers."""
    y = np.asarray(split[column], dtype=np.int64)
    names = getattr(split.features[column], "names", None)
    return y, list(names) if names else [str(k) for k in range(int(y.max(initial=-1)) + 1)]


def _kept_for_testing(writers: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which examples are the tenth, twentieth, ... of their writer."""
    order = np.argsort(writers, kind="stable")
    _, starts, counts = np.unique(writers[order], return_index=True, return_counts=True)
    position = np.arange(len(writers)) - np.repeat(starts, counts)
    kept = np.zeros(len(writers), bool)
    kept[order] = position % TEST_EVERY == TEST_EVERY - 1
    return kept


def _grey(picture: Any) -> Any:
    return picture.convert("L")
