"""Folders in which one process at a time works, and what killed ones left there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedntk.strategies.files import PARTIAL

__all__ = ["claimed", "remove_partial"]


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


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left half written in a run's folder that is claimed."""
    for path in (*folder.glob(f"*{PARTIAL}"), *folder.glob(f"checkpoints/*{PARTIAL}")):
        path.unlink(missing_ok=True)
