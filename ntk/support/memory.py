"""Refuse what cannot fit before allocating it."""

import contextlib
import functools
import os
import shutil
import time
from pathlib import Path
from typing import NoReturn

import torch

from ..errors import NotEnoughMemory


def available_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on `device`; on a CPU with reclaimable cache.

    On a CPU it may be up to 50 ms old: to ask takes longer than a small kernel.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _read_memory(int(20 * time.monotonic()))


@functools.lru_cache(maxsize=1)
def _read_memory(_: int) -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))


def require_memory(
    needed: int, what: str, *, device: torch.device | str = "cpu", cure: str = ""
) -> None:
    """Raise NotEnoughMemory unless `needed` bytes are available on `device`.

    `what` they are for starts the error's sentence, and the advice `cure` ends it.
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
