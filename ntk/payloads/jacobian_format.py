"""A Jacobian as the arrays that travel, and the check of what comes.

The layout, as UTF-8 bytes, lists the blocks; their arrays follow. A layout may come from anyone:
nothing is built of a size that the global model does not justify.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..jacobian.blocks import Block, DenseBlock
from ..jacobian.factors import ConvBlock, EmbeddingBlock, LinearBlock
from ..jacobian.operator import Jacobian
from ..support.arrays import require_array

__all__ = ["count_arrays", "jacobian_from_arrays", "jacobian_to_arrays", "require_form"]

MAX_LAYOUT_BYTES = 1_000_000
LARGEST = 1e12  # of a Jacobian's numbers: products of its factors must stay within float32
LARGEST_STRIDE = 2**16
A = TypeVar("A")


def jacobian_to_arrays(jacobian: Jacobian) -> list[NDArray[Any]]:
    """Return the layout as UTF-8 bytes, then each block's arrays."""
    layout = np.frombuffer(jacobian.layout.encode(), dtype=np.uint8)
    return [layout, *(a.cpu().numpy() for block in jacobian.blocks for a in block.arrays)]


def jacobian_from_arrays(
    arrays: Sequence[NDArray[Any]], *, parameters: Mapping[str, Sequence[int]]
) -> Jacobian:
    """Check what :func:`jacobian_to_arrays` made, and build the Jacobian, in float32 or float64.

    `parameters` has the shape of each array of the global model; the Jacobian may hold any of them,
    each once. BadReply has the reason ``"layout"``, ``"shape"``, ``"dtype"``, ``"non-finite"`` or
    ``"scale"``.
    """
    if not arrays:
        raise BadReply("shape", "expected a layout and the blocks' arrays, got no array")
    blocks: list[Block] = []
    for empty, own in _by_block(arrays[0], arrays[1:], parameters):
        tensors = [_tensor(a, integers=k < empty.integers) for k, a in enumerate(own)]
        blocks.append(empty.with_arrays(tensors))
    _check_shapes(blocks, parameters)
    return Jacobian(tuple(blocks))


def count_arrays(layout: NDArray[Any], parameters: Mapping[str, Sequence[int]]) -> int:
    """Return how many arrays follow a layout."""
    return sum(len(empty.arrays) for empty in _parse_layout(layout, parameters))


def require_form(
    layout: NDArray[Any],
    tensors: Sequence[Tensor],
    parameters: Mapping[str, Sequence[int]],
    num_outputs: int,
) -> int:
    """Check shapes and dtypes of a Jacobian's tensors, and return the bytes that the numbers take.

    The tensors may be on the device "meta", except tokens. Factors larger than the dense block that
    they make are refused.
    """
    blocks = [empty.with_arrays(own) for empty, own in _by_block(layout, tensors, parameters)]
    _check_shapes(blocks, parameters)
    if blocks[0].arrays[-1].shape[1] != num_outputs:
        raise BadReply("shape", f"expected {num_outputs} outputs in {blocks[0].layout}")
    for block in blocks:
        if sum(array[0].numel() for array in block.arrays) > block.dense_size:
            raise BadReply("shape", f"{block.layout}: factors larger than what they make")
    return Jacobian(tuple(blocks)).nbytes


def _by_block(
    layout: NDArray[Any], arrays: Sequence[A], parameters: Mapping[str, Sequence[int]]
) -> list[tuple[Block, Sequence[A]]]:
    """Pair each block of the layout, without content, with its arrays."""
    pairs = []
    start = 0
    for empty in _parse_layout(layout, parameters):
        own = arrays[start : start + len(empty.arrays)]
        start += len(empty.arrays)
        if len(own) < len(empty.arrays):
            raise BadReply("shape", f"expected {len(empty.arrays)} arrays for {empty.layout}")
        pairs.append((empty, own))
    if start < len(arrays):
        raise BadReply("shape", f"expected {start} arrays after the layout, got {len(arrays)}")
    return pairs


def _parse_layout(raw: NDArray[Any], parameters: Mapping[str, Sequence[int]]) -> list[Block]:
    """Blocks without content, for a layout whose names all belong to the model."""
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.nbytes > MAX_LAYOUT_BYTES:
        raise BadReply("layout", "expected the layout as at most 1 MB of uint8")
    try:
        entries = json.loads(raw.tobytes())
        blocks: list[Block] = []
        for entry in entries:
            blocks.append(_parse_block(entry, parameters))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadReply):
            raise
        raise BadReply("layout", f"expected a JSON list of blocks ({error})") from None
    names = Counter(name for block in blocks for name in block.names)
    if not names:
        raise BadReply("layout", "expected at least one block, got none")
    for name, count in names.items():
        if name not in parameters:
            raise BadReply("layout", f"the model has no parameter {name[:200]!r}")
        if count > 1:
            raise BadReply("layout", f"parameter {name!r} comes {count} times")
    return blocks


def _parse_block(entry: Any, parameters: Mapping[str, Sequence[int]]) -> Block:
    """One block without content."""
    none = torch.empty(0)
    shape = parameters.get(entry.get("weight", ""), ()) if isinstance(entry, dict) else ()
    match entry:
        case {"kind": DenseBlock.kind, "name": str(name), **extra} if not extra:
            return DenseBlock(name, none)
        case {"kind": LinearBlock.kind, "weight": str(weight), "bias": bias, **extra} if (
            not extra and isinstance(bias, str | None)
        ):
            return LinearBlock(weight, bias, none, none)
        case {
            "kind": ConvBlock.kind,
            "weight": str(weight),
            "bias": bias,
            "stride": [*stride],
            "dilation": [*dilation],
            **extra,
        } if not extra and isinstance(bias, str | None):
            if not all(
                type(number) is int and 0 < number <= LARGEST_STRIDE
                for number in (*stride, *dilation)
            ):
                raise BadReply(
                    "layout",
                    f"stride and dilation of {weight[:200]!r}: expected 1 ... {LARGEST_STRIDE}",
                )
            if len(shape) < 3 or 0 in shape:
                raise BadReply("layout", f"{weight[:200]!r} is no weight of a convolution")
            return ConvBlock(
                weight, bias, none, none, tuple(shape[2:]), tuple(stride), tuple(dilation), shape[1]
            )
        case {"kind": EmbeddingBlock.kind, "weight": str(weight), "bias": None, **extra} if (
            not extra
        ):
            if len(shape) != 2:
                raise BadReply("layout", f"{weight[:200]!r} is no table of an embedding")
            return EmbeddingBlock(weight, None, none, none, shape[0])
    raise BadReply("layout", f"unknown block {str(entry)[:200]}")


def _tensor(array: NDArray[Any], *, integers: bool) -> Tensor:
    require_array(
        "the Jacobian",
        array,
        dtype=np.int64 if integers else (np.float32, np.float64),
        limit=np.inf if integers else LARGEST,
    )
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _check_shapes(blocks: Sequence[Block], parameters: Mapping[str, Sequence[int]]) -> None:
    rows = {array.shape[0] if array.ndim else -1 for block in blocks for array in block.arrays}
    if len(rows) != 1 or rows & {0, -1}:
        raise BadReply("shape", f"expected one number of examples, at least 1, got {sorted(rows)}")
    if len({array.dtype for block in blocks for array in block.arrays[block.integers :]}) != 1:
        raise BadReply("dtype", "expected one dtype in all blocks")
    last = blocks[0].arrays[-1]
    num_outputs = last.shape[1] if last.ndim > 1 else 0
    for block in blocks:
        try:
            shapes = block.expected_shapes(parameters)
        except ValueError as error:  # of a layer that is not this block's
            raise BadReply("layout", f"{block.layout} does not fit the model: {error}") from None
        for array, shape in zip(block.arrays, shapes, strict=True):
            expected = tuple(num_outputs if size == -1 else size for size in shape)
            if tuple(array.shape[1:]) != expected or 0 in expected:
                raise BadReply(
                    "shape", f"{block.layout}: expected (n, *{expected}), got {tuple(array.shape)}"
                )
