"""Files that appear whole or not at all."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["PARTIAL", "DamagedFile", "whole"]

PARTIAL = ".partial"  # ends the name of a file that is being written


class DamagedFile(ValueError):  # noqa: N818
    """A file that is cut off or altered."""


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
