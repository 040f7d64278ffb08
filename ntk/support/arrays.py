"""The one check of received arrays, and how bytes are sent as an array."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import BadReply

Arrays = Mapping[str, NDArray[Any]]  # by name
ArrayDict = dict[str, NDArray[Any]]


def take_arrays(arrays: Mapping[str, NDArray[Any]], *names: str) -> list[NDArray[Any]]:
    """Return received arrays in the order of these names; BadReply if the names are others."""
    if arrays.keys() != set(names):
        received = ", ".join(sorted(arrays))[:80] or "none"
        raise BadReply("arrays", f"expected {', '.join(names)}, got {received}")
    return [arrays[name] for name in names]


def require_array(
    name: str,
    array: NDArray[Any],
    *,
    shape: Sequence[int] | None = None,
    dtype: DTypeLike | Sequence[DTypeLike] | str | None = None,
    limit: float = np.inf,
    low: float | None = None,
    high: float | None = None,
) -> None:
    """Raise BadReply unless an array of finite numbers is what was expected.

    In `shape` -1 stands for any size from 1; `dtype` may be a tuple, or ``"unsigned"``. The reason
    is ``"shape"``, ``"dtype"``, ``"non-finite"``, ``"scale"`` (magnitudes over `limit`) or
    ``"range"`` (outside `low` ... `high`).
    """
    if shape is not None:
        expected, actual = tuple(shape), array.shape
        fits = len(actual) == len(expected) and all(
            b == a or (a == -1 and b > 0) for a, b in zip(expected, actual, strict=True)
        )
        if not fits:
            words = str(expected).replace("-1", "any")
            raise BadReply("shape", f"{name}: expected {words}, got {actual}")
    if dtype is None:
        fits, words = array.dtype.kind in "fiu", "numbers"
    elif dtype == "unsigned":
        fits, words = array.dtype.kind == "u", "unsigned integers"
    else:
        dtypes = [np.dtype(d) for d in (dtype if isinstance(dtype, tuple) else (dtype,))]
        fits, words = array.dtype in dtypes, " or ".join(map(str, dtypes))
    if not fits:
        raise BadReply("dtype", f"{name}: expected {words}, got {array.dtype}")
    if not array.size:
        return
    least, most = array.min(), array.max()  # NaN if there is any
    if not (np.isfinite(least) and np.isfinite(most)):
        raise BadReply("non-finite", f"{name}: expected finite numbers, got NaN or infinity")
    if max(float(most), -float(least)) > limit:
        raise BadReply(
            "scale", f"{name}: expected magnitudes up to {limit:g}, got {least} ... {most}"
        )
    if (low is not None and least < low) or (high is not None and most > high):
        words = f"at least {low:g}" if high is None else f"{low:g} ... {high:g}"
        raise BadReply("range", f"{name}: expected {words}, got {least} ... {most}")


def require_unmasked(values: Any) -> None:
    """Refuse a masked array that hides an entry: the number under the mask is no data."""
    if np.ma.is_masked(values):
        masked = np.count_nonzero(np.ma.getmaskarray(values))
        raise ValueError(
            f"expected a value for each entry, got {masked} that are masked; fill them, or leave "
            "these examples out"
        )


def require_counts(counts: NDArray[Any], num_classes: int, num_examples: int | None = None) -> int:
    """Raise BadReply unless these are the examples of each class, int64 (C,); return their sum.

    It must be `num_examples` if that is given.
    """
    require_array("counts", counts, shape=(num_classes,), dtype=np.int64, low=0)
    total: int = sum(counts.tolist())
    if num_examples not in (None, total):
        raise BadReply("num-examples", f"claims {num_examples}, counts {total}")
    return total


def byte_rows(parts: Collection[bytes]) -> NDArray[np.uint8]:
    """Return bytes of one length as the rows of an array, one row for each part."""
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)
