"""What of a model stays with its client, from the round it was trained in to the next."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedntk.ntk.payloads import wire
from fedntk.ntk.support.arrays import ArrayDict, Arrays

from ..core.disk_store import DiskStore, cache_dir, client_folder, client_name, make_folder

KEPT = 20  # of the newest rounds that a client took part in: a run may go on from any of them
KEPT_BYTES = 64 * 2**20  # limit of these together; the newest two stay in any case
PREFIX = "array "  # before the names, which are keyword arguments of numpy's


class PersonalStore:
    """A folder with the arrays that one client keeps in one run, by round.

    Each round's are whole or missing. What was kept in the newest 20 rounds can be loaded, as
    long as it takes no more than 64 MiB, and that of the newest two in any case: so a run that was
    cut off goes on from its checkpoint to the same bits.

    The `cache` is of all clients on this machine: see :class:`PersonalClient`. A message's
    `config` names run and client; if it names no client, as it does not come through
    :func:`~fedntk.clients.client_app`, the `seed` does. `what` tells a client's stores apart.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None,
        config: Mapping[str, Any],
        seed: Sequence[int] = (),
        what: str = "",
    ) -> None:
        cache = cache_dir() / "personal" if cache is None else Path(cache)
        client = client_name(config, seed) + what
        self.folder = client_folder(cache, str(config.get(wire.RUN, "")), client)

    def load(self, server_round: int) -> ArrayDict | None:
        """Return what was kept in a round; None if it is missing or damaged."""
        if not self.folder.exists():
            return None
        saved = self._disk().load(_file(server_round))
        return {name.removeprefix(PREFIX): array for name, array in saved.items()} or None

    def save(self, server_round: int, arrays: Arrays, *, needed: int = 0) -> None:
        """Keep some arrays, under their names, as those of a round.

        Those of the round `needed` stay, however old: the new ones may yet be refused.
        """
        make_folder(self.folder)
        disk = self._disk()
        disk.save(_file(server_round), **{PREFIX + k: np.asarray(a) for k, a in arrays.items()})
        size = sum(np.asarray(a).nbytes for a in arrays.values())
        count = max(2, min(KEPT, KEPT_BYTES // max(size, 1)))
        # later rounds are run again
        rounds = [name for name in disk.names("round-*") if name <= _file(server_round)]
        disk.remove(all_but=[*rounds[-count:], _file(needed)], pattern="round-*")

    def _disk(self) -> DiskStore:
        return DiskStore(self.folder, "personal")


def _file(server_round: int) -> str:
    return f"round-{server_round:08}"
