"""Each client's sums on the server's disk, from which to solve again without some clients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from fedntk.ntk.support.files import DamagedFile

from .array_archive import OWNERS, load_tensors, save_tensors

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class SumsOnDisk(Mapping[int, T]):
    """What some clients sent in a run, each read from its file in `folder` when asked for.

    A checksum detects damaged files. `parse` makes the sums of what :meth:`write` was given.
    """

    def __init__(self, folder: Path, clients: Sequence[int], parse: Callable[[Arrays], T]) -> None:
        self.folder, self.clients, self.parse = folder, clients, parse

    def __getitem__(self, client: int) -> T:
        try:
            arrays, _ = load_tensors(self._path(client))
        except (DamagedFile, FileNotFoundError) as error:
            raise ValueError(
                f"sums: those of client {client} are not in {self.folder} any more, or are "
                "damaged, and so lost; the model cannot be solved with them: take that client out "
                "as well"
            ) from error
        return self.parse(arrays)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def write(self, client: int, arrays: Arrays) -> None:
        """Keep the arrays of a client's sums, in place of those of an earlier round."""
        save_tensors(self._path(client), arrays, mode=OWNERS)

    def remove(self, clients: Iterable[int]) -> None:
        """Remove the sums of clients, if they are there."""
        for client in clients:
            self._path(client).unlink(missing_ok=True)

    def _path(self, client: int) -> Path:
        return self.folder / f"client-{client}.safetensors"


def clients_left(summed: Sequence[int], clients: Sequence[int]) -> list[int]:
    """Return the clients whose sums are left without some, in the order in which they add up."""
    if unknown := sorted(set(clients) - set(summed)):
        known, odd = (", ".join(map(str, clients[:10])) for clients in (summed, unknown))
        raise ValueError(f"clients: expected some of those in the model, {known}, got {odd}")
    left = [client for client in summed if client not in set(clients)]
    if not left:
        raise ValueError(f"clients: expected fewer than all {len(summed)}, got all of them")
    return left
