"""Each client's sums, kept by the server, so that a client can be taken out of the model exactly.

Beyond the papers: a model that is a function of sums over the clients is, without a client's sums,
exactly the model of a run that never had that client.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from fedntk.ntk import NotEnoughMemory, require_disk
from fedntk.ntk.options import Declared, argument, state
from fedntk.ntk.support.files import DamagedFile

from .array_archive import OWNERS, load_tensors, save_tensors
from .sums import FeatureSums, Sums

logger = getLogger("flwr")
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class SumsOnDisk(Mapping[int, T]):
    """What some clients sent in a run, each read by `parse` from its file when asked for."""

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


class KeptSums(Declared):
    """Each client's sums on the server's disk.

    A strategy with :class:`.FeatureSums` calls :meth:`attach` when it is made and :meth:`keep` with
    what it solves from; it sets `summed` to ``()`` before it asks for sums anew. Its ``without``
    solves from :meth:`without`.

    Attributes
    ----------
    summed : tuple of int
        Clients whose kept sums make up the solution.
    """

    folder: str | Path = argument(
        "folder on the server's disk in which each client's sums are kept, as many bytes as it "
        "sent; each run has a folder in it, which nothing removes",
        kw_only=False,
    )
    summed: tuple[int, ...] = state(tuple)
    sums: FeatureSums = state(lambda: None, saved=False, reset=False)

    def attach(self, sums: FeatureSums) -> None:
        """Say what is kept."""
        self.sums = sums

    @property
    def run_folder(self) -> Path:
        """Where this run's sums are kept."""
        return Path(self.folder) / f"run-{self.sums.run_key}"

    def of(self, clients: Sequence[int]) -> SumsOnDisk[Sums]:
        """Return the kept sums of clients."""
        return SumsOnDisk(self.run_folder, clients, self.sums.parse)

    def without(self, clients: Sequence[int], restored: Sequence[int] = ()) -> SumsOnDisk[Sums]:
        """Return the kept sums of all but some clients, and of those removed but `restored`."""
        if not self.summed:
            raise ValueError(
                f"storage: no sums were kept in {self.run_folder} by this run yet; they come with "
                "the round of sums, and the log says if the disk was too small"
            )
        kept = sorted({*self.summed, *restored})
        if unknown := sorted(set(clients) - set(kept)):
            expected, got = (", ".join(map(str, ids[:10])) for ids in (kept, unknown))
            raise ValueError(f"clients: expected some of those in the model, {expected}, got {got}")
        left = [client for client in kept if client not in set(clients)]
        if not left:
            raise ValueError(f"clients: expected fewer than all {len(kept)}, got all of them")
        return self.of(left)

    def require_disk(self, num_clients: int) -> None:
        """Raise NotEnoughMemory if the sums of so many clients could not be kept."""
        require_disk(
            self.sums.upload_bytes() * num_clients,
            f"the sums of {num_clients} clients",
            self.run_folder,
            cure="use fewer features, or set no storage",
        )

    def keep(self, sums: Mapping[int, Sums]) -> None:
        """Write clients' sums; a full disk is logged, and then none are kept."""
        kept = self.of((*self.summed, *sums))
        try:
            self.require_disk(len(sums))
            for client, part in sums.items():
                kept.write(client, self.sums.to_arrays(part))
        except (NotEnoughMemory, OSError) as error:
            logger.warning("the clients' sums are not kept: %s", error)
            with contextlib.suppress(OSError):
                kept.remove(kept)
            self.summed = ()
            return
        self.summed += tuple(sums)

    def drop(self, clients: Sequence[int]) -> None:
        """Note that the solution lacks some clients, whose sums stay on the disk."""
        self.summed = tuple(client for client in self.summed if client not in clients)

    def forget(self, clients: Sequence[int]) -> None:
        """Remove the sums of some clients, which `without` must leave out from then on."""
        self.of(clients).remove(clients)


def require_storage(storage: KeptSums | None) -> KeptSums:
    """Return where sums are kept; ValueError if they are not."""
    if storage is None:
        raise ValueError("storage: set KeptSums(folder) before the run; no sums were kept")
    return storage
