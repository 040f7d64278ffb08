"""Where files go, and how they are written by several workers at once."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

__all__ = ["claimed", "remove_partial", "whole"]


PARTIAL = ".partial"  # ends the name of a file that is being written


@contextlib.contextmanager
def claimed(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes from working in a folder under the same name.

    Raises
    ------
    BlockingIOError
        If one is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f".{name}.lock", blocking=False):
            yield
    except Timeout:
        raise BlockingIOError(
            f"another process is at work in {folder}; wait for it, or choose another folder"
        ) from None


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left half written in a run's folder that is claimed."""
    for path in (*folder.glob(f"*{PARTIAL}"), *folder.glob(f"checkpoints/*{PARTIAL}")):
        path.unlink(missing_ok=True)
