"""Which rows of a data set count in models: some are deleted, others added, each by its digest.

What a client sends when they change is the difference of two sums over all that count, the old ones
as it sent them. So no row has to be there when it goes, and what stays is added up as in a run that
never had the others: to the bit, on the same machine.
"""

import hmac
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk import require_disk
from fedntk.ntk.payloads.row_change import RowChange
from fedntk.ntk.support.files import DamagedFile, claimed, whole_path
from fedntk.trust.sealing import write_secret

from .disk_store import DiskStore

logger = getLogger("flwr")
DIGEST = 32  # bytes
NEWEST = 3  # rounds of which the sums are there: a run may go on from an older checkpoint
WAIT = 60.0  # seconds for another process at the same folder
CURE = (
    "bring back a copy; without one, remove the folder: rows that a run has counted can then no "
    "longer change in it"
)
NAME = re.compile(r"\d{8}-[0-9a-f]{16}")  # of a client's sums: round, and what the server drew


class CountedRows:
    """The rows of one data set that count, in a folder that only the owner's user reads.

    A row is an example and its label. Its name is a digest (HMAC-SHA256) under a secret in the
    folder, so that nobody else can look for a row. Equal rows count as often as they are there.

    The first exchange counts all rows that the client has. From then on only :meth:`delete`,
    :meth:`add` and :meth:`replace` change which count. The client's examples may hold more rows,
    and must hold those that count. The next round of a run with
    :class:`~fedntk.strategies.RowChanges` brings its model there. The folder also has the sums that
    each run counted last: without it these rows stay in the model for good.

    Examples are numbers (n, ...), the same ones if they are equal: 0.1 as float32 is another number
    than 0.1. Labels are class numbers (n,) or (n, 1), or one-hot rows.

    Examples
    --------
    >>> import tempfile
    >>> rows = CountedRows(tempfile.mkdtemp())
    >>> rows.replace([[1.0], [2.0], [2.0]], [0, 1, 1])
    >>> rows.delete([[2.0]], [1])
    >>> len(rows)
    2
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().resolve()

    def __len__(self) -> int:
        return sum(self._read().values())

    def delete(self, x: Any, y: Any) -> None:
        """Have rows count no more; ValueError, and no change, unless each counts so often.

        Of equal rows the last ones go.
        """
        with self._changing() as counted:
            gone = Counter(self._digests(x, y))
            if missing := (gone - counted).total():
                raise ValueError(
                    f"rows: {missing} of {gone.total()} do not count, or not so often: they were "
                    "deleted before, or never added; nothing is deleted"
                )
            counted -= gone

    def add(self, x: Any, y: Any) -> None:
        """Have further rows count, each once more; ValueError if none was ever counted."""
        with self._changing() as counted:
            counted.update(self._digests(x, y))

    def replace(self, x: Any, y: Any) -> None:
        """Have exactly these rows count."""
        with self._changing(first=True) as counted:
            counted.clear()
            counted.update(self._digests(x, y))

    def select(self, x: Any, y: Any) -> tuple[Tensor, list[bytes]]:
        """Return where among these rows those are that count, in their order, and their digests.

        If none was ever counted, all are from now on. ValueError if some that count are not there.
        """
        if not self._path.exists():
            with self._changing(first=True) as counted:
                if not self._path.exists():  # another process may have counted them
                    counted.update(self._digests(x, y))
        left, places = self._read(), list[int]()
        digests = self._digests(x, y)
        for place, digest in enumerate(digests):
            if left[digest]:
                left[digest] -= 1
                places.append(place)
        if missing := left.total():
            raise ValueError(
                f"rows: {missing} that count are not among this client's examples; bring them "
                "back, or have its owner call delete or replace of CountedRows"
            )
        return torch.tensor(places, dtype=torch.int64), [digests[place] for place in places]

    def change(
        self, run: str, names: tuple[str, str], words: NDArray[np.uint64], digests: list[bytes]
    ) -> RowChange:
        """Return what takes a run from the sums it counted last, if any, to these new ones.

        `names` are of both, "" for none; new ones are of one message. `words` and `digests` are of
        all rows that count now.
        """
        counted, new = names
        if not NAME.fullmatch(new) or not (NAME.fullmatch(counted) or counted == ""):
            raise ValueError(f"names: expected a round and 16 digits of each, got {names}")
        folder = self.folder / ("run-" + re.sub(r"\W+", "-", run)[:64])
        disk, rows = DiskStore(folder, "counted"), np.frombuffer(b"".join(digests), np.uint8)
        before: dict[str, NDArray[Any]] = {"words": np.zeros_like(words), "digests": rows[:0]}
        if counted and (before := disk.load(_file(counted))).keys() != {"words", "digests"}:
            raise ValueError(f"rows: {folder} lacks the sums {counted} that count; {CURE}")
        if before["words"].shape != words.shape:
            raise ValueError(f"rows: the sums {counted} are of another size")
        if _file(new) in disk.names():  # the server may count what was sent first
            raise ValueError(f"rows: the message of the sums {new} was answered before")
        stays = np.array_equal(before["words"], words) and np.array_equal(before["digests"], rows)
        if counted and stays:
            with suppress(OSError):  # not all disks have links
                os.link(*(folder / f"{_file(name)}.npz" for name in names))
        if _file(new) not in disk.names():
            require_disk(words.nbytes + rows.nbytes, "sums of the rows that count", folder)
            disk.save(_file(new), words=words, digests=rows)
        newest = disk.names("round-*")[-NEWEST:]
        disk.remove(all_but=[*newest, *map(_file, names)], pattern="round-*")
        data = before["digests"].tobytes()
        then = Counter(data[i : i + DIGEST] for i in range(0, len(data), DIGEST))
        there = Counter(digests)
        deleted, added = (then - there).total(), (there - then).total()
        return RowChange(words - before["words"], deleted, added)

    # ---------------------------------------------------------------------- the folder

    @property
    def _path(self) -> Path:
        return self.folder / "rows.json"

    def _read(self) -> Counter[bytes]:
        if not self._path.exists():
            if (self.folder / "secret").exists() or any(self.folder.glob("run-*")):
                raise DamagedFile(f"{self._path}: it is gone; {CURE}")
            return Counter()
        try:
            counted = json.loads(self._path.read_bytes())
            return Counter({bytes.fromhex(name): int(n) for name, n in counted.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise DamagedFile(f"{self._path}: damaged ({error}); {CURE}") from error

    @contextmanager
    def _changing(self, *, first: bool = False) -> Iterator[Counter[bytes]]:
        if not (first or self._path.exists()):
            self._read()
            raise ValueError(
                f"rows: none was counted yet in {self.folder}; call replace, or wait for the "
                "client's first exchange"
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with claimed(self.folder, "counted", seconds=WAIT):
            yield (counted := self._read())
            text = json.dumps({name.hex(): n for name, n in sorted(counted.items()) if n})
            with whole_path(self._path) as partial:
                write_secret(partial, text.encode())

    def _digests(self, x: Any, y: Any) -> list[bytes]:
        inputs, labels = (np.asarray(t.cpu() if isinstance(t, Tensor) else t) for t in (x, y))
        if labels.ndim == 2:
            labels = labels.argmax(1) if labels.shape[1] > 1 else labels[:, 0]
        whole = not labels.size or labels.dtype.kind in "biu"
        if inputs.dtype.kind not in "biuf" or inputs.ndim == 0 or not whole:
            raise ValueError(
                f"rows: expected numbers (n, ...) and whole numbers as labels, got "
                f"{inputs.dtype} of shape {inputs.shape} and {labels.dtype}"
            )
        if labels.shape != inputs.shape[:1]:
            raise ValueError(f"rows: expected {len(inputs)} labels, got the shape {labels.shape}")
        secret, kind = self._secret(), f"{inputs.shape[1:]} ".encode()
        pairs = zip(inputs, labels.tolist(), strict=True)
        return [hmac.digest(secret, kind + b"%d " % n + _bytes(r), "sha256") for r, n in pairs]

    def _secret(self) -> bytes:
        path = self.folder / "secret"
        if not path.exists():
            if self._path.exists():
                raise DamagedFile(f"{path}: it is gone; {CURE}")
            with whole_path(path) as partial:
                write_secret(partial, secrets.token_bytes(DIGEST))
        return path.read_bytes()


@contextmanager
def told_to_owner() -> Iterator[None]:
    """Log an error about rows here, and raise one that says nothing of them: the server reads it.

    Who deletes, and how many rows, is told by the total of a round only.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        logger.warning("%s", error)
        raise ValueError("rows: they cannot be counted; the log of this client says why") from None


def _file(name: str) -> str:
    return f"round-{name}"


def _bytes(row: NDArray[Any]) -> bytes:
    """Return the same bytes for the same numbers, whatever holds them, and for no others."""
    numbers, kind = row.astype(np.float64) + 0.0, row.dtype.kind  # 1 is 1.0, and -0 is 0
    if kind in "iu" and np.max(np.abs(numbers), initial=0) >= 2**53:  # float64 rounds these
        return kind.encode() + row.astype(f"{kind}8").tobytes()
    return numbers.tobytes()
