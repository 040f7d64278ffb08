"""The blocks that a Jacobian is made of: columns of a layer or parameter, dense or in factors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

TILE = 1024  # rows and columns of a kernel that are worked on at a time
CPU_TILE = 256  # the same if a tile and its factors should stay in the processor's cache
GPU_TILE = 4096  # the same on a GPU, which small tiles leave idle
AT_WORK = 2**17  # numbers that stay in the processor's cache
WORKSPACE = 64 * 2**20  # bytes of intermediate results that a block may hold
GPU_WORKSPACE = 256 * 2**20  # the same on a GPU


@dataclass(frozen=True, eq=False)
class Block(ABC):
    """Columns of a Jacobian that belong to one layer or parameter."""

    kind: ClassVar[str]  # name of the form, also in what travels
    settings: ClassVar[tuple[str, ...]]  # names of the attributes that travel beside `arrays`
    fields: ClassVar[tuple[str, ...]]  # names of the attributes in `arrays`
    integers: ClassVar[int] = 0  # number of leading `arrays` that hold integers

    @property
    def layout(self) -> dict[str, Any]:
        """JSON-ready description: the kind, the names of the parameters, and what else it takes."""
        values = {name: getattr(self, name) for name in self.settings}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {"kind": self.kind, **values, **lists}

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the parameters held."""

    @property
    @abstractmethod
    def path(self) -> str:
        """In words: where the block comes from and how its gram matrix is computed."""

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Tensors the block consists of, each with n rows."""
        return tuple(getattr(self, name) for name in self.fields)

    @property
    def num_outputs(self) -> int:
        """Number C of network outputs: the second size of the last of `arrays`."""
        return self.arrays[-1].shape[1] if self.arrays[-1].ndim > 1 else 0

    @property
    @abstractmethod
    def dense_size(self) -> int:
        """Numbers per example that the block would take dense."""

    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:
        """Return the same block made of other tensors."""
        return replace(self, **dict(zip(self.fields, arrays, strict=True)))

    def rows(self, rows: slice) -> Self:
        """Return the block of some examples."""
        return self.with_arrays([array[rows] for array in self.arrays])

    def of_output(self, output: int) -> Self:
        """Return the block of only one of the C outputs."""
        *shared, outputs = self.arrays
        return self.with_arrays([*shared, outputs[:, output : output + 1]])

    def expanded(self) -> "Block":
        """Return the block without weights of the network in it: what rows hold is all it needs."""
        return self

    @abstractmethod
    def add_gram(self, kernel: Tensor, other: Self) -> None:
        """Add inner products over outputs and parameters to `kernel`, shape (n, m), in place.

        If `other` is the block itself, entries below the diagonal may be left out.
        """

    @abstractmethod
    def vjp(self, residual: Tensor) -> dict[str, Tensor]:
        """``J^T R`` for the block's parameters."""

    @abstractmethod
    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:
        """``J u`` from the block's parameters, shape (n, C)."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Diagonal of the gram matrix in float64, shape (n,)."""

    def squares(self) -> dict[str, Tensor]:
        """Parameter name -> squares summed over examples and outputs, of the parameter's shape."""
        totals: dict[str, Tensor] = {}
        last = self.arrays[-1]
        size = max(1, workspace(last.device) // (self.dense_size * last.element_size()))
        for start in range(0, len(last), size):
            for name, tensor in self.rows(slice(start, start + size)).dense().items():
                part = tensor.square().sum((0, 1))
                totals[name] = totals[name] + part if name in totals else part
        return totals

    @abstractmethod
    def dense(self) -> dict[str, Tensor]:
        """Parameter name -> tensor of shape (n, C, *parameter shape)."""

    @abstractmethod
    def write_columns(self, name: str, indices: Tensor, out: Tensor) -> None:
        """Write columns of a parameter's flattened coordinates `indices` into `out` (n, C, k).

        It may have any strides and floating dtype.
        """

    @abstractmethod
    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
        """Shapes that `arrays` must have, without the n rows, from the parameters' shapes.

        C is written as -1. A ValueError says that the layout does not fit the parameters.
        """


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """Jacobian with respect to one parameter."""

    name: str  # of the parameter
    values: Tensor  # d f_c(x_i) / d w, (n, C, *parameter shape)
    path: str = "dense"  # not sent
    kind, settings, fields = "dense", ("name",), ("values",)

    @property
    def names(self) -> tuple[str, ...]:  # noqa: D102
        return (self.name,)

    @property
    def dense_size(self) -> int:  # noqa: D102
        return self.values[0].numel()

    def add_gram(self, kernel: Tensor, other: Self) -> None:  # noqa: D102
        left, right = self.values.flatten(1), other.values.flatten(1)
        for rows, cols in tiles(*kernel.shape, symmetric=other is self):
            kernel[rows, cols].addmm_(left[rows], right[cols].T)

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        flat = residual.flatten() @ self.values.reshape(residual.numel(), -1)
        return {self.name: flat.view(self.values.shape[2:])}

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        return self.values.reshape(*self.values.shape[:2], -1) @ update[self.name].flatten()

    def squared_norms(self) -> Tensor:  # noqa: D102
        return squared_row_norms(self.values.flatten(1))

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        return {self.name: self.values}

    def write_columns(self, name: str, indices: Tensor, out: Tensor) -> None:  # noqa: D102
        n, outputs = self.values.shape[:2]
        flat = self.values.reshape(n * outputs, -1)
        out.copy_(flat.index_select(1, indices).view(n, outputs, -1))

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        return [(-1, *parameters[self.name])]


@dataclass(frozen=True, eq=False)
class LayerBlock(Block):
    """Jacobian of a layer's weight, and of its bias if it has one."""

    weight: str  # name of the trainable parameter
    bias: str | None
    settings: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @property
    def names(self) -> tuple[str, ...]:  # noqa: D102
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def check_bias(self, width_out: int, parameters: Mapping[str, Sequence[int]]) -> None:
        """Raise ValueError unless the bias is that of a layer with so many outputs."""
        if self.bias is not None and tuple(parameters[self.bias]) != (width_out,):
            raise ValueError("weight and bias are of different layers")


def squared_row_norms(rows: Tensor) -> Tensor:
    """Squared norms of rows (n, k), in float64, by pieces that stay in the processor's cache."""
    pieces = rows.split(max(1, AT_WORK // max(1, len(rows))), dim=1)
    zeros = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    return sum((piece.double().square().sum(1) for piece in pieces), zeros)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Sum of at least one tensor."""
    return sum(parts[1:], parts[0])


def workspace(device: torch.device) -> int:
    """Bytes of intermediate results that a block may hold on a device."""
    return WORKSPACE if device.type == "cpu" else GPU_WORKSPACE


def tile_size(device: torch.device) -> int:
    """Rows and columns of a kernel that are worked on at a time, where memory allows it."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def tiles(n: int, m: int, *, symmetric: bool, size: int = TILE) -> Iterator[tuple[slice, slice]]:
    """Tiles of an (n, m) matrix; of a symmetric one, those on and above the diagonal."""
    for i in range(0, n, size):
        for j in range(i if symmetric else 0, m, size):
            yield slice(i, min(i + size, n)), slice(j, min(j + size, m))
