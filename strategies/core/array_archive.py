"""Versions of a set of named arrays on disk; each file holds what changed since the one before.

A version is a safetensors file with the arrays that no file before it holds, and with a list of all
its arrays: for each its checksum and the file it is in. So what no longer changes is written once.
When less than half of what the files hold is needed, a version is written whole, and the others are
removed.
"""

import hashlib
import json
import mmap
import weakref
from collections.abc import Collection, Mapping
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedntk.ntk.support.files import PARTIAL, DamagedFile, whole

__all__ = ["ArrayArchive", "OldFormat", "Version", "checksum", "split_arrays", "under"]

logger = getLogger("flwr")
FORMAT = 3
KEPT = 2  # versions
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class OldFormat(ValueError):  # noqa: N818
    """A file that another version of fedntk wrote."""


class Version(NamedTuple):
    """What one file of an archive stands for: its arrays, and what was saved beside them."""

    arrays: Arrays
    content: dict[str, Any]


class ArrayArchive:
    """Numbered versions of named arrays in a folder; one process at a time writes them.

    Parameters
    ----------
    folder : Path
        Is made when the first version is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, _Place] = {}  # by checksum, of what the newest version needs
        self._names: dict[str, str] = {}  # name -> checksum, of the newest version
        self._checksums = Checksums()

    def save(
        self,
        number: int,
        arrays: Mapping[str, NDArray[Any]],
        content: Mapping[str, Any],
        *,
        unchanged: Collection[str] = (),
    ) -> None:
        """Write what changed since the last version; that one is kept, older ones are removed.

        Parameters
        ----------
        number : int
            Of the version, larger than those before.
        arrays : mapping of str to ndarray
            All, but for those that are `unchanged`.
        content : mapping
            What JSON holds, to be kept with them.
        unchanged : collection of str
            Names of the last version whose arrays this version has, too.
        """
        arrays = _contiguous(arrays)
        names = {name: self._checksums.of(array) for name, array in arrays.items()}
        names |= {name: self._names[name] for name in unchanged}
        there = {path for path in {place.path for place in self._places.values()} if path.exists()}
        known = {digest: place for digest, place in self._places.items() if place.path in there}
        needed = {digest: known[digest] for digest in names.values() if digest in known}
        stored = sum(path.stat().st_size for path in {place.path for place in needed.values()})
        if stored > 2 * sum(place.nbytes for place in needed.values()) + 2**16:
            for name in unchanged:  # what only files hold
                arrays[name] = _read(needed[names[name]].path, [names[name]])[names[name]]
            needed = {}
        self._write(number, names, arrays, content, needed)
        self._remove_all_but(KEPT)

    def save_whole(
        self, number: int, arrays: Mapping[str, NDArray[Any]], content: Mapping[str, Any]
    ) -> None:
        """Write a version with all its arrays in one file, and remove all others."""
        arrays = _contiguous(arrays)
        names = {name: self._checksums.of(array) for name, array in arrays.items()}
        self._write(number, names, arrays, content, {})
        self._remove_all_but(1)

    def _write(
        self,
        number: int,
        names: Mapping[str, str],
        arrays: Arrays,
        content: Mapping[str, Any],
        needed: Mapping[str, "_Place"],
    ) -> None:
        manifest = {
            "format": FORMAT,
            "names": dict(names),
            "files": {digest: [place.path.name, place.nbytes] for digest, place in needed.items()},
            "content": dict(content),
        }
        text = json.dumps(manifest)
        described = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
        new = {names[name]: array for name, array in arrays.items() if names[name] not in needed}
        path = self.folder / f"round-{number:06}.safetensors"
        with whole(path) as file:
            file.write(save(new, {"fedntk": json.dumps(described)}))
        own = {digest: _Place(path, array.nbytes) for digest, array in new.items()}
        self._places, self._names = {**needed, **own}, dict(names)

    def read(self, names: Collection[str]) -> Arrays:
        """Read some arrays of the newest version.

        Raises
        ------
        DamagedFile
            If a file is not as it was written.
        """
        digests = {name: self._names[name] for name in names}
        return {name: _read(self._places[d].path, [d])[d] for name, d in digests.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of the newest version."""
        return tuple(self._names)

    def newest(self) -> Version | None:
        """Read the newest version that is whole, with a warning for each that is not.

        Raises
        ------
        OldFormat
            If another version of fedntk has written it.
        """
        for path in self._files():
            try:
                return self._load(path)
            except (DamagedFile, FileNotFoundError) as error:
                logger.log(WARNING, "%s; going back to what was saved before it", error)
        return None

    def _load(self, path: Path) -> Version:
        manifest = _manifest(path)
        names: dict[str, str] = manifest["names"]
        elsewhere = {
            digest: _Place(self.folder / name, nbytes)
            for digest, (name, nbytes) in manifest["files"].items()
        }
        by_file: dict[Path, list[str]] = {}
        for digest in dict.fromkeys(names.values()):
            place = elsewhere.get(digest)
            by_file.setdefault(place.path if place else path, []).append(digest)
        found: Arrays = {}
        for file, digests in by_file.items():
            found |= _read(file, digests)
        self._names = names
        self._places = {
            digest: elsewhere.get(digest, _Place(path, array.nbytes))
            for digest, array in found.items()
        }
        return Version({name: found[d] for name, d in names.items()}, manifest["content"])

    def _files(self) -> list[Path]:
        """All versions, newest first."""
        return sorted(self.folder.glob("round-*.safetensors"), reverse=True)

    def _remove_all_but(self, count: int) -> None:
        """Remove all files but the newest versions and what these need."""
        files = self._files()
        kept = {path.name for path in files[:count]}
        for path in files[:count]:
            try:
                kept |= {name for name, _ in _manifest(path)["files"].values()}
            except (DamagedFile, OldFormat):
                continue  # it will not be gone on from
        for path in files[count:]:
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def remove_partial(self) -> None:
        """Remove what killed processes left half written."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)


class _Place(NamedTuple):
    """Where an array is, and how large it is."""

    path: Path
    nbytes: int


def checksum(array: NDArray[Any]) -> str:
    """SHA-256 of an array's dtype, shape and numbers."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.data)
    return digest.hexdigest()


class Checksums:
    """Checksums of arrays, formed once for each object that nobody can change.

    So what a server holds for each client, and did not change in a round, is not read again.
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


def split_arrays(prefix: str, values: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays among some values, a prefix before their names, and the others."""
    arrays = {prefix + n: v for n, v in values.items() if isinstance(v, np.ndarray)}
    return arrays, {n: v for n, v in values.items() if not isinstance(v, np.ndarray)}


def _contiguous(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _manifest(path: Path) -> dict[str, Any]:
    """Read what a file says of its version, and check that it is as it was written."""
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {})["fedntk"])
        if described.get("manifest", {}).get("format") != FORMAT:
            raise OldFormat(
                f"{path} is a checkpoint of another version of fedntk, which this one cannot go on "
                "from"
            )
        manifest: dict[str, Any] = described["manifest"]
        expected = described["sha256"]
    except OldFormat:
        raise
    except (SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    if hashlib.sha256(json.dumps(manifest).encode()).hexdigest() != expected:
        raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    return manifest


def _read(path: Path, checksums: list[str]) -> Arrays:
    """Read arrays by their checksums, and check these."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {digest: file.get_tensor(digest) for digest in checksums}
    except (SafetensorError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    for digest, array in arrays.items():
        if checksum(array) != digest:
            raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    return arrays
