"""A Jacobian as the arrays that travel, and the check of what comes.

``layout``, as UTF-8 bytes, lists the blocks; their arrays are ``block-000``, ``block-001``, ... A
layout may come from anyone: nothing is built of a size that the global model does not justify.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..jacobian.blocks import Block, DenseBlock
from ..jacobian.factors import ConvBlock, EmbeddingBlock, LinearBlock, TransposedConvBlock
from ..jacobian.operator import SHARED, Jacobian
from ..jacobian.readout import ReadoutBlock
from ..support.arrays import require_array

MAX_LAYOUT_BYTES = 1_000_000
LARGEST = 1e12  # of a Jacobian's numbers: products of its factors must stay within float32
LARGEST_STRIDE = 2**16


def jacobian_to_arrays(jacobian: Jacobian) -> dict[str, NDArray[Any]]:
    """Return the layout and each block's arrays, by name."""
    arrays = [a.cpu().numpy() for block in jacobian.blocks for a in block.arrays]
    layout = np.frombuffer(jacobian.layout.encode(), dtype=np.uint8)
    return {"layout": layout, **{f"block-{k:03}": array for k, array in enumerate(arrays)}}


def block_arrays(arrays: Mapping[str, NDArray[Any]], *beside: str) -> dict[str, NDArray[Any]]:
    """Return a Jacobian's layout and its blocks' arrays, in order, of those with some `beside`."""
    names = ["layout", *(f"block-{k:03}" for k in range(len(arrays) - 1 - len(beside)))]
    if wrong := sorted(arrays.keys() ^ {*names, *beside}):
        raise BadReply(
            "arrays", f"names differ from those of a Jacobian's in {str(wrong[:5])[:200]}"
        )
    return {name: arrays[name] for name in names}


def jacobian_from_arrays(
    arrays: Mapping[str, NDArray[Any]],
    *beside: str,
    parameters: Mapping[str, Sequence[int]],
    weights: Mapping[str, Tensor] | None = None,
) -> Jacobian:
    """Check what :func:`jacobian_to_arrays` made, and build the Jacobian, in float32 or float64.

    `parameters` has the shapes of the global model's arrays, which a Jacobian may hold once each.
    Arrays named `beside` are ignored. A layer that is read out by another needs the `weights` that
    clients differentiated at. BadReply has the reason ``"arrays"``, ``"layout"``, ``"shape"``,
    ``"dtype"``, ``"non-finite"`` or ``"scale"``.
    """
    layout, *blocks = block_arrays(arrays, *beside).values()
    return jacobian_of(layout, [_tensor(array) for array in blocks], parameters, weights or {})


def jacobian_of(
    layout: NDArray[Any],
    tensors: Sequence[Tensor],
    parameters: Mapping[str, Sequence[int]],
    weights: Mapping[str, Tensor] = MappingProxyType({}),
) -> Jacobian:
    """Build a Jacobian of received tensors, which may be on the device "meta", except tokens.

    Shapes and dtypes are checked, numbers are not.
    """
    left = iter(tensors)
    empty, shared = _parse_layout(layout, parameters, weights)
    if len(tensors) != (count := sum(len(block.arrays) for block in empty)):
        raise BadReply("shape", f"expected {count} arrays after the layout, got {len(tensors)}")
    blocks = [block.with_arrays([next(left) for _ in block.arrays]) for block in empty]
    _check_shapes(blocks, parameters)
    return Jacobian(tuple(blocks), shared)


def _parse_layout(
    raw: NDArray[Any], parameters: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor]
) -> tuple[list[Block], dict[str, str]]:
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.nbytes > MAX_LAYOUT_BYTES:
        raise BadReply("layout", "expected the layout as at most 1 MB of uint8")
    try:
        entries = json.loads(raw.tobytes())
        described = [entry for entry in entries if entry.get("kind") != SHARED]
        blocks = [_parse_block(entry, parameters, weights) for entry in described]
        further = (entry for entry in entries if entry.get("kind") == SHARED)
        shared = {str(entry["name"]): str(entry["of"]) for entry in further}
    # BadReply is a ValueError
    except (AttributeError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise BadReply("layout", f"expected a JSON list of blocks ({error})") from None
    names = Counter(name for block in blocks for name in block.names)
    if not names:
        raise BadReply("layout", "expected at least one block, got none")
    for name, count in names.items():
        if name not in parameters:
            raise BadReply("layout", f"the model has no parameter {name[:200]!r}")
        if count > 1:
            raise BadReply("layout", f"parameter {name!r} comes {count} times")
    for name, first in shared.items():
        shape = parameters.get(name)
        if name in names or first not in names or shape is None or shape != parameters[first]:
            raise BadReply("layout", f"{name[:200]!r} cannot be {first[:200]!r} by another name")
    return blocks, shared


def _parse_block(
    entry: Any, parameters: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor]
) -> Block:
    none = torch.empty(0)
    match entry:
        case {"kind": DenseBlock.kind, "name": str(name), **extra} if not extra:
            return DenseBlock(name, none)
        case {"kind": kind, "weight": str(weight), "bias": (str() | None) as bias, **extra}:
            shape, readout = parameters.get(weight, ()), extra.get("readout")
            if kind == ReadoutBlock.kind and isinstance(readout, str) and len(extra) == 1:
                if readout and readout not in weights:
                    raise BadReply("layout", f"no weight {readout[:200]!r} was sent")
                return ReadoutBlock(weight, bias, readout, weights.get(readout), none, none)
            if kind == LinearBlock.kind and not extra:
                return LinearBlock(weight, bias, none, none)
            if kind == EmbeddingBlock.kind and bias is None and not extra:
                if len(shape) != 2:
                    raise BadReply("layout", f"{weight[:200]!r} is no table of an embedding")
                return EmbeddingBlock(weight, None, none, none, shape[0])
            if kind in (ConvBlock.kind, TransposedConvBlock.kind) and (
                len(shape) < 3 or 0 in shape
            ):
                raise BadReply("layout", f"{weight[:200]!r} is no weight of a convolution")
            if kind == TransposedConvBlock.kind and bias is None and not extra:
                return TransposedConvBlock(weight, None, none, none, tuple(shape))
            if kind == ConvBlock.kind and extra.keys() == {"stride", "dilation"}:
                steps: Any = extra
                stride, dilation = tuple(steps["stride"]), tuple(steps["dilation"])
                if not all(type(n) is int and 0 < n <= LARGEST_STRIDE for n in stride + dilation):
                    words = f"stride and dilation of {weight[:200]!r}: expected 1"
                    raise BadReply("layout", f"{words} ... {LARGEST_STRIDE}")
                kernel_size = tuple(shape[2:])
                return ConvBlock(weight, bias, none, none, kernel_size, stride, dilation, shape[1])
    raise BadReply("layout", f"unknown block {str(entry)[:200]}")


def _tensor(array: NDArray[Any]) -> Tensor:
    whole = array.dtype == np.int64  # tokens
    dtype = np.int64 if whole else (np.float32, np.float64)
    require_array("the Jacobian", array, dtype=dtype, limit=np.inf if whole else LARGEST)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _check_shapes(blocks: Sequence[Block], parameters: Mapping[str, Sequence[int]]) -> None:
    rows = {array.shape[0] if array.ndim else -1 for block in blocks for array in block.arrays}
    if len(rows) != 1 or rows & {0, -1}:
        raise BadReply("shape", f"expected one number of examples, at least 1, got {sorted(rows)}")
    dtypes = {array.dtype for block in blocks for array in block.arrays[block.integers :]}
    tokens = {array.dtype for block in blocks for array in block.arrays[: block.integers]}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point or tokens - {torch.int64}:
        raise BadReply("dtype", "expected tokens as int64, and one floating-point dtype")
    num_outputs = blocks[0].num_outputs
    for block in blocks:
        try:
            shapes = block.expected_shapes(parameters)
        except ValueError as error:  # of a layer that is not this block's
            raise BadReply("layout", f"{block.layout} does not fit the model: {error}") from None
        if block.num_outputs != num_outputs:
            raise BadReply("shape", f"{block.layout}: {block.num_outputs} outputs of {num_outputs}")
        for array, shape in zip(block.arrays, shapes, strict=True):
            expected = tuple(num_outputs if size == -1 else size for size in shape)
            if tuple(array.shape[1:]) != expected or 0 in expected:
                raise BadReply(
                    "shape", f"{block.layout}: expected (n, *{expected}), got {tuple(array.shape)}"
                )
