"""Where files go, and how they are written by several workers at once."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["cache_dir", "whole"]


def cache_dir() -> Path:
    """Folder for what can be made again: ``fedntk`` in $XDG_CACHE_HOME or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedntk"


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
