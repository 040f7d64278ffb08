"""Per-example Jacobians of a network, as a small linear operator.

A :class:`Jacobian` of n examples and C outputs over the trainable parameters is a row of blocks,
one for each layer or parameter. Two kinds of block give the same numbers:

* :class:`DenseBlock` holds the definition, ``d f_c(x_i) / d w``, of shape (n, C, *w);
* :class:`LinearBlock` holds a linear layer's inputs ``a`` (n, d_in) and output gradients ``g``
  (n, C, d_out), of which the Jacobian is the outer product: ``d f_c(x_i) / d W = g_ic a_i^T`` and
  ``d f_c(x_i) / d b = g_ic``. Nothing of size n C d_in d_out is ever built.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 3.2,
eq. (4) and (6), and section 4.1, eq. (8). The factored form is exact, and therefore exactly as
revealing: for a first layer with a bias, ``a`` is the client's input itself, in either form.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .blocks import Block, DenseBlock, LinearBlock
from .errors import BadReply
from .memory import require_memory

__all__ = ["Jacobian"]

MAX_LAYOUT_BYTES = 1_000_000


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Jacobian of n examples by C outputs over the trainable parameters.

    Attributes
    ----------
    blocks : tuple of Block
        Its columns, layer by layer. All have the same n and C.
    """

    blocks: tuple[Block, ...]

    @property
    def num_examples(self) -> int:
        """Number of examples n."""
        return len(self.blocks[0].arrays[0])

    @property
    def num_outputs(self) -> int:
        """Number of network outputs C."""
        return int(self.blocks[0].arrays[-1].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(array.nbytes for block in self.blocks for array in block.arrays)

    @property
    def layout(self) -> str:
        """Which parameters are held, and in what form, as JSON."""
        return json.dumps([block.layout for block in self.blocks])

    def gram(self, other: "Jacobian | None" = None) -> Tensor:
        """Empirical tangent kernel H between the examples of two Jacobians.

        ``H_ij = (1/C) <J(x_i), J(x_j)>_F``: eq. (6).

        Parameters
        ----------
        other : Jacobian, optional
            Of m examples, over the same parameters in the same form; itself by default.

        Returns
        -------
        Tensor, shape (n, m)
            In the Jacobian's dtype.

        Raises
        ------
        NotEnoughMemory
            If the kernel and one block's contribution to it would not fit.
        """
        other = self if other is None else self._compatible(other)
        first = self.blocks[0].arrays[0]
        require_memory(
            3 * self.num_examples * other.num_examples * first.element_size(),
            f"the kernel of {self.num_examples} x {other.num_examples} examples",
            device=first.device,
            cure="sample fewer clients a round or fewer examples on each",
        )
        kernel = first.new_zeros(self.num_examples, other.num_examples)
        for block, other_block in zip(self.blocks, other.blocks, strict=True):
            kernel += block.gram(other_block)
        return kernel.div_(self.num_outputs)

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:
        """``J^T R``, the update of the weights in eq. (9b).

        Parameters
        ----------
        residual : Tensor, shape (n, C)
            R.

        Returns
        -------
        dict of str to Tensor
            Parameter name -> update, of the parameter's shape.
        """
        update: dict[str, Tensor] = {}
        for block in self.blocks:
            update |= block.vjp(residual)
        return update

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:
        """Linearised change of the outputs under an update of the weights, shape (n, C): eq. (4).

        Parameters
        ----------
        update : mapping of str to Tensor
            Parameter name -> change of that parameter, for all parameters held.
        """
        change = self.blocks[0].jvp(update)
        for block in self.blocks[1:]:
            change = change + block.jvp(update)
        return change

    def squared_norms(self) -> Tensor:
        """Squared Frobenius norm of each example's Jacobian, float64, shape (n,)."""
        return torch.stack([block.squared_norms() for block in self.blocks]).sum(0)

    def dense(self) -> dict[str, Tensor]:
        """Parameter name -> tensor of shape (n, C, *parameter shape): the paper's tensor."""
        tensors: dict[str, Tensor] = {}
        for block in self.blocks:
            tensors |= block.dense()
        return tensors

    def to(self, device: torch.device | str) -> "Jacobian":
        """Return the Jacobian with its tensors on `device`."""
        return Jacobian(
            tuple(block.with_arrays([a.to(device) for a in block.arrays]) for block in self.blocks)
        )

    @staticmethod
    def concatenate(parts: Sequence["Jacobian"]) -> "Jacobian":
        """Stack the examples of several Jacobians, in their order: eq. (8).

        Raises
        ------
        ValueError
            If there are none, or they differ in parameters, form or outputs.
        """
        if not parts:
            raise ValueError("Jacobian.concatenate: expected at least one Jacobian, got none")
        first = parts[0]
        for part in parts[1:]:
            first._compatible(part)
        return Jacobian(
            tuple(
                blocks[0].with_arrays(
                    [torch.cat(rows) for rows in zip(*(b.arrays for b in blocks), strict=True)]
                )
                for blocks in zip(*(part.blocks for part in parts), strict=True)
            )
        )

    def _compatible(self, other: "Jacobian") -> "Jacobian":
        if (self.layout, self.num_outputs) != (other.layout, other.num_outputs):
            raise ValueError(
                f"Jacobians of different parameters, form or outputs: {self.layout} with "
                f"{self.num_outputs} outputs, and {other.layout} with {other.num_outputs}"
            )
        return other

    def to_arrays(self) -> list[NDArray[Any]]:
        """Wire format: the layout as UTF-8 bytes, then each block's arrays."""
        layout = np.frombuffer(self.layout.encode(), dtype=np.uint8)
        return [layout, *(a.cpu().numpy() for block in self.blocks for a in block.arrays)]

    @classmethod
    def from_arrays(
        cls, arrays: Sequence[NDArray[Any]], *, parameters: Mapping[str, Sequence[int]]
    ) -> "Jacobian":
        """Parse and check what :meth:`to_arrays` made.

        Parameters
        ----------
        arrays : sequence of ndarray
            As received.
        parameters : mapping of str to sequence of int
            Shape of each array of the global model. The Jacobian may hold any of them, each once.

        Returns
        -------
        Jacobian
            Of float32 or float64 tensors, all finite.

        Raises
        ------
        BadReply
            With the reason ``"layout"``, ``"shape"``, ``"dtype"`` or ``"non-finite"``.
        """
        if not arrays:
            raise BadReply("shape", "expected a layout and the blocks' arrays, got no array")
        blocks: list[Block] = []
        rest = list(arrays[1:])
        for empty in _parse_layout(arrays[0], parameters):
            count = len(empty.arrays)
            if len(rest) < count:
                raise BadReply("shape", f"expected {count} arrays for {empty.layout}")
            blocks.append(empty.with_arrays([_tensor(array) for array in rest[:count]]))
            rest = rest[count:]
        if rest:
            raise BadReply("shape", f"expected {len(arrays) - len(rest)} arrays, got {len(arrays)}")
        _check_shapes(blocks, parameters)
        return cls(tuple(blocks))


def _parse_layout(raw: NDArray[Any], parameters: Mapping[str, Sequence[int]]) -> list[Block]:
    """Blocks without content, for a layout whose names all belong to the model."""
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.nbytes > MAX_LAYOUT_BYTES:
        raise BadReply("layout", "expected the layout as at most 1 MB of uint8")
    try:
        entries = json.loads(raw.tobytes())
        blocks: list[Block] = []
        for entry in entries:
            match entry:
                case {"kind": DenseBlock.kind, "name": str(name), **extra} if not extra:
                    blocks.append(DenseBlock(name, torch.empty(0)))
                case {
                    "kind": LinearBlock.kind,
                    "weight": str() | None as weight,
                    "bias": str() | None as bias,
                    **extra,
                } if not extra and (weight is not None or bias is not None):
                    blocks.append(LinearBlock(weight, bias, torch.empty(0), torch.empty(0)))
                case _:
                    raise BadReply("layout", f"unknown block {str(entry)[:200]}")
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadReply):
            raise
        raise BadReply("layout", f"expected a JSON list of blocks ({error})") from None
    names = Counter(_names(blocks))
    if not names:
        raise BadReply("layout", "expected at least one block, got none")
    for name, count in names.items():
        if name not in parameters:
            raise BadReply("layout", f"the model has no parameter {name[:200]!r}")
        if count > 1:
            raise BadReply("layout", f"parameter {name!r} comes {count} times")
    return blocks


def _names(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        yield from (v for k, v in block.layout.items() if k != "kind" and v is not None)


def _tensor(array: NDArray[Any]) -> Tensor:
    if array.dtype not in (np.float32, np.float64):
        raise BadReply("dtype", f"expected float32 or float64, got {array.dtype}")
    if not np.isfinite(array).all():
        raise BadReply("non-finite", "the Jacobian holds NaN or infinity")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _check_shapes(blocks: Sequence[Block], parameters: Mapping[str, Sequence[int]]) -> None:
    rows = {array.shape[0] if array.ndim else -1 for block in blocks for array in block.arrays}
    if len(rows) != 1 or rows & {0, -1}:
        raise BadReply("shape", f"expected one number of examples, at least 1, got {sorted(rows)}")
    if len({array.dtype for block in blocks for array in block.arrays}) != 1:
        raise BadReply("dtype", "expected one dtype in all blocks")
    last = blocks[0].arrays[-1]
    num_outputs = last.shape[1] if last.ndim > 1 else 0
    for block in blocks:
        try:
            shapes = block.expected_shapes(parameters)
        except ValueError as error:
            raise BadReply("layout", f"{block.layout} does not fit the model: {error}") from None
        for array, shape in zip(block.arrays, shapes, strict=True):
            expected = tuple(num_outputs if size == -1 else size for size in shape)
            if tuple(array.shape[1:]) != expected or 0 in expected:
                raise BadReply(
                    "shape", f"{block.layout}: expected (n, *{expected}), got {tuple(array.shape)}"
                )
