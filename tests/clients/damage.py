"""Ways in which a file goes bad."""

from pathlib import Path

WAYS = ("gone", "cut off", "empty", "garbage")


def damaged(path: Path, how: str) -> None:
    """Damage a file that is there."""
    content = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes(
            {"cut off": content[: len(content) // 2], "empty": b"", "garbage": b"garbage" * 99}[how]
        )
