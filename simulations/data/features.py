"""Features of a frozen network, computed once and kept on disk."""

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from logging import getLogger
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from fedntk.clients import cache_dir
from fedntk.ntk.features.frozen import BATCH, FrozenPart

MOST_BYTES = 20 * 2**30  # bytes of all files
AT_ONCE = 16 * BATCH  # examples whose inputs are in memory
SECONDS = 3  # that may pass without a word

logger = getLogger("flwr")


def features_folder() -> Path:
    """Folder of features, which may be removed at any time: they are then computed anew."""
    return cache_dir() / "features"


class StoredFeatures:
    """Features (n, ...) of examples x (n, ...), each computed when it is first asked for.

    They are in a file of their owner's, which is named by the examples, by what `inputs` makes of
    them, and by the frozen network; a byte for each example after all features says whether they
    are there. The files that were used longest ago are removed when all have over `most` bytes.
    """

    def __init__(
        self,
        x: NDArray[Any],
        inputs: Callable[[NDArray[Any]], Tensor],
        frozen: FrozenPart,
        moments: bytes,
        *,
        most: int = MOST_BYTES,
    ) -> None:
        self.x, self.inputs, self.frozen, self.most = x, inputs, frozen, most
        digest = hashlib.sha256(repr((frozen.key, x.dtype.str, x.shape)).encode() + moments)
        digest.update(np.ascontiguousarray(x).data)
        self.path = features_folder() / f"{digest.hexdigest()[:32]}.f32"
        self.size = 4 * math.prod(frozen.shape)  # bytes of an example's
        self.fault = ""  # why there is no file
        if self.size * len(x) > most:
            self._leave_out(f"they have more than {most:,} bytes")

    def rows(self, chosen: NDArray[np.int64] | slice = slice(None)) -> Tensor:
        """Return the features of some of the examples, float32."""
        places = np.arange(len(self.x))[chosen]
        if not self.fault and len(self.x):
            try:
                with self._complete(places) as file:
                    shape = (len(self.x), *self.frozen.shape)
                    return torch.from_numpy(np.memmap(file, np.float32, "r", shape=shape)[places])
            except OSError as error:  # a full disk, or a folder of someone else's
                self._leave_out(f"{self.path} cannot be used: {error}")
        parts = [self._compute(part) for part in self._parts(places)]
        return torch.cat([torch.zeros(0, *self.frozen.shape), *parts])

    def compute(self, chosen: NDArray[np.int64]) -> None:
        """Write what is missing of some of the examples, if there can be a file."""
        if not self.fault:
            with contextlib.suppress(OSError), self._complete(chosen):
                return

    def _leave_out(self, fault: str) -> None:
        self.fault = fault
        logger.warning("Features are computed anew each time: %s", fault)

    @contextlib.contextmanager
    def _complete(self, places: NDArray[np.int64]) -> Iterator[BinaryIO]:
        """Yield the file with some of the examples' features, locked."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        end = self.size * len(self.x)
        with (
            FileLock(self.path.with_suffix(".lock"), mode=0o600),
            _open(self.path, end + len(self.x)) as file,
        ):
            file.seek(end)
            done = np.frombuffer(file.read(), np.uint8)
            missing = np.unique(places[done[places] == 0])
            for part in self._parts(missing):
                features = self._compute(part).numpy()
                for place, row in zip(part.tolist(), features, strict=True):
                    file.seek(self.size * place)
                    file.write(row.tobytes())
                file.flush()
                os.fsync(file.fileno())
                for place in part.tolist():
                    file.seek(end + place)
                    file.write(b"\1")
                file.flush()
            os.utime(file.fileno())
            yield file
        if len(missing):
            _remove_oldest(folder, self.most, but=self.path)

    def _parts(self, places: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        with tqdm(
            total=len(places), desc="features", unit="example", delay=SECONDS, disable=None
        ) as bar:
            for start in range(0, len(places), AT_ONCE):
                part = places[start : start + AT_ONCE]
                yield part
                bar.update(len(part))

    def _compute(self, part: NDArray[np.int64]) -> Tensor:
        return self.frozen(self.inputs(self.x[part]))


def _open(path: Path, size: int) -> BinaryIO:
    """Open a file of a size to read and write; if it is not there, or cut off, it has zeros."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    if os.fstat(file.fileno()).st_size != size:
        file.truncate(0)
        file.truncate(size)
    return file


def _remove_oldest(folder: Path, most: int, *, but: Path) -> None:
    """Remove the files that were used longest ago until all have at most so many bytes.

    Who reads one of them meanwhile has it open; the locks stay.
    """
    states: dict[Path, os.stat_result] = {}
    for path in folder.glob("*.f32"):
        with contextlib.suppress(FileNotFoundError):
            states[path] = path.stat()
    total = sum(state.st_blocks * 512 for state in states.values())
    for path in sorted(states, key=lambda path: states[path].st_mtime):
        if total <= most:
            return
        if path != but:
            total -= states[path].st_blocks * 512
            path.unlink(missing_ok=True)
