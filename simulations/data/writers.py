"""Sets whose examples have owners: FEMNIST of the hub, and all in the JSON form of LEAF.

Sources: Caldas et al., *LEAF: A Benchmark for Federated Settings*, 2018; FEMNIST's digits, ten
classes of 3,597 writers, in Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning
in Heterogeneous Settings via Neural Tangent Kernel*, ICML 2025, section 5.
"""

import json
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from fedntk.ntk.predictors.inputs import stack_pictures

from ..config.settings import ConfigError
from ..errors import naming
from .data import Part
from .files import existing_folder, image_column, load_splits, require_column

HUB = "flwrlabs/femnist"
LABEL, WRITER = "character", "writer_id"  # columns there
TEST_EVERY = 10  # every tenth example of a writer is for testing
CHUNK = 10_000  # pictures decoded at a time
Row = tuple[Any, Any, str]  # x, y, user


def femnist(folder: str, *, digits: bool) -> tuple[Part, Part, int]:
    """Load FEMNIST, or its digits, from a folder of Parquet files; if empty, from the hub.

    Returns training and test examples, uint8 (n, 1, 28, 28), owned by writers, and the number of
    classes. The hub has one split: every tenth example of each writer is for testing.
    """
    import pandas as pd

    place = existing_folder(folder, "femnist")
    source = HUB if place is None else str(place)
    split = load_splits(source)["train"]
    for column in (WRITER, LABEL):
        require_column(f"femnist, {source}", column, split.features)
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
    test = pd.Series(writers).groupby(writers).cumcount() % TEST_EVERY == TEST_EVERY - 1
    every, is_test = Part(x, y, writers), test.to_numpy()
    return every.select(~is_test), every.select(is_test), len(names)


def load_leaf(folder: Path) -> tuple[Part, Part, int, str]:
    """Read ``train/*.json`` and ``test/*.json`` of a folder, each with ``users`` and ``user_data``.

    Examples are strings of one length, with the next character as label, or lists of numbers, with
    a whole number as label; 784 numbers are images of 28 x 28. Returns training and test set, owned
    by users; number of classes; the alphabet, the sorted characters of both. Text is int64
    (n, length), positions in it; numbers are float32.
    """
    raw = {part: list(_rows(folder, part)) for part in ("train", "test")}
    if empty := [part for part, rows in raw.items() if not rows]:
        raise ConfigError(f"dataset: {folder / empty[0]} holds no examples")
    lengths = {len(x) for rows in raw.values() for x, _, _ in rows}
    if len(lengths) > 1:
        raise ConfigError(f"dataset: {folder} has examples of {len(lengths)} lengths, expected one")
    letters = ""
    try:
        if isinstance(raw["train"][0][0], str):
            used = {c for rows in raw.values() for x, y, _ in rows for c in (*x, *y)}
            letters = "".join(sorted(used))
        position = {letter: i for i, letter in enumerate(letters)}
        train, test = (_part(rows, position) for rows in raw.values())
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"dataset: {folder}: expected texts and the next character of each, or lists of "
            f"numbers and whole numbers as labels: {error!r}"
        ) from error
    return train, test, len(letters) or int(max(train.y.max(), test.y.max())) + 1, letters


def _rows(folder: Path, part: str) -> Iterator[Row]:
    paths = sorted((folder / part).glob("*.json"))
    if not paths:
        raise ConfigError(f"dataset: expected LEAF's files {folder / part}/*.json, found none")
    for path in paths:
        form = "LEAF's form, users and user_data with x and y"
        with naming(f"dataset: {path} is not in {form}", KeyError, TypeError, ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                rows = content["user_data"][user]
                for x, y in zip(rows["x"], rows["y"], strict=True):
                    yield x, y, str(user)


def _part(rows: list[Row], position: dict[str, int]) -> Part:
    x, y, users = zip(*rows, strict=True)
    owners = np.array(users)
    if position:
        texts = np.array([[position[letter] for letter in text] for text in x])
        return Part(texts, np.array([position[letter] for letter in y]), owners)
    numbers, labels = np.array(x, np.float64), np.array(y)
    if np.abs(numbers).max() < 2**10:  # else float32 might not hold their differences
        numbers = numbers.astype(np.float32)
    if labels.dtype.kind not in "iu":
        raise ValueError(f"got labels of {labels.dtype}")
    shape = (-1, 1, 28, 28) if numbers.shape[1:] == (784,) else numbers.shape
    return Part(numbers.reshape(shape), labels.astype(np.int64), owners)
