"""Jacobians of a network: by ``torch.func``, or layer by layer, in factors if these are smaller."""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..support.memory import available_memory, require_memory
from ..support.precision import full_float32
from ..support.shared_arrays import other_names
from .attention import no_fast_path, separate_projections
from .blocks import Block, DenseBlock
from .layers import Calls, Seen, capture, find_layers, written_over
from .one_example import check_function_of_one_example, evaluation_mode
from .operator import Jacobian
from .rows import draw_weights, keeps_rows, rows_of_examples
from .rules import Layer, read_out
from .structure import graph_of, keep, structure_of

Structure = Literal["factored", "dense"]
LossFunction = Callable[[Tensor, Tensor], Tensor]
CHUNK_BYTES = 64 * 2**20
GPU_CHUNK_BYTES = 2**30  # a GPU is idle between small chunks
LARGE_CHUNK_BYTES = 512 * 2**20  # the same for norms, or for chunks that would be smaller than FEW
FEW = 16  # examples; convolutions are slow in smaller chunks
MAX_CHUNK = 1024
MAX_PLANS = 64
MAX_GRAPHS = 16
AS_IT_IS = "differentiated as it is"
BUT_RULE = ", since its layer's rule does not hold"
HOOKED = (
    "jacobian: expected that a backward pass gives the network's derivatives, got others; remove "
    "hooks that change gradients, of modules (register_full_backward_hook), parameters and tensors "
    "(register_hook)"
)


def jacobian(
    model: nn.Module,
    x: Tensor,
    *,
    structure: Structure = "factored",
    chunk_size: int | None = None,
    outputs: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Jacobian:
    """Jacobian of the model's outputs with respect to its trainable parameters, at its weights.

    The model runs in evaluation mode. A model in which an example's outputs do not repeat, or
    depend on other examples, is refused (:func:`~.one_example.check_function_of_one_example`); it
    may reorder its examples if it puts them back.

    ``structure="factored"`` has a rule for linear layers (over any number of positions, called any
    number of times), convolutions and transposed ones, embeddings, the projections of multi-head
    attention, BatchNorm, GroupNorm, LayerNorm and RMSNorm. Parameters that enter the outputs in any
    other way are differentiated as they are, by ``torch.func``. The result is exact in either case;
    :meth:`Jacobian.describe` says which path each parameter took. Findings about a network are kept
    for networks of the same structure, and compared with the graph of each call; where that does
    not show that row i of a layer is example i, one more backward pass a chunk finds the rows.
    Forward hooks and parametrisations are part of the network. Hooks that change gradients are not,
    unless they do it for each example by itself: ValueError.

    Peak memory is about ``n r`` bytes on `device` for the result and ``b w`` on the model's device
    for a chunk of b examples, with ``w = 2 r + (2 + C) a``: r is the size of an example's blocks,
    a that of the outputs of all modules without children. Parameters without a rule, of size p,
    make it ``w = 2 r + (2 + 2 C) a + 4 C p``. If the sum does not fit, NotEnoughMemory is raised.
    On a GPU all outputs are differentiated at once (up to C a more), or one by one if that does not
    fit.

    Parameters
    ----------
    model : nn.Module
        Map from (n, ...) to (n, C). Outputs of another shape are flattened to (n, C). Parameters
        with ``requires_grad=False`` are left out.
    x : Tensor, shape (n, ...)
        Examples, on the model's device.
    structure : {"factored", "dense"}
        ``"dense"`` is the definition, by ``torch.func``: the tensor (n, C, *parameter shape).
    chunk_size : int, optional
        Examples b that go through the model at a time; by default as many as make b w at most
        64 MiB, or 16 if they fit into 512 MiB; 1 GiB on a GPU with over 2 GiB free. At most 1,024.
    outputs : sequence of int, optional
        Outputs of the network to differentiate; all by default.
    device : str or torch.device
        Where the result is; the CPU by default, since a GPU has room for fewer examples.

    Returns
    -------
    Jacobian
        In the model's dtype; a constant, through which nothing is differentiated.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> jac = jacobian(model, torch.ones(4, 3))
    >>> jac.gram().shape  # each entry is x.x' + 1 = 4
    torch.Size([4, 4])
    """
    if structure not in ("factored", "dense"):
        raise ValueError(f"structure: expected 'factored' or 'dense', got {structure!r}")
    with differentiate_in_chunks(model, x, structure, outputs, chunk_size) as parts:
        return _collect(x, parts, device)


def example_gradients(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    loss: LossFunction,
    *,
    chunk_size: int | None = None,
) -> Jacobian:
    """Gradient of each example's loss: the Jacobian of one output, the loss, by one backward pass.

    `targets` (n, ...) are on the model's device. `loss` is (outputs, targets) -> loss of each
    example, shape (n,), which depends only on the example's own outputs and target.

    Examples
    --------
    >>> model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none")
    >>> rows = example_gradients(model, torch.ones(4, 3), torch.ones(4).long(), loss)
    >>> rows.dense()["weight"].shape
    torch.Size([4, 1, 2, 3])
    """
    objective = _Objective(loss, targets)
    with differentiate_in_chunks(model, x, chunk_size=chunk_size, objective=objective) as parts:
        return _collect(x, parts)


def gradient_norms(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    loss: LossFunction,
    *,
    chunk_size: int | None = None,
) -> Tensor:
    """Norm of each example's gradient by all trainable parameters: float64, (n,), on the CPU.

    Exact; gradients that are larger than their factors are never formed. Arguments are those of
    :func:`example_gradients`; by default a chunk takes at most 512 MiB, or 1 GiB on a GPU that has
    twice as much free.
    """
    squares = torch.empty(len(x), dtype=torch.float64)
    objective = _Objective(loss, targets)
    chunks = differentiate_in_chunks(
        model, x, chunk_size=chunk_size, chunk_bytes=LARGE_CHUNK_BYTES, objective=objective
    )
    with chunks as parts:
        for start, part in parts:
            squares[start : start + part.num_examples] = part.squared_norms()
    return squares.sqrt()


def _collect(
    x: Tensor, parts: Iterator[tuple[int, Jacobian]], device: torch.device | str = "cpu"
) -> Jacobian:
    n, result = len(x), Jacobian(())
    for start, part in parts:
        if start == 0:  # it may come again, in another form
            example_bytes = part.nbytes // part.num_examples
            require_memory(
                n * example_bytes,
                f"the Jacobian of {n} examples x {part.num_outputs} outputs "
                f"({example_bytes / 1e6:.1f} MB an example)",
                device=device,
                cure="use fewer examples at a time",
            )
            if part.num_examples == n and part.device == torch.device(device):
                return part.mapped(lambda array: _without_view(array, x))
            result = part.empty(n, device=device)
        result.fill(start, part)
    return result


def _without_view(array: Tensor, x: Tensor) -> Tensor:
    """Return the array, or a copy if it is a part of a larger one, or of the examples."""
    storage, of_x = array.untyped_storage(), x.untyped_storage()
    whole = array.is_contiguous() and storage.nbytes() == array.nbytes
    if whole and storage.data_ptr() != of_x.data_ptr():
        return array
    return array.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Objective:
    """What is differentiated for each example: the network's outputs, or a loss of these."""

    loss: LossFunction | None
    targets: Tensor  # anything with a row for each example, without a loss

    def rows(self, rows: slice) -> "_Objective":
        return replace(self, targets=self.targets[rows])

    def __call__(self, outputs: Tensor) -> Tensor:
        if self.loss is None:
            return outputs
        losses = self.loss(outputs.clone(), self.targets.clone())  # it may write into them
        if losses.shape != (len(outputs),):
            raise ValueError(
                f"loss: expected one of each of {len(outputs)} examples, shape "
                f"({len(outputs)},), got {tuple(losses.shape)}; use reduction='none'"
            )
        return losses


@contextmanager
def differentiate_in_chunks(
    model: nn.Module,
    x: Tensor,
    structure: Structure | Literal["factors"] = "factored",
    outputs: Sequence[int] | None = None,
    chunk_size: int | None = None,
    more_bytes: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    objective: _Objective | None = None,
) -> Iterator[Iterator[tuple[int, Jacobian]]]:
    """Yield an iterator over the Jacobians of chunks, each with the position of its first example.

    They are on the model's device. If a later chunk shows that a layer's rule does not hold, the
    iterator begins again at 0, without that rule: only the last chunks from 0 on count. The
    structure ``"factors"`` also keeps larger factors; `more_bytes` are extra bytes per example that
    the caller allocates; an `objective` is differentiated in place of the outputs.
    """
    if len(x) == 0:
        raise ValueError("jacobian: expected at least one example, got none")
    if x.requires_grad:
        raise ValueError(
            "jacobian: expected examples without requires_grad, since the result cannot be "
            "differentiated; pass x.detach(), or use torch.func.jacrev"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    outputs = outputs if objective is None else [0]
    objective = objective or _Objective(None, x)
    attention = nullcontext() if structure == "dense" else separate_projections(model)
    with evaluation_mode(model), ExitStack() as stack:
        form = structure_of(model)  # before attention gets its projections
        shared = other_names(model)
        chosen = None if outputs is None else tuple(outputs)
        key = form and (form, x.shape[1:], x.dtype, x.device, structure, chosen)
        for context in (no_fast_path(model), torch.enable_grad(), full_float32()):
            stack.enter_context(context)
        check_function_of_one_example(model, x, form)
        stack.enter_context(attention)
        plan = _PLANS.get(key) or _Plan.make(model, x, structure, outputs)

        def parts() -> Iterator[tuple[int, Jacobian]]:
            nonlocal plan
            start, is_new, hooked = 0, False, _has_gradient_hooks(model)
            while start < len(x):
                if start == 0:
                    size = chunk_size or _chunk_size(plan, x, more_bytes, chunk_bytes)
                rows = slice(start, start + size)
                chunk, targets = x[rows], objective.rows(rows)
                try:
                    part = plan.differentiate(model, chunk, targets)
                except _RuleError as error:
                    # of another graph than that of a kept plan, layers are found again, once
                    again = start == 0 and not error.parameters and not is_new
                    every = dict(model.named_parameters())
                    without = set() if again else plan.without | (error.parameters or every.keys())
                    plan, start = _Plan.make(model, x, structure, outputs, without), 0
                    is_new = True
                    continue
                if hooked and not plan.agrees(model, chunk, targets, part):
                    raise ValueError(HOOKED)
                if start == 0:
                    keep(_PLANS, key, plan, MAX_PLANS)
                yield start, replace(part, shared=shared)
                start += size

        chunks = parts()
        yield itertools.chain([next(chunks)], chunks)


def _chunk_size(plan: "_Plan", x: Tensor, more_bytes: int, chunk_bytes: int) -> int:
    work = 2 * plan.row.nbytes + plan.workspace + more_bytes
    large, room = min(FEW * work, LARGE_CHUNK_BYTES), available_memory(x.device)
    if x.device.type != "cpu" and room > 2 * GPU_CHUNK_BYTES:
        chunk_bytes = GPU_CHUNK_BYTES
    elif chunk_bytes < large <= room:
        chunk_bytes = large
    return max(1, min(MAX_CHUNK, chunk_bytes // work))


def _has_gradient_hooks(model: nn.Module) -> bool:
    of_all = torch.nn.modules.module
    return bool(
        of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
        or any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
        or any(parameter._backward_hooks for parameter in model.parameters())
    )


class _RuleError(Exception):
    """In a chunk, rows of a layer are not the examples, or all layers are in another graph."""

    def __init__(self, layer: Layer | None = None) -> None:
        self.parameters = {name for name in (layer.weight, layer.bias) if name} if layer else set()


@dataclass
class _Plan:
    """How a network is differentiated: which layers by a rule, which parameters as they are.

    It holds no tensor of the network, and serves any that has the same structure.
    """

    outputs: tuple[int, ...]
    whole: bool  # all outputs are differentiated, and there are several
    layers: tuple[Layer, ...]
    rest: tuple[str, ...]  # names
    workspace: int  # bytes that an example takes on the way, the blocks themselves not counted
    without: frozenset[str]  # names of parameters in `rest` that no rule may serve
    graphs: set[Hashable] = field(default_factory=set)  # that the layers hold for
    row: Jacobian = field(init=False)  # of an example, without numbers

    @classmethod
    def make(
        cls,
        model: nn.Module,
        x: Tensor,
        structure: str,
        outputs: Sequence[int] | None,
        without: Collection[str] = (),
    ) -> "_Plan":
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError("jacobian: expected a model with trainable parameters, got none")
        with torch.no_grad():
            shape = tuple(model(x[:1].clone()).shape)
        size = math.prod(shape)
        outputs = range(size) if outputs is None else outputs
        if not outputs or not all(0 <= c < size for c in outputs):
            raise ValueError(f"outputs: expected some of 0 ... {size - 1}, got {outputs}")
        layers = () if structure == "dense" else find_layers(model, x[:3], without)
        layers = tuple(replace(layer, always_factored=structure == "factors") for layer in layers)
        by_rule = {name for layer in layers for name in (layer.weight, layer.bias)}
        rest = tuple(name for name in parameters if name not in by_rule)
        rest_bytes = sum(parameters[name].nbytes for name in rest)
        require_memory(
            2 * len(outputs) * rest_bytes,
            f"the dense Jacobian of one example x {len(outputs)} outputs",
            cure="use a smaller network, or layers that fedntk.ntk keeps in factors",
        )
        passes = 2 if rest else 1  # by rule; by torch.func
        workspace = (2 + passes * len(outputs)) * _activation_bytes(model, x[:1].clone())
        workspace += 4 * len(outputs) * rest_bytes
        whole = size > 1 and len(shape) == 2 and list(outputs) == list(range(size))
        plan = cls(tuple(outputs), whole, layers, rest, workspace, frozenset(without))
        try:
            objective = _Objective(None, x[:1])
            row = plan.differentiate(model, x[:1], objective)
            wrong = set() if plan.agrees(model, x[:1], objective, row) else parameters.keys()
        except _RuleError as error:
            wrong = error.parameters
        if wrong and not layers:
            raise ValueError(HOOKED)
        if wrong:
            return cls.make(model, x, structure, outputs, plan.without | wrong)
        plan.row = row.to("meta")
        return plan

    def differentiate(self, model: nn.Module, x: Tensor, objective: _Objective) -> Jacobian:
        blocks = self._by_rule(model, x, objective) if self.layers else []
        rest = self._as_they_are(model, x, objective) if self.rest else []
        return Jacobian((*blocks, *rest))

    def agrees(self, model: nn.Module, x: Tensor, objective: _Objective, rows: Jacobian) -> bool:
        """Whether one backward pass gives J^T R of random weights R: hooks may change gradients."""
        names = [name for block in rows.blocks for name in block.names]
        values = objective(model(x.clone())).reshape(len(x), -1)
        weights = draw_weights(len(x) * len(self.outputs), values).view(len(x), -1)
        chosen = (values[:, list(self.outputs)] * weights).sum()
        if not chosen.requires_grad:
            return True
        gradients = _gradients(chosen, [model.get_parameter(name) for name in names], keep=False)
        expected = [gradient.to_dense() for gradient in gradients]
        norms = [float(gradient.norm()) for gradient in expected]
        share = max(1e-3, 16 * torch.finfo(values.dtype).eps)
        product = rows.vjp(weights)
        return not math.isfinite(sum(norms)) or all(
            float((product[name] - gradient).norm()) <= share * (norm + 0.01 * sum(norms))
            for name, gradient, norm in zip(names, expected, norms, strict=True)
        )

    def _by_rule(self, model: nn.Module, x: Tensor, objective: _Objective) -> list[Block]:
        modules = [(layer, model.get_submodule(layer.name)) for layer in self.layers]
        seen: Seen = []
        captured = [(layer.name, module, layer.copied) for layer, module in modules]
        with capture(captured, seen) as calls:
            values = objective(model(x.clone()))  # it may write into its input
            totals = values.sum(0).flatten()
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        in_place = {layer.name for layer in self.layers if not layer.copied} & written_over(seen)
        graph = (graph_of(totals, names), *map(len, calls.values()), *sorted(in_place))
        if graph not in self.graphs:
            if self.graphs and find_layers(model, x[:3], self.without) != self.layers:
                raise _RuleError
            if len(self.graphs) == MAX_GRAPHS:
                self.graphs.pop()
            self.graphs.add(graph)
        readouts = {layer.readout: layer for layer in self.layers if layer.readout is not None}
        readouts = readouts if self.whole else {}
        others = [layer for layer in self.layers if layer.readout not in readouts]
        points = [(layer, *calls[layer.name][k]) for layer in others for k in layer.calls]
        blocks_of = {}
        for readout, layer in readouts.items():
            a, z = calls[layer.name][0]
            slopes, matrix = torch.ones_like(z), None
            if readout:
                ((h, _),) = calls[readouts[""].name]
                (slopes,) = torch.autograd.grad(h, z, torch.ones_like(h), retain_graph=bool(points))
                matrix = model.get_parameter(readout).detach().clone()
            blocks_of[layer.name] = read_out(layer, a.detach(), slopes, matrix)
        pairs = iter(_pairs(values, totals, self.outputs, points))
        with torch.no_grad():
            for layer, module in modules:
                if layer.name not in blocks_of:
                    of_layer = list(itertools.islice(pairs, len(layer.calls)))
                    blocks_of[layer.name] = layer.rule(layer, module, of_layer)
        return [block for layer in self.layers for block in blocks_of[layer.name]]

    def _as_they_are(self, model: nn.Module, x: Tensor, objective: _Objective) -> list[Block]:
        values = tuple(model.get_parameter(name).detach() for name in self.rest)

        def outputs(values: Sequence[Tensor], example: Tensor, target: Tensor) -> Tensor:
            parameters = dict(zip(self.rest, values, strict=True))
            batch = (example.unsqueeze(0).clone(),)
            result = torch.func.functional_call(model, parameters, batch)
            value = replace(objective, targets=target.unsqueeze(0))(result)
            return value.flatten()[list(self.outputs)]

        def of_example(example: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            copies = [value.clone().requires_grad_() for value in values]
            of_outputs = outputs(copies, example, target)
            rows = [_gradients(output, copies, keep=True) for output in of_outputs]
            return tuple(map(torch.stack, zip(*rows, strict=True)))

        try:
            per_example = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0, 0))
            with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no batching rule
                tensors = per_example(values, x, objective.targets)
        except RuntimeError:  # some operations, an LSTM's among them, have no batching rule
            rows = map(of_example, x, objective.targets)
            tensors = tuple(map(torch.stack, zip(*rows, strict=True)))
        paths = [AS_IT_IS + (BUT_RULE if name in self.without else "") for name in self.rest]
        tensors = [t.to_dense() if t.is_sparse else t for t in tensors]
        named = zip(self.rest, tensors, paths, strict=True)
        return [DenseBlock(name, tensor.detach(), path) for name, tensor, path in named]


_PLANS: dict[Hashable, _Plan] = {}


def _activation_bytes(model: nn.Module, example: Tensor) -> int:
    sizes: list[int] = []

    def hook(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        sizes.extend(tensor.nbytes for tensor in outputs if isinstance(tensor, Tensor))

    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            if not list(module.children()):
                stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        model(example)
    return sum(sizes)


def _pairs(
    values: Tensor,
    totals: Tensor,
    outputs: Sequence[int],
    points: Sequence[tuple[Layer, Tensor, Tensor]],
) -> Calls:
    """Return inputs (n, ...) and gradients (n, C, ...) of calls of layers; row i is of example i.

    `values` (n, ...) are differentiated, and `totals` (C,) are their sums over examples.
    """
    n, tensors, pairs = len(values), [z for *_, z in points], Calls()
    if not points:
        return pairs
    for layer, _, z in points:
        if z.shape[layer.batch_axis] != n:
            raise _RuleError(layer)
    first = all(layer.batch_axis == 0 for layer, *_ in points)
    in_order = n == 1 or (first and keeps_rows(values, tensors))
    if not in_order:
        of_examples, of_outputs = draw_weights(n, totals), draw_weights(len(outputs), totals)
        marks = torch.zeros_like(totals)
        marks[list(outputs)] = of_outputs
        marks = (of_examples[:, None] * marks).view(values.shape)
        marked = _gradients(values, tensors, marks, keep=True)
    gradients = _gradients_of_outputs(totals, outputs, tensors)
    for k, (layer, a, _) in enumerate(points):
        axis = layer.batch_axis
        inputs, gradient = a.detach().movedim(axis, 0), gradients[k].movedim(axis + 1, 0)
        if not in_order:
            plain = torch.einsum("nc...,c->n...", gradient, of_outputs)
            rows = rows_of_examples(plain, marked[k].movedim(axis, 0), of_examples)
            if rows is None:
                raise _RuleError(layer)
            if not torch.equal(rows, torch.arange(n, device=rows.device)):
                inputs, gradient = inputs[rows], gradient[rows]
        pairs.append((inputs, gradient))
    return pairs


def _gradients_of_outputs(
    totals: Tensor, outputs: Sequence[int], points: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Differentiate each of the chosen outputs at points: (C, *shape); a GPU does all at once."""
    if len(outputs) == 1:
        return [value.unsqueeze(0) for value in _gradients(totals[outputs[0]], points, keep=False)]
    if totals.device.type != "cpu":
        one_hots = nn.functional.one_hot(torch.tensor(outputs), len(totals)).to(totals)
        with suppress(RuntimeError):  # as in `_as_they_are`, or too little memory
            return torch.func.vmap(partial(_gradients, totals, points, keep=True))(one_hots)
    gradients = [p.new_empty(len(outputs), *p.shape) for p in points]
    for row, output in enumerate(outputs):
        of_row = _gradients(totals[output], points, keep=row + 1 < len(outputs))
        for gradient, value in zip(gradients, of_row, strict=True):
            gradient[row] = value
    return gradients


def _gradients(
    output: Tensor, points: Sequence[Tensor], weights: Tensor | None = None, *, keep: bool
) -> tuple[Tensor, ...]:
    """Differentiate one output, or a weighted sum of some; `keep` the graph for further ones."""
    gradients = torch.autograd.grad(
        output, points, weights, retain_graph=keep, allow_unused=True, materialize_grads=True
    )
    return tuple(gradient.detach() for gradient in gradients)  # torch 2.8 tracks zeros
