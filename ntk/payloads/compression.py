"""Top-k sparsification and b-bit quantisation, encoded for real: the length is the cost.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2
("Jacobian Compression"), and Thompson et al., *NTK-DFL*, ICML 2025, appendix E.3 (sparsity 0.5,
6 bits). Neither says how values are rounded or positions written; this module's choices:

* Of a tensor's N numbers the k = N - floor(sparsity N) largest in magnitude stay; of equal ones,
  the first. Positions are a bitmap of N bits, or k indices of ceil(log2 N) bits, whichever is
  smaller; nothing if all stay.
* With b bits, one is the sign and b - 1 choose among 2^(b-1) magnitudes, evenly spaced from the
  smallest to the largest that stayed; with b = 1 all have their mean magnitude. With 32 the numbers
  stay as they are.
* Rows compressed as one share a threshold and a scale, which show that they belong together: what
  is to be shuffled is compressed row by row.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..options import Declared, shared

UNQUANTISED = 32
MOST_BITS = 16
LARGEST = 2**48  # numbers in a tensor
AT_ONCE = 2**13  # numbers that are packed together: a multiple of 8, so that they fill bytes
_ALL, _BITMAP, _INDICES = range(3)
# form, bits, float64?, axes, groups of numbers compressed as one, numbers kept; then the shape, and
# each group's smallest and largest magnitude if they are quantised
_HEAD = struct.Struct("<BBBBQQ")
_AXIS = struct.Struct("<Q")
_RANGE_BYTES = 8
Floats = NDArray[np.floating]


class CompressionOptions(Declared):
    """How clients compress Jacobians."""

    sparsity: float = shared(
        "share of the numbers of each tensor of a Jacobian that clients drop; an upload with fewer "
        "dropped is refused",
        default=0.0,
        at_least=0,
        below=1,
    )
    bits: int = shared(
        "bits of each number that is sent, 1 ... 16; 32 leaves them as they are; an upload with "
        "more is refused",
        default=UNQUANTISED,
        at_least=1,
    )

    def check(self) -> None:
        """Refuse bits that do not exist."""
        super().check()
        check_compression(self.sparsity, self.bits)


def check_compression(sparsity: float, bits: int) -> None:
    """Refuse a sparsity outside [0, 1) and bits other than 1 ... 16 or 32."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity: expected 0 <= sparsity < 1, got {sparsity}")
    if not (1 <= bits <= MOST_BITS or bits == UNQUANTISED):
        raise ValueError(
            f"bits: expected 1 ... {MOST_BITS}, or {UNQUANTISED} for numbers as they are, "
            f"got {bits}"
        )


def num_kept(size: int, sparsity: float) -> int:
    """Count the numbers that stay of a tensor of `size`: k = N - floor(sparsity N)."""
    return size - math.floor(sparsity * size)


def top_k(groups: Floats, sparsity: float) -> NDArray[np.bool_]:
    """Mask of the k largest in magnitude of each row of a matrix; of equal ones, the first."""
    size = groups.shape[1]
    count = num_kept(size, sparsity)
    if count == size:
        return np.ones(groups.shape, bool)
    magnitudes = np.abs(groups)
    thresholds = np.partition(magnitudes, size - count, axis=1)[:, size - count, None]
    mask: NDArray[np.bool_] = magnitudes > thresholds
    ties = magnitudes == thresholds
    left = count - np.count_nonzero(mask, axis=1, keepdims=True)
    mask |= ties & (np.cumsum(ties, axis=1, dtype=np.int32) <= left)
    return mask


def compress(
    values: Floats, *, sparsity: float = 0.0, bits: int = UNQUANTISED, by_row: bool = False
) -> NDArray[np.uint8]:
    """Encode a tensor of float32 or float64: its largest numbers, in `bits` bits each.

    Numbers are finite, in any shape; a share `sparsity` of them, in [0, 1), is dropped. Bits are
    1 ... 16; 32 leaves numbers as they are. With `by_row` each row, along the first axis, is
    compressed by itself. The code, uint8 for :class:`Encoded`, has 20 bytes and 8 for each axis, 8
    for each group if quantised, positions, numbers.

    Examples
    --------
    >>> code = compress(np.linspace(-1, 1, 1000, dtype=np.float32), sparsity=0.5, bits=6)
    >>> code.size                       # 20 + 8 + 8 + 1000 / 8 + 500 * 6 / 8
    536
    >>> Encoded.parse(code).decode().round(2)[[0, 400, 999]]
    array([-1.,  0.,  1.], dtype=float32)
    """
    check_compression(sparsity, bits)
    if not np.isfinite(values).all():
        raise ValueError("compress: expected finite numbers, got NaN or infinity")
    rows = len(values) if by_row and values.ndim and values.size else 1
    groups = values.reshape(rows, -1)
    mask = top_k(groups, sparsity)
    numbers = (groups if mask.all() else groups[mask]).reshape(rows, -1)
    ranges = np.zeros((0, 2), np.float32)
    if bits == UNQUANTISED:
        data = numbers.tobytes()
    else:
        levels, ranges = _quantise(numbers, bits)
        data = _pack(levels.reshape(-1), bits)
    form, positions = _positions(mask.reshape(-1), numbers.size)
    double = values.dtype == np.float64
    head = _HEAD.pack(form, bits, double, values.ndim, rows, numbers.size)
    shape = b"".join(_AXIS.pack(size) for size in values.shape)
    return np.frombuffer(head + shape + ranges.tobytes() + positions + data, np.uint8)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A compressed tensor whose bytes fit its head: nothing of the size of `shape` exists yet."""

    shape: tuple[int, ...]  # of the tensor
    count: int  # numbers that stayed
    bits: int  # of each; 32 are the numbers themselves
    dtype: np.dtype[Any]
    groups: int  # of numbers that were compressed as one: 1, or as many as there are rows
    _form: int
    _ranges: NDArray[np.float32]
    _positions: NDArray[np.uint8]
    _data: NDArray[np.uint8]

    @property
    def size(self) -> int:
        """Numbers in the tensor, dropped ones included."""
        return math.prod(self.shape)

    def meta_tensor(self) -> Tensor:
        """Return an empty tensor of this shape and dtype (device "meta")."""
        dtype = torch.float64 if self.dtype == np.float64 else torch.float32
        return torch.empty(self.shape, dtype=dtype, device="meta")

    @classmethod
    def parse(cls, code: NDArray[np.uint8]) -> "Encoded":
        """Read the head of what :func:`compress` made; BadReply (``"compression"``) otherwise."""
        if code.dtype != np.uint8 or code.ndim != 1 or code.size < _HEAD.size:
            raise BadReply("compression", f"expected a head of {_HEAD.size} bytes, got {code.size}")
        form, bits, double, axes, groups, count = _HEAD.unpack(code[: _HEAD.size].tobytes())
        start = _HEAD.size + axes * _AXIS.size
        if form > _INDICES or double > 1 or code.size < start:
            raise BadReply("compression", f"unknown form {form}, or cut off")
        shape = tuple(size for (size,) in _AXIS.iter_unpack(code[_HEAD.size : start].tobytes()))
        size = math.prod(shape)
        dtype = np.dtype(np.float64 if double else np.float32)
        try:
            check_compression(0.0, bits)
        except ValueError as error:
            raise BadReply("compression", str(error)) from None
        if max(size, *shape, 1) >= LARGEST or count > size or (form == _ALL and count != size):
            raise BadReply("compression", f"{count} numbers of a tensor of {size}")
        if groups < 1 or (groups > 1 and (groups not in shape[:1] or count % groups)):
            raise BadReply("compression", f"{groups} groups of {count} numbers of {shape}")
        widths = {_ALL: 0, _BITMAP: size, _INDICES: count * _index_bits(size)}
        first = start + (0 if bits == UNQUANTISED else groups * _RANGE_BYTES)
        middle = first + _bytes(widths[form])
        end = middle + _bytes(count * (8 * dtype.itemsize if bits == UNQUANTISED else bits))
        if code.size != end:
            raise BadReply("compression", f"expected {end} bytes for {shape}, got {code.size}")
        ranges = np.frombuffer(code[start:first].tobytes(), np.float32).reshape(-1, 2)
        lows, highs = ranges[:, 0], ranges[:, 1]
        if not ((lows >= 0) & (lows <= highs) & (highs < math.inf)).all():
            raise BadReply("compression", "expected finite magnitudes, the smallest first")
        positions, data = code[first:middle], code[middle:end]
        return cls(shape, count, bits, dtype, groups, form, ranges, positions, data)

    def decode(self) -> Floats:
        """Return the tensor, zero where a number was dropped; BadReply if positions do not fit."""
        chosen = self._chosen()
        if self.bits == UNQUANTISED:
            numbers: Floats = np.frombuffer(self._data.tobytes(), self.dtype)
        else:
            levels = _unpack(self._data, self.count, self.bits).reshape(self.groups, -1)
            low, space = _spaces(self._ranges, self.bits)
            magnitudes = low + (levels >> np.uint64(1)).astype(np.float64) * space
            signed = np.where(levels & np.uint64(1), -magnitudes, magnitudes)
            numbers = signed.astype(self.dtype).reshape(-1)
        flat = np.zeros(self.size, self.dtype)
        flat[chosen] = numbers
        return flat.reshape(self.shape)

    def _chosen(self) -> NDArray[np.int64] | NDArray[np.bool_] | slice:
        size = self.size
        if self._form == _ALL:
            return slice(None)
        if self._form == _BITMAP:
            ones = int(np.bitwise_count(self._positions).sum(dtype=np.int64))
            last = int(self._positions[-1]) if size % 8 else 0
            if ones != self.count or last & (0xFF >> size % 8):
                raise BadReply("compression", f"a bitmap of {ones} positions for {self.count}")
            return np.unpackbits(self._positions, count=size).view(bool)
        indices = _unpack(self._positions, self.count, _index_bits(size)).astype(np.int64)
        if self.count and (indices[-1] >= size or (np.diff(indices) <= 0).any()):
            raise BadReply("compression", f"expected rising indices below {size}")
        return indices


def _positions(mask: NDArray[np.bool_], count: int) -> tuple[int, bytes]:
    if count == mask.size:
        return _ALL, b""
    width = _index_bits(mask.size)
    if _bytes(count * width) < _bytes(mask.size):
        return _INDICES, _pack(np.flatnonzero(mask).astype(np.uint64), width)
    return _BITMAP, np.packbits(mask).tobytes()


def _quantise(numbers: Floats, bits: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Levels, the sign in the lowest bit, and each row's smallest and largest magnitude."""
    magnitudes = np.abs(numbers).astype(np.float64)
    if bits == 1:
        means = magnitudes.mean(axis=1) if numbers.size else np.zeros(len(numbers))
        ranges = np.stack([means, means], axis=1).astype(np.float32)
    else:
        lows, highs = magnitudes.min(1, initial=np.inf), magnitudes.max(1, initial=0.0)
        ranges = np.stack([np.minimum(lows, highs), highs], axis=1).astype(np.float32)
    low, space = _spaces(ranges, bits)
    steps = np.rint((magnitudes - low) / np.where(space > 0, space, np.inf))
    levels = np.clip(steps, 0, _steps(bits)).astype(np.uint64)
    return levels << np.uint64(1) | np.signbit(numbers), ranges


def _spaces(ranges: NDArray[np.float32], bits: int) -> tuple[Floats, Floats]:
    """Smallest magnitude of each row, and the space between two, as columns."""
    low, high = ranges[:, :1].astype(np.float64), ranges[:, 1:].astype(np.float64)
    return low, (high - low) / max(1, _steps(bits))


def _steps(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def _index_bits(size: int) -> int:
    return max(1, (size - 1).bit_length()) if size else 1


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _pack(values: NDArray[np.uint64], width: int) -> bytes:
    """Write numbers of `width` bits one after the other, least significant bit first."""
    parts = []
    for start in range(0, values.size, AT_ONCE):
        rows = values[start : start + AT_ONCE].astype("<u8")[:, None].view(np.uint8)
        bits = np.unpackbits(rows, axis=1, count=width, bitorder="little")
        parts.append(np.packbits(bits, bitorder="little").tobytes())
    return b"".join(parts)


def _unpack(data: NDArray[np.uint8], count: int, width: int) -> NDArray[np.uint64]:
    values = np.empty(count, np.uint64)
    for start in range(0, count, AT_ONCE):
        bits = np.zeros((min(AT_ONCE, count - start), 64), np.uint8)
        packed, size = data[start * width // 8 :], len(bits) * width
        bits[:, :width] = np.unpackbits(packed, count=size, bitorder="little").reshape(-1, width)
        values[start : start + AT_ONCE] = np.packbits(bits, bitorder="little").view("<u8")
    return values
