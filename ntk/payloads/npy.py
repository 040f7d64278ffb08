"""Arrays in NumPy's file format, as they travel; repeated headers are read once."""

import functools
import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]


def from_npy(data: bytes) -> NDArray[Any]:
    """Read an array from the bytes of a whole file, as a read-only view; refuse other sizes."""
    version = np.lib.format.read_magic(io.BytesIO(data[:8]))
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    width = 2 * version[0]
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    shape, fortran_order, dtype = _header(version, data[8:start])
    left = len(data) - start
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or dtype.itemsize == 0 or min(shape, default=0) < 0 or size != left:
        raise ValueError(f"{left} bytes for {dtype} of shape {shape}")
    flat: NDArray[Any] = np.frombuffer(data, dtype, math.prod(shape), start)
    return flat.reshape(shape, order="F" if fortran_order else "C")


def to_npy(array: NDArray[Any]) -> bytes:
    """Write an array as ``np.save`` does."""
    if not array.flags.c_contiguous or array.dtype.hasobject:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue()
    flat = array.reshape(-1).view(np.uint8).data
    return b"".join((_head(array.dtype, array.shape), flat))  # one copy


@functools.lru_cache(maxsize=1024)
def _header(version: tuple[int, int], data: bytes) -> Header:
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(io.BytesIO(data))
    return np.lib.format.read_array_header_2_0(io.BytesIO(data))


@functools.lru_cache(maxsize=1024)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    described = np.lib.format.dtype_to_descr(dtype)
    head = {"descr": described, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, head)
    return buffer.getvalue()
