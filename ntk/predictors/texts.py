"""Texts as examples: UTF-8 in an array of bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 2048  # bytes of a text that are read


def are_texts(x: Any) -> bool:
    """Whether examples are texts (n,) or (n, 1): a list, a series or an array with one."""
    if isinstance(x, list | tuple):
        return bool(x) and isinstance(x[0], str | bytes)
    kind = getattr(getattr(x, "dtype", None), "kind", "")
    if kind not in "SUTO" or not kind or x.shape[1:] not in ((), (1,)):
        return False
    return kind != "O" or any(isinstance(text, str) for text in np.asarray(x).flat)


def encode_texts(texts: Any) -> NDArray[np.bytes_]:
    """Return texts (n,) or (n, 1) as UTF-8 (n,), dtype S, of each the first `LONGEST` bytes.

    ValueError if one is no text. Bytes stay as they are.
    """
    rows = np.asarray([texts] if isinstance(texts, str) else texts, object)
    if rows.shape[1:] not in ((), (1,)):
        raise ValueError(f"expected one text for each example, got an array of shape {rows.shape}")
    encoded = []
    for i, text in enumerate(rows.flat):
        if not isinstance(text, str | bytes):
            raise ValueError(
                f"expected texts, got {type(text).__name__} at position {i}; leave out examples "
                "without a text"
            )
        raw = text if isinstance(text, bytes) else text.replace("\0", " ").encode(errors="replace")
        encoded.append(raw[:LONGEST])
    return np.array(encoded, np.bytes_)


def as_bytes(texts: NDArray[np.bytes_]) -> NDArray[np.uint8]:
    """Return encoded texts (n,) as rows of bytes (n, length): zeros follow each text."""
    rows: NDArray[np.uint8] = np.ascontiguousarray(texts).view(np.uint8)
    return rows.reshape(len(texts), texts.itemsize)


def decode_bytes(rows: NDArray[np.uint8]) -> list[str]:
    """Return the texts of rows of bytes (n, length), without a character that was cut off."""
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]
