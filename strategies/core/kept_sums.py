"""Each client's sums on the server's disk, from which to solve again without some clients."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedntk.ntk import require_disk

from .array_archive import ArrayArchive

Arrays = dict[str, NDArray[Any]]


class KeptSums:
    """What clients sent, in files of a folder for each run and client in `folder`.

    A checksum detects damaged files. Only :meth:`remove` removes them.
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

    def write(self, run: str, server_round: int, client: int, arrays: Arrays) -> None:
        """Keep the arrays of a client's sums, in place of those of an earlier round."""
        ArrayArchive(self._of(run, client)).save_whole(server_round, arrays)

    def read(self, run: str, clients: Sequence[int]) -> Iterator[Arrays]:
        """Yield the arrays of each client's sums, one client's in memory at a time."""
        for client in clients:
            if (found := ArrayArchive(self._of(run, client)).newest()) is None:
                raise ValueError(
                    f"sums: those of client {client} are not in {self.folder} any more, or are "
                    "damaged; the model cannot be solved with them: take that client out as well"
                )
            yield found

    def remove(self, run: str, client: int) -> None:
        """Remove the sums of a client, if they are there."""
        if (folder := self._of(run, client)).exists():
            shutil.rmtree(folder)

    def _of(self, run: str, client: int) -> Path:
        return self.folder / f"run-{run}" / f"client-{client}"


def clients_left(summed: Sequence[int], clients: Sequence[int]) -> list[int]:
    """Return the clients whose sums are left without some, in the order in which they add up."""
    if unknown := sorted(set(clients) - set(summed)):
        known, odd = (", ".join(map(str, clients[:10])) for clients in (summed, unknown))
        raise ValueError(f"clients: expected some of those in the model, {known}, got {odd}")
    left = [client for client in summed if client not in set(clients)]
    if not left:
        raise ValueError(f"clients: expected fewer than all {len(summed)}, got all of them")
    return left
