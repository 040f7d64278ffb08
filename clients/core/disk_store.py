"""A folder in which a client keeps arrays from one message to the next.

Flower makes a client anew for every message, and a node's ``context.state`` travels with every
message in a simulation, which large arrays must not.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import require_disk
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.npy import from_npy
from fedntk.ntk.support.arrays import ArrayDict, Arrays
from fedntk.ntk.support.files import whole, whole_path

from .adapter import CLIENT_ID

logger = getLogger("flwr")
STALE = 24 * 3600  # seconds after which another run's folder counts as left behind
KEPT = 20  # of the newest rounds that a client took part in: a run may go on from any of them
KEPT_BYTES = 64 * 2**20  # limit of these together; the newest two stay in any case
PREFIX = "array "  # before names of arrays, which are keyword arguments of numpy's
# what the system says of a file that may be as good as it was
TRANSIENT_ERRORS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def cache_dir() -> Path:
    """Folder for what can be made again: ``fedntk`` in $XDG_CACHE_HOME or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedntk"


def client_folder(cache: str | os.PathLike[str] | None, kind: str, run: str, client: str) -> Path:
    """Return the folder of what a client keeps in a run, by default in ``cache_dir() / kind``."""
    parent = cache_dir() / kind if cache is None else Path(cache)
    run, client = (re.sub(r"\W+", "-", name)[:64] for name in (run, client))
    return parent / f"client-{client}" / f"run-{run}"


def client_name(config: Mapping[str, Any], seed: Sequence[int]) -> str:
    """Name a client by its id in the federation; by its seed if client_app did not tell one."""
    return str(config.get(CLIENT_ID, "-".join(map(str, seed))))


def make_folder(folder: Path) -> Path:
    """Make a client's folder of a run, for its owner only, unless it is there.

    With a new one the client's folders of other runs go that nobody has used for a day.
    """
    if folder.exists():
        return folder
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in folder.parent.glob("run-*/"):
        with contextlib.suppress(FileNotFoundError):
            key = other / "key.json"  # is touched when the folder is used
            used = (key if key.exists() else other).stat().st_mtime
            if other != folder and time.time() - used > STALE:
                logger.info("removed %s, which no run has used for a day", other)
                shutil.rmtree(other, ignore_errors=True)
    return folder


def data_digest(*tensors: Tensor) -> str:
    """Return a checksum of tensors: clients with the same one have the same examples."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def example_digests(x: Tensor, targets: Tensor) -> NDArray[np.uint64]:
    """Return a checksum of each example and its target, shape (n, 2): they tell examples apart."""
    inputs, labels = (t.detach().cpu().contiguous().numpy() for t in (x, targets))
    kind = f"{inputs.dtype} {inputs.shape[1:]} {labels.dtype}".encode()
    rows = (
        hashlib.blake2b(row.tobytes() + label.tobytes(), digest_size=16, key=kind[:64]).digest()
        for row, label in zip(inputs, labels, strict=True)
    )
    return np.frombuffer(b"".join(rows), np.uint64).reshape(len(inputs), 2)


class DiskStore:
    """Arrays in files, which appear whole or not at all; a damaged one counts as missing.

    The `folder`, the client's own, is emptied when another `key` comes, which JSON holds. `cure`
    says in errors what to do if the disk is too small.
    """

    def __init__(self, folder: Path, key: object, *, cure: str = "") -> None:
        self.folder, self._cure = folder, cure
        key_file, expected = folder / "key.json", json.dumps(key).encode()
        if not key_file.exists() or key_file.read_bytes() != expected:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)
            key_file.write_bytes(expected)
        os.utime(key_file)  # when the folder was last used

    def save(self, name: str, **arrays: NDArray[Any]) -> None:
        """Keep some arrays under a name."""
        with whole(self.folder / f"{name}.npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def load(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the arrays kept under a name; none if they are missing or damaged."""
        path = self.folder / f"{name}.npz"
        with _remove_damaged(path), zipfile.ZipFile(path) as saved:
            names = saved.namelist()
            return {n.removesuffix(".npy"): from_npy(saved.read(n)).copy() for n in names}
        return {}

    def mapped(self, name: str, shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Map one large array into memory; None if it is missing, damaged or of another shape."""
        path = self.folder / f"{name}.npy"
        with _remove_damaged(path):
            array: NDArray[Any] = np.load(path, mmap_mode="c")
            return array if array.shape == shape else None
        return None

    @contextlib.contextmanager
    def fill(
        self, name: str, shape: tuple[int, ...], dtype: str, *, what: str
    ) -> Iterator[NDArray[Any]]:
        """Make one large array to fill and keep; NotEnoughMemory if the disk is too small."""
        needed = math.prod(shape) * np.dtype(dtype).itemsize
        require_disk(needed, what, self.folder, cure=self._cure)
        with whole_path(self.folder / f"{name}.npy") as partial:
            stored = np.lib.format.open_memmap(partial, "w+", np.dtype(dtype), shape)
            yield stored
            stored.flush()

    def names(self, pattern: str = "*") -> list[str]:
        """Return the sorted names of what is kept that match a pattern of the shell's."""
        return sorted(p.stem for p in self.folder.glob(pattern) if p.suffix in (".npz", ".npy"))

    def remove(self, *, all_but: Collection[str] = (), pattern: str = "*") -> None:
        """Remove what matches a pattern, except some names."""
        for path in self.folder.glob(pattern):
            if path.name != "key.json" and path.stem not in all_but:
                path.unlink()


class PersonalStore:
    """A folder with the arrays that one client keeps in one run, by round, whole or missing.

    Those of the newest 20 rounds stay, as long as they take no more than 64 MiB, and those of the
    newest two in any case: so a run that was cut off goes on from its checkpoint to the same bits.
    A message's `config` names run and client; without a client's id, the `seed` names it. `what`
    tells a client's stores apart.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None,
        config: Mapping[str, Any],
        seed: Sequence[int] = (),
        what: str = "",
    ) -> None:
        run, client = str(config.get(wire.RUN, "")), client_name(config, seed) + what
        self.folder = client_folder(cache, "personal", run, client)

    def load(self, server_round: int) -> ArrayDict | None:
        """Return what was kept in a round; None if it is missing or damaged."""
        if not self.folder.exists():
            return None
        saved = self._disk().load(_file(server_round))
        return {name.removeprefix(PREFIX): array for name, array in saved.items()} or None

    def save(self, server_round: int, arrays: Arrays, *, needed: int = 0) -> None:
        """Keep arrays of a round; those of `needed` stay, as the new ones may be refused."""
        make_folder(self.folder)
        disk, plain = self._disk(), {PREFIX + n: np.asarray(a) for n, a in arrays.items()}
        disk.save(_file(server_round), **plain)
        size = sum(array.nbytes for array in plain.values())
        count = max(2, min(KEPT, KEPT_BYTES // max(size, 1)))
        # later rounds are run again
        rounds = [name for name in disk.names("round-*") if name <= _file(server_round)]
        disk.remove(all_but=[*rounds[-count:], _file(needed)], pattern="round-*")

    def _disk(self) -> DiskStore:
        return DiskStore(self.folder, "personal")


def _file(server_round: int) -> str:
    return f"round-{server_round:08}"


@contextlib.contextmanager
def _remove_damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy has errors of nine kinds for a file that it did not write
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in TRANSIENT_ERRORS:
            raise
        path.unlink()
