"""Safetensors files that detect damage, and the newest states of a run.

A file's only entry of metadata is JSON: format, digest and content. The digest is the SHA-256 of
the content and of all arrays, and is checked on reading.
"""

import hashlib
import json
import os
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
FORMAT = 5
OWNERS = 0o600  # mode of files that only their owner can read
CONTENT = "state"  # the array that holds a state's JSON
ARRAY = "array named"  # the only key of what stands for an array in that JSON
Arrays = dict[str, NDArray[Any]]
State = dict[str, Any]
T = TypeVar("T")


class OldFormat(ValueError):  # noqa: N818
    """A file that another version of fedntk wrote."""


class ArrayArchive:
    """States of one run in a folder, each in one file; one process at a time writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, number: int, state: Mapping[str, Any], *, keep: int = 2) -> None:
        """Write a state, of JSON's values and arrays, under a growing number; remove old ones."""
        arrays: Arrays = {}

        def reference(value: object) -> dict[str, str]:
            if not isinstance(value, np.ndarray):
                raise TypeError(f"expected what JSON holds, or an array, got {value!r}")
            name = str(len(arrays))
            arrays[name] = value
            return {ARRAY: name}

        text = json.dumps(state, default=reference)
        arrays[CONTENT] = np.frombuffer(text.encode(), np.uint8)
        save_tensors(self.folder / f"round-{number:06}.safetensors", arrays, mode=OWNERS)
        for path in self._files()[keep:]:
            path.unlink(missing_ok=True)

    def newest(self) -> State | None:
        """Read the newest state that is whole, with a warning for each that is not."""
        for path in self._files():
            try:
                return _load_state(path)
            except (DamagedFile, FileNotFoundError) as error:
                logger.warning("%s; going back to what was saved before it", error)
        return None

    def remove_partial(self) -> None:
        """Remove what killed processes left half written."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"), reverse=True)


def _load_state(path: Path) -> State:
    arrays, _ = load_tensors(path)

    def decode(value: State) -> Any:
        return arrays[value[ARRAY]] if value.keys() == {ARRAY} else value

    state: State = json.loads(arrays[CONTENT].tobytes(), object_hook=decode)
    return state


def checksum(*arrays: NDArray[Any]) -> str:
    """SHA-256 of arrays' dtypes, shapes and numbers."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def under(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values whose names begin with a prefix, under the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def save_tensors(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    content: Mapping[str, Any] | None = None,
    *,
    mode: int = 0o666,
) -> None:
    """Write arrays in their order, and a `content` of JSON, to the disk, whole or not at all."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    text = json.dumps({"names": list(arrays), "content": content or {}})
    header = {"format": FORMAT, "sha256": _digest(text, arrays), "text": text}
    # one entry of metadata: safetensors puts several in any order
    data = save(arrays, {"fedntk": json.dumps(header)})
    with whole(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load_tensors(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Read what was saved: arrays in their order, and the content; DamagedFile if it changed."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["fedntk"])
            if header["format"] != FORMAT:
                raise OldFormat(
                    f"{path} is of another version of fedntk, which this one cannot read"
                )
            described = json.loads(header["text"])
            arrays = {name: file.get_tensor(name) for name in described["names"]}
            is_whole = _digest(header["text"], arrays) == header["sha256"]
    except OldFormat:
        raise
    except (SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    if not is_whole:
        raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    content: dict[str, Any] = described["content"]
    return arrays, content


def _digest(text: str, arrays: Arrays) -> str:
    return checksum(np.frombuffer(text.encode(), np.uint8), *arrays.values())
