"""Arrays in a safetensors file that tells when it is damaged."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedntk.ntk.support.files import DamagedFile, whole

__all__ = ["load_tensors", "save_tensors"]


def save_tensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], content: Mapping[str, Any] | None = None
) -> None:
    """Write arrays, whole or not at all, with a checksum in the file's metadata.

    Parameters
    ----------
    path : Path
        To write.
    tensors : dict of str to ndarray
        Their order is kept.
    content : dict, optional
        What JSON holds, to be kept in the metadata.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    text = json.dumps({"order": list(arrays), "content": content or {}})
    described = {"sha256": _checksum(arrays, text), "text": text}
    with whole(path) as file:  # one entry of metadata: safetensors puts several in any order
        file.write(save(arrays, {"fedntk": json.dumps(described)}))


def load_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: the arrays in their order, and the content.

    Raises
    ------
    DamagedFile
        If the file is not as it was written.
    FileNotFoundError
        If there is none.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            found = json.loads((file.metadata() or {})["fedntk"])
            checksum, text = found["sha256"], found["text"]
            described = json.loads(text)
            arrays = {name: file.get_tensor(name) for name in described["order"]}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    if checksum != _checksum(arrays, text):
        raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    return arrays, described["content"]


def _checksum(arrays: Mapping[str, NDArray[Any]], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()
