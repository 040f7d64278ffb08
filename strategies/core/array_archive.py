"""Arrays in safetensors files that detect damage, and versions of a run's state.

A version's file holds the arrays that no file before it holds, and the state, in which a checksum
replaces each array. So what no longer changes is written once. When less than half of what the
files hold is needed, a version is written whole, and the others are removed.
"""

import contextlib
import hashlib
import json
import mmap
import weakref
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedntk.ntk.support.files import PARTIAL, DamagedFile, whole

logger = getLogger("flwr")
FORMAT = 4
KEPT = 2  # versions
SMALL = 2**12  # bytes: smaller arrays are in each version, so that no file is kept for them
ARRAY = "array of checksum"  # the only key of what stands for an array in a state
Arrays = dict[str, NDArray[Any]]
Places = dict[str, tuple[str, int]]  # checksum -> file and bytes
State = dict[str, Any]
T = TypeVar("T")


class OldFormat(ValueError):  # noqa: N818
    """A file that another version of fedntk wrote."""


class ArrayArchive:
    """Numbered versions of a state in a folder; one process at a time writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: Places = {}  # of the newest version
        self._checksums = Checksums()

    def save(self, number: int, state: Mapping[str, Any]) -> None:
        """Write what changed since the last version; keep that one, and remove older ones.

        Versions' numbers grow. The state is values of JSON, and arrays, in dictionaries and lists.
        """
        text, arrays = self._encode(state)
        known = {d: p for d, p in self._places.items() if d in arrays and p[1] >= SMALL}
        paths = {name: self.folder / name for name, _ in known.values()}
        sizes = {name: p.stat().st_size if p.exists() else 0 for name, p in paths.items()}
        known = {d: place for d, place in known.items() if sizes[place[0]]}
        if sum(sizes.values()) > 2 * sum(nbytes for _, nbytes in known.values()) + 2**16:
            known = {}
        self._write(number, text, arrays, known, kept=KEPT)

    def save_whole(self, number: int, state: Mapping[str, Any]) -> None:
        """Write a version with all its arrays in one file, and remove all others."""
        self._write(number, *self._encode(state), {}, kept=1)

    def newest(self) -> State | None:
        """Read the newest version that is whole, with a warning for each that is not."""
        for path in self._files():
            try:
                return self._load(path)
            except (DamagedFile, FileNotFoundError) as error:
                logger.warning("%s; going back to what was saved before it", error)
        return None

    def remove_partial(self) -> None:
        """Remove what killed processes left half written."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def _encode(self, state: Mapping[str, Any]) -> tuple[str, Arrays]:
        arrays: Arrays = {}

        def reference(value: object) -> dict[str, str]:
            if not isinstance(value, np.ndarray):
                raise TypeError(f"expected what JSON holds, or an array, got {value!r}")
            array = np.asarray(value, order="C")
            digest = self._checksums.of(array)
            arrays[digest] = array
            return {ARRAY: digest}

        return json.dumps(state, default=reference), arrays

    def _write(self, number: int, text: str, arrays: Arrays, known: Places, *, kept: int) -> None:
        path = self.folder / f"round-{number:06}.safetensors"
        new = {digest: array for digest, array in arrays.items() if digest not in known}
        self._places = known | {digest: (path.name, array.nbytes) for digest, array in new.items()}
        _write_described(path, new, {"places": self._places, "state": text})
        self._remove_all_but(kept)

    def _load(self, path: Path) -> State:
        described = _read_described(path)
        places: Places = described["places"]
        found: Arrays = {}
        for file in {file for file, _ in places.values()}:
            own = {digest: digest for digest, place in places.items() if place[0] == file}
            found |= _read_arrays(self.folder / file, own)
        self._places = places

        def decode(value: State) -> Any:
            return found[value[ARRAY]] if value.keys() == {ARRAY} else value

        state: State = json.loads(described["state"], object_hook=decode)
        return state

    def _files(self) -> list[Path]:
        """All versions, newest first."""
        return sorted(self.folder.glob("round-*.safetensors"), reverse=True)

    def _remove_all_but(self, count: int) -> None:
        """Remove all files but the newest versions and what these need."""
        files = self._files()
        kept = {path.name for path in files[:count]}
        for path in files[:count]:
            with contextlib.suppress(DamagedFile, OldFormat):  # no run will go on from such a file
                kept |= {name for name, _ in _read_described(path)["places"].values()}
        for path in files[count:]:
            if path.name not in kept:
                path.unlink(missing_ok=True)


def checksum(*arrays: NDArray[Any]) -> str:
    """SHA-256 of arrays' dtypes, shapes and numbers."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Checksums:
    """Checksums of arrays, computed once for each object that cannot be written to.

    So a server does not read again what it holds for each client and did not change in a round.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[NDArray[Any]], str]] = {}

    def of(self, array: NDArray[Any]) -> str:
        """Return :func:`checksum` of an array."""
        if not _is_fixed(array):
            return checksum(array)
        reference, digest = self._known.get(id(array), (None, ""))
        if reference is None or reference() is not array:
            digest, key = checksum(array), id(array)
            forget = weakref.ref(array, lambda _: self._known.pop(key, None))
            self._known[key] = (forget, digest)
        return digest


def _is_fixed(array: Any) -> bool:
    """Whether neither an array nor what it is a view of can be written to."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        array = array.base
    return array is None or isinstance(array, bytes | mmap.mmap)


def under(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values whose names begin with a prefix, under the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def save_tensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], content: Mapping[str, Any] | None = None
) -> None:
    """Write arrays in their order, and a `content` of JSON, whole or not at all, with checksums."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    checksums = {name: checksum(array) for name, array in arrays.items()}
    _write_described(path, arrays, {"checksums": checksums, "content": content or {}})


def load_tensors(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: the arrays in their order, and the content.

    Raises DamagedFile if the file is not as it was written, FileNotFoundError if there is none.
    """
    described = _read_described(path)
    return _read_arrays(path, described["checksums"]), described["content"]


def _write_described(path: Path, arrays: Arrays, description: Mapping[str, Any]) -> None:
    text = json.dumps(description)
    digest = hashlib.sha256(text.encode()).hexdigest()
    described = {"format": FORMAT, "sha256": digest, "text": text}
    with whole(path) as file:  # one entry of metadata: safetensors puts several in any order
        file.write(save(arrays, {"fedntk": json.dumps(described)}))


def _read_described(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            found = json.loads((file.metadata() or {})["fedntk"])
        version, digest, text = (found.get(key) for key in ("format", "sha256", "text"))
        if version != FORMAT:
            raise OldFormat(f"{path} is of another version of fedntk, which this one cannot read")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    except (OldFormat, DamagedFile):
        raise
    except (SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    description: dict[str, Any] = json.loads(text)
    return description


def _read_arrays(path: Path, checksums: Mapping[str, str]) -> Arrays:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in checksums}
    except (SafetensorError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    for name, array in arrays.items():
        if checksum(array) != checksums[name]:
            raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    return arrays
