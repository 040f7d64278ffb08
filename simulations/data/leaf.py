"""Data sets in the JSON form of LEAF (Caldas et al. 2018), such as FEMNIST and Shakespeare."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..config.settings import ConfigError
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
    is_text = isinstance(raw["train"][0][0], str)
    lengths = {len(x) for rows in raw.values() for x, _, _ in rows}
    if len(lengths) > 1:
        raise ConfigError(f"dataset: {folder} has examples of {len(lengths)} lengths, expected one")
    if is_text:
        letters = sorted({c for rows in raw.values() for x, y, _ in rows for c in (*x, *str(y))})
        position = {letter: i for i, letter in enumerate(letters)}
        train, test = (_text(rows, position, folder) for rows in raw.values())
        return train, test, len(letters), "".join(letters)
    train, test = (_numbers(rows, folder) for rows in raw.values())
    return train, test, int(max(train.y.max(), test.y.max())) + 1, ""


def _examples(folder: Path, part: str) -> Iterator[Row]:
    paths = sorted((folder / part).glob("*.json"))
    if not paths:
        raise ConfigError(f"dataset: expected LEAF's files {folder / part}/*.json, found none")
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                own = content["user_data"][user]
                for x, y in zip(own["x"], own["y"], strict=True):
                    yield x, y, str(user)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"dataset: {path} is not in LEAF's form, users and user_data with x and y: {error}"
            ) from error


def _text(rows: list[Row], position: dict[str, int], folder: Path) -> Part:
    if not all(isinstance(x, str) and isinstance(y, str) and len(y) == 1 for x, y, _ in rows):
        raise ConfigError(f"dataset: {folder} mixes text with other examples, or labels are longer")
    x = np.array([[position[letter] for letter in text] for text, _, _ in rows], np.int64)
    y = np.array([position[letter] for _, letter, _ in rows], np.int64)
    return Part(x, y, np.array([user for _, _, user in rows]))


def _numbers(rows: list[Row], folder: Path) -> Part:
    try:
        x = np.array([own for own, _, _ in rows], np.float32)
        y = np.array([label for _, label, _ in rows])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dataset: {folder} mixes numbers with other examples") from error
    if not np.issubdtype(y.dtype, np.integer):
        raise ConfigError(f"dataset: {folder} has labels of {y.dtype}, expected whole numbers")
    x = x.reshape(-1, 1, 28, 28) if x.shape[1:] == (784,) else x
    return Part(x, y.astype(np.int64), np.array([user for _, _, user in rows]))
