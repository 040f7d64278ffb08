"""FEMNIST: handwritten characters, or the digits among them, of 3,597 writers.

Sources: Caldas et al., *LEAF: A Benchmark for Federated Settings*, 2018; its digits, ten classes,
in Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous Settings
via Neural Tangent Kernel*, ICML 2025, section 5.
"""

from operator import methodcaller

import numpy as np

from fedntk.ntk.predictors.inputs import stack_pictures

from ..config.settings import ConfigError
from .hugging_face import existing_folder, image_column, load_splits, require_column
from .parts import Part

HUB = "flwrlabs/femnist"
LABEL, WRITER = "character", "writer_id"  # columns there
TEST_EVERY = 10  # every tenth example of a writer is for testing
CHUNK = 10_000  # pictures decoded at a time


def femnist(folder: str, *, digits: bool) -> tuple[Part, Part, int]:
    """Load FEMNIST, or its digits, from a folder of Parquet files; if empty, from the hub.

    Returns training and test examples, uint8 of shape (n, 1, 28, 28), owned by writers, and the
    number of classes. The hub has one split: every tenth example of each writer is for testing.
    """
    import pandas as pd

    place = existing_folder(folder, "femnist")
    source = HUB if place is None else str(place)
    split = load_splits(source)["train"]
    for column in (WRITER, LABEL):
        require_column("femnist", column, split.features, repr(source))
    writers = np.asarray(split[WRITER])
    y = np.asarray(split[LABEL], dtype=np.int64)
    names = getattr(split.features[LABEL], "names", None)
    names = names or [str(k) for k in range(int(y.max(initial=-1)) + 1)]
    if digits:
        digit_of = np.array([int(name) if name in "0123456789" else -1 for name in names])
        if (count := int((digit_of >= 0).sum())) != 10:
            raise ConfigError(f"dataset = femnist-digits: expected 10 digits, got {count}")
        chosen = np.flatnonzero(digit_of[y] >= 0)
        split, writers = split.select(chosen), writers[chosen]
        y, names = digit_of[y[chosen]], names[:10]
    image, to_grey = image_column(split), methodcaller("convert", "L")
    chunks = (split.select(range(i, min(i + CHUNK, len(y)))) for i in range(0, len(y), CHUNK))
    x = np.concatenate([stack_pictures(map(to_grey, chunk[image])) for chunk in chunks])
    positions = pd.Series(writers).groupby(writers).cumcount().to_numpy()
    test = positions % TEST_EVERY == TEST_EVERY - 1
    train, tested = (Part(x[rows], y[rows], writers[rows]) for rows in (~test, test))
    return train, tested, len(names)
