"""Each client's sums on the server's disk, from which TCT solves again without some clients.

Beyond Yu et al., NeurIPS 2022: with ``solve="statistics"`` the linear model is a function of sums
over the clients. Without a client's sums it is, exactly, the model of a run that never had that
client, on the same network.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedntk.ntk import require_disk

from ..core.array_archive import ArrayArchive

__all__ = ["KeptSums", "clients_left"]

STEPS = "steps"


class KeptSums:
    """What clients sent, in files: a folder for each run in it, and there one for each client.

    Files tell by a checksum when they are damaged. Nothing but :meth:`remove` removes them.

    Parameters
    ----------
    folder : Path
        Folder that is made when the first sums are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def require_disk(self, num_bytes: int, num_clients: int) -> None:
        """Raise NotEnoughMemory if so many bytes of each of some clients would not fit."""
        require_disk(
            num_bytes * num_clients,
            f"the sums of {num_clients} clients",
            self.folder,
            cure="lower num_features, or set no keep_sums",
        )

    def write(
        self, run: str, server_round: int, client: int, arrays: Sequence[NDArray[Any]]
    ) -> None:
        """Keep the arrays of a client's reply, in place of those of an earlier round."""
        archive = self._archive(run, f"client-{client}")
        archive.save_whole(server_round, {"arrays": list(arrays)})

    def read(self, run: str, clients: Sequence[int]) -> Iterator[list[NDArray[Any]]]:
        """Yield the arrays of each client's reply, one client's in memory at a time.

        Raises
        ------
        ValueError
            If a client's sums are missing or damaged.
        """
        for client in clients:
            found = self._archive(run, f"client-{client}").newest()
            if found is None:
                raise ValueError(
                    f"sums: those of client {client} are not in {self.folder} any more, or are "
                    "damaged; the model cannot be solved with them: take that client out as well"
                )
            yield found["arrays"]

    def write_steps(self, run: str, server_round: int, step: NDArray[Any]) -> None:
        """Keep the steps of the fixed-point numbers that were summed up."""
        self._archive(run, STEPS).save_whole(server_round, {"step": step})

    def steps(self, run: str) -> NDArray[Any]:
        """Return these steps; ValueError if they are missing or damaged."""
        found = self._archive(run, STEPS).newest()
        if found is None:
            raise ValueError(f"steps: not in {self.folder} any more, or damaged")
        step: NDArray[Any] = found["step"]
        return step

    def remove(self, run: str, client: int) -> None:
        """Remove the sums of a client, if they are there."""
        folder = self._of(run, f"client-{client}")
        for path in folder.glob("*"):
            path.unlink()
        if folder.exists():
            folder.rmdir()

    def _archive(self, run: str, name: str) -> ArrayArchive:
        return ArrayArchive(self._of(run, name))

    def _of(self, run: str, name: str) -> Path:
        return self.folder / f"run-{run}" / name


def clients_left(summed: Sequence[int], clients: Sequence[int]) -> list[int]:
    """Return the clients whose sums are left without some, in the order in which they add up."""
    if unknown := sorted(set(clients) - set(summed)):
        raise ValueError(
            f"clients: expected some of those in the model, {_listed(summed)}, got "
            f"{_listed(unknown)}"
        )
    left = [client for client in summed if client not in set(clients)]
    if not left:
        raise ValueError(f"clients: expected fewer than all {len(summed)}, got all of them")
    return left


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:10]))
    return shown + ", ..." * (len(clients) > 10)
