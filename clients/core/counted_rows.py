"""Which rows of a data set count in models: some are deleted, others added, each by its digest.

What a client sends when they change is the difference of two sums over all that count, the old ones
as it sent them. So no row has to be there when it goes, and what stays is added up as in a run that
never had the others: to the bit, on the same machine.
"""

import hmac
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.payloads.row_change import RowChange
from fedntk.ntk.support.files import DamagedFile, claimed, whole_path
from fedntk.trust.sealing import write_secret

from .disk_store import DiskStore

DIGEST = 32  # bytes
NEWEST = 3  # rounds of which the sums are there: a run may go on from an older checkpoint
WAIT = 60.0  # seconds for another process at the same folder
CURE = "the rows that a run has counted can then no longer change; bring back a copy"


class CountedRows:
    """The rows of one data set that count, in a folder that only the owner's user reads.

    A row is an example and its label. Its name is a digest (HMAC-SHA256) under a secret in the
    folder, so that nobody else can look for a row. Equal rows count as often as they are there.

    The first exchange counts all rows that the client has. From then on only :meth:`delete`,
    :meth:`add` and :meth:`replace` change which count. The client's examples may hold more rows,
    and must hold those that count. The next round of a run with
    :class:`~fedntk.strategies.RowChanges` brings its model there. The folder also has the sums that
    each run counted last: without it these rows stay in the model for good.

    Examples are numbers (n, ...); floats are compared as float32. Labels are class numbers (n,) or
    (n, 1), or one-hot rows.

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
        """Have rows count no more; ValueError, and no change, unless each counts so often."""
        with self._changing() as counted:
            gone = Counter(self._digests(x, y))
            if missing := (gone - counted).total():
                raise ValueError(
                    f"rows: {missing} of {gone.total()} do not count, or not so often: they were "
                    "deleted before, or never added; nothing is deleted"
                )
            counted -= gone

    def add(self, x: Any, y: Any) -> None:
        """Have further rows count, each once more."""
        with self._changing() as counted:
            counted.update(self._digests(x, y))

    def replace(self, x: Any, y: Any) -> None:
        """Have exactly these rows count."""
        with self._changing() as counted:
            counted.clear()
            counted.update(self._digests(x, y))

    def select(self, x: Any, y: Any) -> tuple[Tensor, list[bytes]]:
        """Return where among these rows those are that count, in their order, and their digests.

        If none was ever counted, all are from now on. ValueError if some that count are not there.
        """
        left, places = self._read(), list[int]()
        if not self._path.exists():
            self.add(x, y)
            left = self._read()
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
        self, run: str, rounds: tuple[int, int], words: NDArray[np.uint64], digests: list[bytes]
    ) -> RowChange:
        """Return what takes a run from its last counted round, if any, to these sums, in a new one.

        `rounds` are the two, 0 for none; `words` and `digests` are of all rows that count now.
        """
        counted, now = rounds
        if not 0 <= counted < now:
            raise ValueError(f"counted_round: expected 0 ... {now - 1}, got {counted}")
        folder = self.folder / ("run-" + re.sub(r"\W+", "-", run)[:64])
        disk, rows = DiskStore(folder, "counted"), np.frombuffer(b"".join(digests), np.uint8)
        before: dict[str, NDArray[Any]] = {"words": np.zeros_like(words), "digests": rows[:0]}
        if counted and (before := disk.load(_file(counted))).keys() != {"words", "digests"}:
            raise ValueError(f"rows: {folder} lacks what round {counted} counted; {CURE}")
        if before["words"].shape != words.shape:
            raise ValueError(f"rows: round {counted} counted sums of another size")
        disk.save(_file(now), words=words, digests=rows)
        rounds_there = [name for name in disk.names("round-*") if name <= _file(now)]
        disk.remove(all_but=[*rounds_there[-NEWEST:], _file(counted)], pattern="round-*")
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
            if any(self.folder.glob("run-*")):
                raise DamagedFile(f"{self._path}: it is gone; {CURE}")
            return Counter()
        try:
            counted = json.loads(self._path.read_bytes())
            return Counter({bytes.fromhex(name): int(n) for name, n in counted.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise DamagedFile(f"{self._path}: damaged ({error}); {CURE}") from error

    @contextmanager
    def _changing(self) -> Iterator[Counter[bytes]]:
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
        if inputs.dtype.kind == "f":
            inputs = inputs.astype(np.float32) + np.float32(0)  # -0 is 0
        inputs = inputs.astype(np.float64)  # 1 is 1.0
        secret, kind = self._secret(), f"{inputs.shape[1:]} ".encode()
        pairs = zip(inputs, labels.tolist(), strict=True)
        return [hmac.digest(secret, kind + b"%d " % n + r.tobytes(), "sha256") for r, n in pairs]

    def _secret(self) -> bytes:
        path = self.folder / "secret"
        if not path.exists():
            if self._path.exists():
                raise DamagedFile(f"{path}: it is gone; {CURE}")
            with whole_path(path) as partial:
                write_secret(partial, secrets.token_bytes(DIGEST))
        return path.read_bytes()


def _file(server_round: int) -> str:
    return f"round-{server_round:08}"
