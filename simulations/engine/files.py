"""What killed processes left in a run's folder."""

from pathlib import Path

from fedntk.ntk.support.files import PARTIAL

__all__ = ["remove_partial"]


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left half written in a run's folder that is claimed."""
    for path in (*folder.glob(f"*{PARTIAL}"), *folder.glob(f"checkpoints/*{PARTIAL}")):
        path.unlink(missing_ok=True)
