"""Data sets in the JSON form of LEAF (Caldas et al. 2018), such as FEMNIST and Shakespeare."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..config.settings import ConfigError
from ..errors import naming
from .parts import Part

Row = tuple[Any, Any, str]  # x, y, user


def load_leaf(folder: Path) -> tuple[Part, Part, int, str]:
    """Read ``train/*.json`` and ``test/*.json`` of a folder.

    Each file holds ``users`` and ``user_data``: for each user the lists ``x`` and ``y``. Examples
    are strings of one length, with the next character as label, or lists of numbers, with a whole
    number as label. Lists of 784 numbers are images of 28 x 28, as in FEMNIST.

    Returns training and test set, owned by users; number of classes; the alphabet, the sorted
    characters of both splits. Text is int64 of shape (n, length), positions in it; other examples
    are float32, and have no alphabet.
    """
    raw = {part: list(_examples(folder, part)) for part in ("train", "test")}
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


def _examples(folder: Path, part: str) -> Iterator[Row]:
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
