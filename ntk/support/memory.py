"""Refuse what cannot fit before allocating it."""

import os
import shutil
from pathlib import Path

import torch

from ..errors import NotEnoughMemory

__all__ = ["available_memory", "require_disk", "require_memory"]


def available_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on `device`.

    Parameters
    ----------
    device : torch.device or str
        On a CPU this is the kernel's estimate of available memory, cache that it can give back
        included; on a GPU the free memory that the driver reports.

    Returns
    -------
    int
        Number of bytes.
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
    """Raise unless `needed` bytes are available on `device`.

    Parameters
    ----------
    needed : int
        Number of bytes about to be allocated.
    what : str
        What they are for; it starts the error's sentence.
    device : torch.device or str
        Where they are to be allocated.
    cure : str
        What to do instead; it ends the error's sentence.

    Raises
    ------
    NotEnoughMemory
        With the needed and the available size in GB.
    """
    available = available_memory(device)
    if needed > available:
        message = f"{what} needs {needed / 1e9:.1f} GB and {device} has {available / 1e9:.1f} GB"
        raise NotEnoughMemory(f"{message}; {cure}" if cure else message)


def require_disk(needed: int, what: str, folder: str | os.PathLike[str], *, cure: str = "") -> None:
    """Raise unless `needed` bytes are free on the disk of `folder`, which need not be there yet.

    Raises
    ------
    NotEnoughMemory
        With the needed and the available size in GB; `what` and `cure` as in
        :func:`require_memory`.
    """
    folder = Path(folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        message = f"{what} need {needed / 1e9:.1f} GB on disk and {folder} has {free / 1e9:.1f} GB"
        raise NotEnoughMemory(f"{message}; {cure}" if cure else message)
