"""FEMNIST: handwritten characters, or the digits among them, of 3,597 writers.

Sources: Caldas et al., *LEAF: A Benchmark for Federated Settings*, 2018; its digits, ten classes,
in Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous Settings
via Neural Tangent Kernel*, ICML 2025, section 5.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config.settings import ConfigError
from .hugging_face import HuggingFaceSet, existing_folder, pictures
from .parts import Part

__all__ = ["HUB", "femnist"]

HUB = "flwrlabs/femnist"
LABEL, WRITER = "character", "writer_id"  # columns there
TEST_EVERY = 10  # one of so many of a writer's examples is for testing
CHUNK = 10_000  # pictures decoded at a time


def femnist(folder: str, *, digits: bool) -> tuple[Part, Part, int]:
    """Load FEMNIST with its writers; every tenth example of each is for testing.

    Parameters
    ----------
    folder : str
        Folder of its Parquet files; empty: from the hub, which has one split.
    digits : bool
        Whether to take only digits.

    Returns
    -------
    tuple of Part, Part and int
        Training and test examples, uint8 of shape (n, 1, 28, 28), owned by writers; 62 or 10.
    """
    place = existing_folder(folder, "femnist")
    source = HuggingFaceSet(HUB if place is None else str(place))
    split = source.split("train")
    writers = np.asarray(split[source.column(split, "femnist", WRITER)])
    label = source.column(split, "femnist", LABEL)
    y = np.asarray(split[label], dtype=np.int64)
    names = getattr(split.features[label], "names", None)
    names = names or [str(k) for k in range(int(y.max(initial=-1)) + 1)]
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
    train, tested = (Part(x[own], y[own], writers[own]) for own in (~test, test))
    return train, tested, len(names)


def _kept_for_testing(writers: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the tenth, twentieth, ... example of each writer."""
    order = np.argsort(writers, kind="stable")
    _, starts, counts = np.unique(writers[order], return_index=True, return_counts=True)
    position = np.arange(len(writers)) - np.repeat(starts, counts)
    kept = np.zeros(len(writers), bool)
    kept[order] = position % TEST_EVERY == TEST_EVERY - 1
    return kept


def _grey(picture: Any) -> Any:
    return picture.convert("L")
