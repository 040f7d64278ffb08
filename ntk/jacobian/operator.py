"""Per-example Jacobians of a network, as a small linear operator.

A :class:`Jacobian` of n examples and C outputs over the trainable parameters is a row of blocks,
one for each layer or parameter: :class:`~.blocks.DenseBlock` holds the definition,
``d f_c(x_i) / d w``, of shape (n, C, *w); the others hold a layer's inputs ``a`` and output
gradients ``g``, the factors of the Jacobian, and never build anything of size n C d_in d_out.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 3.2,
eq. (4) and (6), and section 4.1, eq. (8). The factored form is exact, and as revealing: for a first
layer with a bias, ``a`` is the client's input itself, in either form.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..losses import Loss, hessian_root, output_scale
from ..support.memory import require_memory
from ..support.precision import full_float32
from .blocks import Block, DenseBlock, tile_size, tiles, workspace
from .readout import ReadoutBlock

SHARED = "shared"  # kind of a layout's entry that is no block


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Jacobian of n examples by C outputs over the trainable parameters, in blocks of columns."""

    blocks: tuple[Block, ...]
    shared: Mapping[str, str] = field(default_factory=dict)  # further name -> the one in a block

    @property
    def num_examples(self) -> int:
        """Number n of examples."""
        return len(self.blocks[0].arrays[0])

    @property
    def num_outputs(self) -> int:
        """Number C of network outputs."""
        return self.blocks[0].num_outputs

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(array.nbytes for block in self.blocks for array in block.arrays)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all that is not a token."""
        return self.blocks[0].arrays[-1].dtype

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self.blocks[0].arrays[-1].device

    @property
    def form(self) -> tuple[Any, ...]:
        """Properties that Jacobians must share to be stacked: layout, row shapes and dtypes."""
        rows = [(tuple(a.shape[1:]), a.dtype) for block in self.blocks for a in block.arrays]
        return (self.layout, *rows)

    @property
    def layout(self) -> str:
        """Parameters that are held, and in what form, as JSON."""
        shared = [{"kind": SHARED, "name": n, "of": first} for n, first in self.shared.items()]
        return json.dumps([*(block.layout for block in self.blocks), *shared])

    @full_float32()
    def gram(self, other: "Jacobian | None" = None) -> Tensor:
        """Empirical tangent kernel H_ij = (1/C) <J(x_i), J(x_j)>_F, shape (n, m): eq. (6).

        `other`, by default itself, has the m examples of the columns, in the same form.
        """
        other = self if other is None else self._compatible(other)
        n, m, dtype = self.num_examples, other.num_examples, self.dtype
        require_memory(
            self.gram_bytes(m),
            f"the kernel of {n} x {m} examples",
            device=self.device,
            cure="sample fewer clients a round or fewer examples on each",
        )
        kernel = torch.zeros(n, m, dtype=dtype, device=self.device)
        for block, other_block in zip(self.blocks, other.blocks, strict=True):
            block.add_gram(kernel, other_block)
        if other is self:
            for rows, cols in tiles(n, m, symmetric=True, size=tile_size(self.device)):
                upper = kernel[rows, cols] if rows != cols else kernel[rows, cols].triu()
                kernel[cols, rows] = upper.T if rows != cols else upper + upper.triu(1).T
        return kernel.div_(self.num_outputs)

    def gram_bytes(self, num_others: int | None = None) -> int:
        """Bytes that :meth:`gram` takes: the kernel with m other examples, and one block's part."""
        m = self.num_examples if num_others is None else num_others
        return self.dtype.itemsize * self.num_examples * m + 2 * workspace(self.device)

    @full_float32()
    def mean_product(self, matrix: Tensor) -> Tensor:
        """``H V`` (n, K) without building H, by C K times a :meth:`vjp` and a :meth:`jvp`."""
        product = torch.zeros_like(matrix)
        for block in self.blocks:
            for output in range(self.num_outputs):
                of_output = block.of_output(output)
                for k in range(matrix.shape[1]):
                    column = matrix[:, k : k + 1]
                    product[:, k : k + 1] += of_output.jvp(of_output.vjp(column))
        return product.div_(self.num_outputs)

    @full_float32()
    def full_product(self, residual: Tensor) -> Tensor:
        """``J J^T R`` with all outputs coupled, (n, C); no kernel is built."""
        product = torch.zeros_like(residual)
        for block in self.blocks:
            product += block.jvp(block.vjp(residual))
        return product

    @full_float32()
    def vjp(self, residual: Tensor) -> dict[str, Tensor]:
        """``J^T R`` of R (n, C): each parameter's update in eq. (9b)."""
        return {name: t for block in self.blocks for name, t in block.vjp(residual).items()}

    @full_float32()
    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:
        """Linearised change (n, C) of the outputs by an update of all parameters held: eq. (4)."""
        first, *others = self.blocks
        return sum((block.jvp(update) for block in others), first.jvp(update))

    @full_float32()
    def combine(self, weights: Tensor) -> "Jacobian":
        """Jacobian of K weighted sums of each example's outputs, ``sum_c M_ick f_c(x_i)``.

        M is (n, C, K): the gradient of a loss by the outputs gives the examples' gradients.
        """
        blocks = []
        for block in self.expanded().blocks:
            *shared, tensor = block.arrays
            sums = torch.bmm(weights.transpose(1, 2), tensor.reshape(*tensor.shape[:2], -1))
            sums = sums.view(*sums.shape[:2], *tensor.shape[2:])
            blocks.append(block.with_arrays([*shared, sums]))
        return replace(self, blocks=tuple(blocks))

    def normal_product(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``J^T J u``, summed over examples and outputs, for an update u of all parameters held."""
        return self.vjp(self.jvp(update))

    def normal_diagonal(self) -> dict[str, Tensor]:
        """Diagonal of ``J^T J``: parameter name -> tensor of its shape."""
        return {name: t for block in self.blocks for name, t in block.squares().items()}

    @full_float32()
    def normal_matrix(self, names: Sequence[str]) -> Tensor:
        """Rows and columns of ``J^T J`` that belong to some parameters, flattened in that order."""
        held = {name: block for block in self.blocks for name in block.names}
        if unknown := [name for name in names if name not in held]:
            raise ValueError(f"names: expected some of {', '.join(held)}, got {unknown}")
        blocks = dict.fromkeys(held[name] for name in names)
        first = {name: t for b in blocks for name, t in b.rows(slice(0, 1)).dense().items()}
        size = sum(first[name][0, 0].numel() for name in names)
        matrix = torch.zeros(size, size, dtype=self.dtype, device=self.device)
        row = sum(block.dense_size for block in blocks) * self.dtype.itemsize
        step = max(1, workspace(self.device) // row)
        for start in range(0, self.num_examples, step):
            part = Jacobian(tuple(b.rows(slice(start, start + step)) for b in blocks)).dense()
            flat = torch.cat([part[n].reshape(*part[n].shape[:2], -1) for n in names], 2)
            matrix.addmm_(flat.flatten(0, 1).T, flat.flatten(0, 1))
        return matrix

    def squared_norms(self) -> Tensor:
        """Squared Frobenius norm of each example's Jacobian, float64, shape (n,)."""
        return torch.stack([block.squared_norms() for block in self.blocks]).sum(0)

    @full_float32()
    def dense(self) -> dict[str, Tensor]:
        """Parameter name -> tensor of shape (n, C, *parameter shape): the paper's tensor."""
        return {name: t for block in self.blocks for name, t in block.dense().items()}

    def to_dense(self) -> "Jacobian":
        """Return the same Jacobian with every block dense: the paper's literal tensor."""
        size = sum(block.dense_size for block in self.blocks)
        require_memory(
            self.num_examples * size * self.dtype.itemsize,
            f"the dense Jacobian of {self.num_examples} examples x {self.num_outputs} outputs",
            device=self.device,
            cure="keep it factored, or use fewer examples at a time",
        )
        return replace(self, blocks=tuple(DenseBlock(name, t) for name, t in self.dense().items()))

    def expanded(self) -> "Jacobian":
        """Return the same Jacobian in a form that needs no weights of the network beside it."""
        return replace(self, blocks=tuple(block.expanded() for block in self.blocks))

    def to(self, device: torch.device | str) -> "Jacobian":
        """Return the Jacobian with its tensors on `device`."""
        return self.mapped(lambda array: array.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Jacobian":
        """Return the Jacobian with each of its tensors changed."""
        blocks = tuple(b.with_arrays([change(a) for a in b.arrays]) for b in self.blocks)
        return replace(self, blocks=blocks)

    def describe(self) -> str:
        """Return a table of each layer's path, and of its size per example.

        Examples
        --------
        >>> from fedntk.ntk import jacobian
        >>> model = torch.nn.Sequential(torch.nn.Linear(784, 100), torch.nn.Linear(100, 10))
        >>> print(jacobian(model, torch.zeros(1, 784)).describe())
        parameters        path                            kB an example  dense kB
        0.weight, 0.bias  linear, read out by 1.weight              3.5    3140.0
        1.weight, 1.bias  linear, the outputs                       0.4      40.4
        all                                                         4.0    3180.4
        """
        held = [sum(array[:1].nbytes for array in block.arrays) for block in self.blocks]
        dense = [block.dense_size * self.dtype.itemsize for block in self.blocks]
        words = [(", ".join(block.names), block.path) for block in self.blocks]
        sizes = zip([*held, sum(held)], [*dense, sum(dense)], strict=True)
        rows = [("parameters", "path", "kB an example", "dense kB")]
        for (names, path), (a, b) in zip([*words, ("all", "")], sizes, strict=True):
            rows.append((names, path, f"{a / 1e3:.1f}", f"{b / 1e3:.1f}"))
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{names:{widths[0]}}{path:{widths[1]}}{a:>{widths[2]}}{b:>{widths[3]}}"
            for names, path, a, b in rows
        )

    def empty(self, num_examples: int, device: torch.device | str | None = None) -> "Jacobian":
        """Return a Jacobian of this form for another number of examples, not yet filled."""
        return self.mapped(
            lambda array: array.new_empty(num_examples, *array.shape[1:], device=device)
        )

    def fill(self, start: int, part: "Jacobian") -> None:
        """Copy `part` over the examples from `start` on, from any device."""
        for block, source in zip(self.blocks, part.blocks, strict=True):
            for array, rows in zip(block.arrays, source.arrays, strict=True):
                array[start : start + len(rows)] = rows

    @staticmethod
    def concatenate(parts: Sequence["Jacobian"]) -> "Jacobian":
        """Stack the examples of Jacobians of one form, in their order: eq. (8)."""
        if not parts:
            raise ValueError("Jacobian.concatenate: expected at least one Jacobian, got none")
        if not all(parts[0]._has_weights_of(part) for part in parts):
            parts = [part.expanded() for part in parts]
        whole, start = parts[0].empty(sum(part.num_examples for part in parts)), 0
        for part in parts:
            whole.fill(start, parts[0]._compatible(part))
            start += part.num_examples
        return whole

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the network that the blocks hold beside what is sent, by name."""
        blocks = [block for block in self.blocks if isinstance(block, ReadoutBlock)]
        return {block.readout: block.matrix for block in blocks if block.matrix is not None}

    def _has_weights_of(self, other: "Jacobian") -> bool:
        mine, others = self.weights, other.weights
        return all(torch.equal(mine[name], others[name]) for name in mine.keys() & others.keys())

    def _compatible(self, other: "Jacobian") -> "Jacobian":
        if self.form != other.form:
            raise ValueError(
                f"Jacobians of different parameters, form or outputs: {self.form} and {other.form}"
            )
        return other


def gauss_newton(jacobian: Jacobian, outputs: Tensor, loss: Loss) -> Jacobian:
    """Return G: its ``normal_product``, ``normal_diagonal`` and ``normal_matrix`` are the matrix's.

    The Gauss-Newton matrix of the loss averaged over examples, as in :mod:`fedntk.ntk.losses`, is
    ``sum_i J_i^T H_i J_i`` with H_i = L_i L_i^T the Hessian by the outputs, so G_i = L_i^T J_i has
    the size of J. `outputs` (n, C) are those of the Jacobian's examples. For both losses it is also
    the Fisher information (Martens, *New Insights and Perspectives on the Natural Gradient Method*,
    JMLR 2020, section 9.2).

    Examples
    --------
    >>> from fedntk.ntk import gauss_newton, jacobian
    >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    >>> ggn = gauss_newton(jacobian(model, x), model(x).detach(), "cross-entropy")
    >>> ggn.normal_diagonal()["weight"].shape, ggn.normal_matrix(["weight", "bias"]).shape
    (torch.Size([2, 3]), torch.Size([8, 8]))
    """
    scale = output_scale(len(outputs), outputs.shape[1], loss)
    return jacobian.combine(scale**0.5 * hessian_root(outputs, loss))
