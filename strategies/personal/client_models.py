"""A model for each client on the server: in memory up to a budget, on disk beyond it."""

import tempfile
from collections.abc import Iterator, MutableMapping
from logging import getLogger

import numpy as np

from fedntk.ntk.support.arrays import ArrayDict, Arrays

from ..core.array_archive import under

logger = getLogger("flwr")


class ClientModels(MutableMapping[int, Arrays]):
    """Client -> its arrays, which are not changed in place.

    If they exceed the budget, those that were set longest ago become files, mapped into memory when
    they are read.
    """

    def __init__(self, budget: float = np.inf) -> None:
        self.budget = budget  # bytes of arrays in memory
        self._models: dict[int, Arrays] = {}
        self._in_memory: dict[int, int] = {}  # client -> bytes, in the order in which they came

    def __getitem__(self, client: int) -> Arrays:
        return self._models[client]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._models))

    def __len__(self) -> int:
        return len(self._models)

    def __setitem__(self, client: int, arrays: Arrays) -> None:
        self._in_memory.pop(client, None)
        self._models[client] = model = dict(arrays)
        for name, array in arrays.items():
            if array.flags.writeable:
                model[name] = array.copy()
                model[name].flags.writeable = False
        self._in_memory[client] = sum(array.nbytes for array in arrays.values())
        self.limit_to(self.budget)

    def limit_to(self, budget: float) -> None:
        """Keep at most `budget` bytes in memory from now on."""
        self.budget = budget
        while self._in_memory and self.bytes_in_memory > self.budget:
            oldest = next(iter(self._in_memory))
            try:
                self._write(oldest)
            except OSError as error:  # such as a full disk, which must not end a run
                logger.warning(
                    "clients' models stay in memory, beyond the budget (%s); make room, set "
                    "another TMPDIR, or raise ulimit -n",
                    error,
                )
                self.budget = np.inf

    def __delitem__(self, client: int) -> None:
        del self._models[client]
        self._in_memory.pop(client, None)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the arrays that are not on disk."""
        return sum(self._in_memory.values())

    def state_dict(self) -> ArrayDict:
        """Return all arrays, as ``<client>.<name>``; placeholders end with their nodes."""
        models = {client: model for client, model in self.items() if client >= 0}
        return {f"{client}.{n}": a for client, model in models.items() for n, a in model.items()}

    def load_state_dict(self, state: Arrays) -> None:
        """Add what :meth:`state_dict` returned."""
        for client in {int(name.partition(".")[0]) for name in state}:
            self[client] = under(f"{client}.", state)

    def _write(self, client: int) -> None:
        """Move a client's arrays into a file without a name, which no killed process leaves."""
        if len(self._in_memory) == len(self._models):
            logger.info("clients' models beyond %g bytes are kept on disk", self.budget)
        model = self._models[client]
        sizes = [16 * (array.nbytes // 16 + 1) for array in model.values()]  # aligned
        with tempfile.TemporaryFile(prefix="fedntk-models-") as file:
            for array, size in zip(model.values(), sizes, strict=True):
                file.write(array.tobytes().ljust(size))
            file.flush()
            mapped = np.split(np.memmap(file, np.uint8, "r"), np.cumsum(sizes)[:-1])
        self._models[client] = {
            name: np.asarray(part[: array.nbytes].view(array.dtype).reshape(array.shape))
            for part, (name, array) in zip(mapped, model.items(), strict=True)
        }
        del self._in_memory[client]
