"""Refuse what cannot fit before allocating it."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import torch

from ..errors import NotEnoughMemory

__all__ = ["available_memory", "require_disk", "require_memory"]


def available_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on `device`.

    On a CPU this is the kernel's estimate of available memory, reclaimable cache included; on
    a GPU the free memory that the driver reports.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))


def require_memory(
    needed: int, what: str, *, device: torch.device | str = "cpu", cure: str = ""
) -> None:
    """Raise NotEnoughMemory unless `needed` bytes are available on `device`.

    Parameters
    ----------
    needed : int
        Bytes about to be allocated.
    what : str
        Their purpose; it starts the error's sentence.
    device : torch.device or str
        Device on which they are to be allocated.
    cure : str
        Advice; it ends the error's sentence.
    """
    available = available_memory(device)
    if needed > available:
        _refuse(f"{what} needs {needed / 1e9:.1f} GB and {device}", available, cure)


def require_disk(needed: int, what: str, folder: str | os.PathLike[str], *, cure: str = "") -> None:
    """Raise NotEnoughMemory unless a folder, which may not exist, has room on its disk."""
    folder = Path(folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        _refuse(f"{what} need {needed / 1e9:.1f} GB on disk and {folder}", free, cure)


def _refuse(sentence: str, available: int, cure: str) -> NoReturn:
    message = f"{sentence} has {available / 1e9:.1f} GB"
    raise NotEnoughMemory(f"{message}; {cure}" if cure else message)
