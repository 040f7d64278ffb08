"""What travels between a strategy and the trust servers: addresses, and how bytes are packed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedntk.ntk.payloads.npy import from_npy, to_npy
from fedntk.ntk.support.arrays import ArrayDict, Arrays

from .sealing import SealError

SEALED_SEED, VOUCHER, SHUFFLE = "/sealed-seed", "/voucher", "/shuffle"
LENGTH_BYTES = 8


def frame(parts: Iterable[bytes]) -> bytes:
    """Join byte strings, each after its length."""
    return b"".join(
        piece for part in parts for piece in (len(part).to_bytes(LENGTH_BYTES, "little"), part)
    )


def unframe(data: bytes) -> list[bytes]:
    """Part what :func:`frame` joined; raise SealError if a length goes beyond the end."""
    parts, end = [], 0
    while end < len(data):
        start = end + LENGTH_BYTES
        end = start + int.from_bytes(data[end:start], "little")
        if end > len(data):
            raise SealError(f"cut off: expected {end} bytes or more, got {len(data)}")
        parts.append(data[start:end])
    return parts


def frame_arrays(arrays: Arrays) -> bytes:
    """Join arrays and their names."""
    return frame(part for name, array in arrays.items() for part in (name.encode(), to_npy(array)))


def unframe_arrays(data: bytes) -> ArrayDict:
    """Part what :func:`frame_arrays` joined, as read-only views; ValueError for other bytes."""
    parts = unframe(data)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name.decode(): from_npy(array) for name, array in pairs}


def pack(head: Mapping[str, Any], parts: Iterable[bytes]) -> bytes:
    """Join named values, as JSON, and byte strings."""
    return frame([json.dumps(head).encode(), *parts])


def unpack(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Part what :func:`pack` joined; else raise SealError."""
    head, *parts = unframe(data) or [b""]
    try:
        named = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise SealError(f"expected named values as JSON: {error}") from None
    if not isinstance(named, dict):
        raise SealError(f"expected named values as JSON, got a {type(named).__name__}")
    return named, parts
