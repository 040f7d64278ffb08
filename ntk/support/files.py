"""Files that appear whole or not at all, even with several writers; folders with one."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

PARTIAL = ".partial"  # ends the name of a file that is being written


class DamagedFile(ValueError):  # noqa: N818
    """A file that is cut off or altered."""


@contextlib.contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """Yield a path to write a file at; the file appears under its own at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def whole(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file to write; it appears at the end, with `mode` less the process's umask."""
    opener = partial(os.open, mode=mode)
    with whole_path(path) as unfinished, open(unfinished, "wb", opener=opener) as file:
        yield file


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Write files and folders that only their owner can read, here and in processes started."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def claimed(folder: Path, name: str, *, seconds: float = 0.0) -> Iterator[None]:
    """Keep others from working in a folder under a name: BlockingIOError if one does so long."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f".{name}.lock", timeout=seconds):
            yield
    except Timeout:
        raise BlockingIOError(
            f"another process is at work in {folder}; wait for it, or choose another folder"
        ) from None
