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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .errors import BadReply
from .memory import require_memory

__all__ = ["DenseBlock", "Jacobian", "LinearBlock", "Structure", "jacobian"]

Structure = Literal["factored", "dense"]
MAX_LAYOUT_BYTES = 1_000_000


class Block(ABC):
    """Columns of a Jacobian that belong to one layer or parameter."""

    kind: str

    @property
    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """JSON-ready description: the kind and the names of the parameters."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[Tensor, ...]:
        """Tensors the block consists of, each with n rows."""

    @abstractmethod
    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:
        """Return the same block made of other tensors."""

    @abstractmethod
    def gram(self, other: Self) -> Tensor:
        """Inner products summed over outputs and parameters, shape (n, m)."""

    @abstractmethod
    def vjp(self, residual: Tensor) -> dict[str, Tensor]:
        """``J^T R`` for the block's parameters."""

    @abstractmethod
    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:
        """``J u`` from the block's parameters, shape (n, C)."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Diagonal of the gram matrix in float64, shape (n,)."""

    @abstractmethod
    def dense(self) -> dict[str, Tensor]:
        """Parameter name -> tensor of shape (n, C, *parameter shape)."""

    @abstractmethod
    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
        """Shapes that `arrays` must have, from the parameters' shapes, without the n rows.

        C is written as -1.
        """


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """Jacobian with respect to one parameter.

    Attributes
    ----------
    name : str
        The parameter's name in ``model.named_parameters()``.
    values : Tensor, shape (n, C, *parameter shape)
        d f_c(x_i) / d w.
    """

    name: str
    values: Tensor
    kind = "dense"

    @property
    def layout(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": self.kind, "name": self.name}

    @property
    def arrays(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.values,)

    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:  # noqa: D102
        return type(self)(self.name, *arrays)

    def gram(self, other: Self) -> Tensor:  # noqa: D102
        return self.values.flatten(1) @ other.values.flatten(1).T

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        flat = residual.flatten() @ self.values.reshape(residual.numel(), -1)
        return {self.name: flat.view(self.values.shape[2:])}

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        return self.values.reshape(*self.values.shape[:2], -1) @ update[self.name].flatten()

    def squared_norms(self) -> Tensor:  # noqa: D102
        return self.values.flatten(1).double().square().sum(1)

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        return {self.name: self.values}

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        return [(-1, *parameters[self.name])]


@dataclass(frozen=True, eq=False)
class LinearBlock(Block):
    """Jacobian with respect to a linear layer that is used once, in factors.

    Attributes
    ----------
    weight, bias : str or None
        Names of the layer's trainable parameters; None where there is none or it is frozen.
    inputs : Tensor, shape (n, d_in)
        The layer's input activations a.
    gradients : Tensor, shape (n, C, d_out)
        Gradients g of each network output with respect to the layer's outputs.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor
    gradients: Tensor
    kind = "linear"

    @property
    def layout(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": self.kind, "weight": self.weight, "bias": self.bias}

    @property
    def arrays(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.inputs, self.gradients)

    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:  # noqa: D102
        return type(self)(self.weight, self.bias, *arrays)

    def gram(self, other: Self) -> Tensor:  # noqa: D102
        gradients = self.gradients.flatten(1) @ other.gradients.flatten(1).T
        if self.weight is None:
            return gradients
        inputs = self.inputs @ other.inputs.T
        return gradients.mul_(inputs if self.bias is None else inputs.add_(1.0))

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        weighted = torch.bmm(residual.unsqueeze(1), self.gradients).squeeze(1)
        update = {}
        if self.weight is not None:
            update[self.weight] = weighted.T @ self.inputs
        if self.bias is not None:
            update[self.bias] = weighted.sum(0)
        return update

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        change = self.gradients.new_zeros(len(self.gradients), self.gradients.shape[2])
        if self.weight is not None:
            change = change + self.inputs @ update[self.weight].T
        if self.bias is not None:
            change = change + update[self.bias]
        return torch.bmm(self.gradients, change.unsqueeze(2)).squeeze(2)

    def squared_norms(self) -> Tensor:  # noqa: D102
        gradients = self.gradients.flatten(1).double().square().sum(1)
        if self.weight is None:
            return gradients
        return gradients * (self.inputs.double().square().sum(1) + (self.bias is not None))

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        tensors = {}
        if self.weight is not None:
            tensors[self.weight] = self.gradients.unsqueeze(3) * self.inputs[:, None, None, :]
        if self.bias is not None:
            tensors[self.bias] = self.gradients
        return tensors

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        width_in, width_out = 0, 0
        if self.bias is not None:
            (width_out,) = parameters[self.bias]
            width_in = self.inputs.shape[1] if self.inputs.ndim == 2 else 0
        if self.weight is not None:
            width_out_of_weight, width_in = parameters[self.weight]
            if self.bias is not None and width_out_of_weight != width_out:
                raise ValueError("weight and bias are of different layers")
            width_out = width_out_of_weight
        return [(width_in,), (-1, width_out)]


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


def jacobian(
    model: nn.Module,
    x: Tensor,
    *,
    structure: Structure = "factored",
    chunk_size: int = 256,
) -> Jacobian:
    """Jacobian of the model's outputs with respect to its trainable parameters, at its weights.

    The model runs in evaluation mode: dropout is off and BatchNorm uses its running statistics,
    so that an example's row depends on that example alone.

    Parameters
    ----------
    model : nn.Module
        Maps (n, ...) to (n, C). Parameters with ``requires_grad=False`` are left out.
    x : Tensor, shape (n, ...)
        The examples, on the model's device.
    structure : {"factored", "dense"}
        ``"dense"`` is the definition, by ``torch.func``. ``"factored"`` keeps linear layers that
        are used once, on (n, d) inputs, in factors, and the other parameters dense; it is exact.
    chunk_size : int
        How many examples go through the model at a time.

    Returns
    -------
    Jacobian
        On the CPU, in the model's dtype. A dense parameter takes n C times its own size; a
        factored layer n (d_in + C d_out) numbers.

    Raises
    ------
    ValueError
        If there are no examples, no trainable parameters, or the output is not (n, C).
    NotEnoughMemory
        If the dense part would not fit.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> jac = jacobian(model, torch.ones(4, 3))
    >>> jac.gram().shape  # each entry is x.x' + 1 = 4
    torch.Size([4, 4])
    """
    if structure not in ("factored", "dense"):
        raise ValueError(f"structure: expected 'factored' or 'dense', got {structure!r}")
    if len(x) == 0:
        raise ValueError("jacobian: expected at least one example, got none")
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("jacobian: expected a model with trainable parameters, got none")
    with _evaluation_mode(model):
        num_outputs = _num_outputs(model, x[:1])
        linear = _linear_layers(model, x[:1]) if structure == "factored" else {}
        in_factors = {p for _, weight, bias in linear.values() for p in (weight, bias)}
        rest = {name: p for name, p in parameters.items() if name not in in_factors}
        size = sum(p.numel() * p.element_size() for p in rest.values())
        require_memory(
            2 * len(x) * num_outputs * size,
            f"joining the dense Jacobian of {len(x)} examples x {num_outputs} outputs",
            cure="use fewer examples at a time",
        )
        parts = []
        for chunk in x.split(chunk_size):
            blocks: list[Block] = []
            if linear:
                blocks += _linear_blocks(model, chunk, linear, num_outputs)
            if rest:
                blocks += _dense_blocks(model, chunk, rest)
            parts.append(Jacobian(tuple(blocks)).to("cpu"))
    return parts[0] if len(parts) == 1 else Jacobian.concatenate(parts)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _num_outputs(model: nn.Module, example: Tensor) -> int:
    with torch.no_grad():
        shape = tuple(model(example).shape)
    if len(shape) != 2 or shape[0] != 1:
        raise ValueError(f"jacobian: expected outputs of shape (n, C), got {shape} for n = 1")
    return int(shape[1])


LinearLayers = dict[str, tuple[nn.Linear, str | None, str | None]]


def _linear_layers(model: nn.Module, example: Tensor) -> LinearLayers:
    """Linear layers whose parameters enter the outputs through one call, a row for each example.

    Seen by running 2 and then 3 copies of an example: the rows must follow.
    """
    layers, others = (_linear_layers_of(model, torch.cat([example] * n)) for n in (2, 3))
    return {name: layer for name, layer in layers.items() if name in others}


def _linear_layers_of(model: nn.Module, examples: Tensor) -> LinearLayers:
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters
    }
    with _captured(candidates) as calls, torch.enable_grad():
        uses = _uses_of_parameters(model(examples))
    layers: LinearLayers = {}
    for name, module in candidates.items():
        own = [p for p in (module.weight, module.bias) if p is not None and p in names]
        if (
            own
            and len(calls[name]) == 1
            and calls[name][0][0].ndim == 2
            and len(calls[name][0][0]) == len(examples)
            and all(uses[p] == 1 for p in own)
        ):
            bias = None if module.bias is None else names.get(module.bias)
            layers[name] = (module, names.get(module.weight), bias)
    return layers


def _uses_of_parameters(outputs: Tensor) -> Counter[Tensor]:
    """How many operations of the graph behind `outputs` read each parameter."""
    uses: Counter[Tensor] = Counter()
    seen, stack = set(), [outputs.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for parent, _ in node.next_functions:
            if parent is not None and hasattr(parent, "variable"):
                uses[parent.variable] += 1
            stack.append(parent)
    return uses


@contextmanager
def _captured(
    modules: Mapping[str, nn.Module],
) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record (input, output) of each call of `modules`."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}

    def record(name: str) -> Any:
        def hook(
            _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
        ) -> Tensor:
            (given,) = (*args, *named.values())
            calls[name].append((given.detach().clone(), output))
            return output.clone()  # what follows may work in place; `output` must stay as it is

        return hook

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _linear_blocks(
    model: nn.Module, x: Tensor, layers: LinearLayers, num_outputs: int
) -> list[Block]:
    with _captured({name: module for name, (module, _, _) in layers.items()}) as calls:
        with torch.enable_grad():
            outputs = model(x)
        inputs = {name: calls[name][0][0] for name in layers}
        points = [calls[name][0][1] for name in layers]
    totals = outputs.sum(0)
    per_output = [
        torch.autograd.grad(totals[c], points, retain_graph=c + 1 < num_outputs)
        for c in range(num_outputs)
    ]
    return [
        LinearBlock(weight, bias, inputs[name], torch.stack(gradients, dim=1))
        for (name, (_, weight, bias)), gradients in zip(
            layers.items(), zip(*per_output, strict=True), strict=True
        )
    ]


def _dense_blocks(model: nn.Module, x: Tensor, parameters: dict[str, Tensor]) -> list[Block]:
    def outputs(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (example.unsqueeze(0),))
        return result.squeeze(0)

    per_example = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))
    tensors = per_example(parameters, x)
    return [DenseBlock(name, tensors[name].detach()) for name in parameters]
