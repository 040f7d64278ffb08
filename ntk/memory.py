"""Refuse what cannot fit before allocating it."""

import os

import torch

from .errors import NotEnoughMemory

__all__ = ["available_memory", "require_memory"]


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
