"""Jacobians of a network: by ``torch.func``, or layer by layer, in factors if these are smaller."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..support.memory import require_memory
from ..support.precision import full_float32
from .blocks import Block, DenseBlock
from .operator import Jacobian
from .rules import Layer, any_axis, rule_for

Structure = Literal["factored", "dense"]
Plans = dict[tuple[torch.Size, torch.dtype], tuple["_Plan", Jacobian, int]]
CHUNK_BYTES = 64 * 2**20
MAX_CHUNK = 1024


def jacobian(
    model: nn.Module,
    x: Tensor,
    *,
    structure: Structure = "factored",
    chunk_size: int | None = None,
    outputs: Sequence[int] | None = None,
    plans: Plans | None = None,
) -> Jacobian:
    """Jacobian of the model's outputs with respect to its trainable parameters, at its weights.

    The model runs in evaluation mode: dropout is off and BatchNorm uses its running statistics,
    so that an example's row depends only on that example.

    ``structure="factored"`` has a rule for linear layers (over any number of positions, called any
    number of times), convolutions, embeddings, BatchNorm, GroupNorm and LayerNorm. Parameters that
    enter the outputs in any other way (shared between modules, used by a function, in a module of
    another kind) are differentiated as they are, by ``torch.func``. The result is exact in either
    case; :meth:`Jacobian.describe` says which path each parameter took.

    Peak memory is about ``n r`` bytes on the CPU for the result and ``b w`` on the model's device
    for a chunk of b examples, with ``w = 2 r + (2 + C) a``: r is the size of an example's blocks,
    a that of the outputs of all modules without children. Parameters without a rule, of size p,
    make it ``w = 2 r + (2 + 2 C) a + 4 C p``; what a module keeps inside, as an LSTM does, comes on
    top. If the sum does not fit, NotEnoughMemory is raised.

    Parameters
    ----------
    model : nn.Module
        Map from (n, ...) to (n, C). Parameters with ``requires_grad=False`` are left out.
    x : Tensor, shape (n, ...)
        Examples, on the model's device.
    structure : {"factored", "dense"}
        ``"dense"`` is the definition, by ``torch.func``: the tensor (n, C, *parameter shape).
    chunk_size : int, optional
        Examples b that go through the model at a time; by default as many as make b w at most
        64 MiB, and no more than 1,024.
    outputs : sequence of int, optional
        Outputs of the network to differentiate; all by default.
    plans : dict, optional
        Findings about the model, kept for further calls at other weights, with examples of one
        shape and the same `structure` and `outputs`. Empty at first.

    Returns
    -------
    Jacobian
        On the CPU, in the model's dtype.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> jac = jacobian(model, torch.ones(4, 3))
    >>> jac.gram().shape  # each entry is x.x' + 1 = 4
    torch.Size([4, 4])
    """
    if structure not in ("factored", "dense"):
        raise ValueError(f"structure: expected 'factored' or 'dense', got {structure!r}")
    found = differentiate_in_chunks(model, x, structure, outputs, chunk_size, plans=plans)
    with found as (first, parts):
        row = first.nbytes
        require_memory(
            len(x) * row,
            f"the Jacobian of {len(x)} examples x {first.num_outputs} outputs "
            f"({row / 1e6:.1f} MB an example)",
            cure="use fewer examples at a time",
        )
        result = first.empty(len(x))
        for start, part in parts:
            result.fill(start, part)
    return result


@contextmanager
def differentiate_in_chunks(
    model: nn.Module,
    x: Tensor,
    structure: Structure = "factored",
    outputs: Sequence[int] | None = None,
    chunk_size: int | None = None,
    more_bytes: int = 0,
    plans: Plans | None = None,
) -> Iterator[tuple[Jacobian, Iterator[tuple[int, Jacobian]]]]:
    """Yield the Jacobian of the first example, and an iterator over those of chunks of all.

    Chunks are on the model's device, each with the position of its first example. Arguments are
    those of :func:`jacobian`; `more_bytes` are extra bytes per example that the caller allocates.
    """
    if len(x) == 0:
        raise ValueError("jacobian: expected at least one example, got none")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    with _evaluation_mode(model), torch.enable_grad(), full_float32():
        plans, kind = {} if plans is None else plans, (x.shape[1:], x.dtype)
        if kind not in plans:
            plan = _Plan.make(model, x, structure, outputs)
            first = Jacobian(tuple(plan.blocks(x[:1]))).to("cpu")
            plans[kind] = plan, first, 2 * first.nbytes + plan.workspace(x[:1]) + more_bytes
        plan, first, work = plans[kind]
        size = chunk_size or max(1, min(MAX_CHUNK, CHUNK_BYTES // work))
        require_memory(
            min(size, len(x)) * work,
            f"differentiating {min(size, len(x))} examples at a time",
            device=x.device,
            cure="lower chunk_size",
        )
        starts = range(0, len(x), size)
        yield first, ((s, Jacobian(tuple(plan.blocks(x[s : s + size])))) for s in starts)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run recurrent layers by torch's own code: cuDNN's backward pass wants training mode."""
    training = [module for module in model.modules() if module.training]
    cudnn = torch.backends.cudnn.enabled
    model.eval()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        for module in training:
            module.training = True


@dataclass(frozen=True)
class _Plan:
    """How a network is differentiated: which layers by a rule, which parameters as they are."""

    model: nn.Module
    outputs: tuple[int, ...]
    layers: tuple[Layer, ...]
    rest: Mapping[str, Tensor]

    @classmethod
    def make(
        cls, model: nn.Module, x: Tensor, structure: Structure, outputs: Sequence[int] | None
    ) -> "_Plan":
        parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError("jacobian: expected a model with trainable parameters, got none")
        with torch.no_grad():
            shape = tuple(model(x[:1]).shape)
        if len(shape) != 2 or shape[0] != 1:
            raise ValueError(f"jacobian: expected outputs of shape (n, C), got {shape} for n = 1")
        outputs = range(shape[1]) if outputs is None else outputs
        if not outputs or not all(0 <= c < shape[1] for c in outputs):
            raise ValueError(f"outputs: expected some of 0 ... {shape[1] - 1}, got {outputs}")
        layers = _find_layers(model, x[:3]) if structure == "factored" else ()
        by_rule = {name for layer in layers for name in (layer.weight, layer.bias)}
        rest = {name: p for name, p in parameters.items() if name not in by_rule}
        plan = cls(model, tuple(outputs), layers, rest)
        require_memory(
            2 * len(outputs) * plan.rest_bytes,
            f"the dense Jacobian of one example x {len(outputs)} outputs",
            cure="use a smaller network, or layers that fedntk.ntk keeps in factors",
        )
        return plan

    @property
    def rest_bytes(self) -> int:
        """Bytes of the parameters without a rule."""
        return sum(p.numel() * p.element_size() for p in self.rest.values())

    def blocks(self, x: Tensor) -> list[Block]:
        """Blocks of a chunk of examples, on its device."""
        blocks = self._by_rule(x) if self.layers else []
        return blocks + (self._as_they_are(x) if self.rest else [])

    def workspace(self, example: Tensor) -> int:
        """Bytes that an example takes on the way, the blocks themselves not counted."""
        activations = 0

        def hook(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            nonlocal activations
            made = output if isinstance(output, tuple) else (output,)
            activations += sum(t.nbytes for t in made if isinstance(t, Tensor))

        leaves = [module for module in self.model.modules() if not list(module.children())]
        with torch.no_grad(), _hooks((module, hook) for module in leaves):
            self.model(example)
        passes, num_outputs = 2 if self.rest else 1, len(self.outputs)  # by rule; by torch.func
        return (2 + passes * num_outputs) * activations + 4 * num_outputs * self.rest_bytes

    def _by_rule(self, x: Tensor) -> list[Block]:
        modules = [(layer.name, layer.module, layer.copied) for layer in self.layers]
        with _capture(modules) as calls, torch.enable_grad():
            totals = self.model(x).sum(0)
        points = []
        for layer in self.layers:
            if len(calls[layer.name]) <= max(layer.calls):
                raise ValueError(
                    f"jacobian: layer {layer.name!r} is called {len(calls[layer.name])} times for "
                    "some examples and more often for others; use structure='dense'"
                )
            points += [calls[layer.name][k][1] for k in layer.calls]
        one = len(self.outputs) == 1
        gradients = [] if one else [p.new_empty(len(self.outputs), *p.shape) for p in points]
        for row, output in enumerate(self.outputs):
            last = row + 1 == len(self.outputs)
            found = _gradients(totals[output], points, keep=not last)
            if one:
                gradients = [value.unsqueeze(0) for value in found]
                break
            for gradient, value in zip(gradients, found, strict=True):
                gradient[row] = value
        blocks: list[Block] = []
        of_call = iter(gradients)
        with torch.no_grad():
            for layer in self.layers:
                axis = layer.batch_axis
                inputs = [calls[layer.name][k][0].movedim(axis, 0) for k in layer.calls]
                pairs = [(own, next(of_call).movedim(axis + 1, 0)) for own in inputs]
                blocks += layer.rule(layer, pairs)
        return blocks

    def _as_they_are(self, x: Tensor) -> list[Block]:
        def outputs(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
            given = (example.unsqueeze(0),)
            result: Tensor = torch.func.functional_call(self.model, parameters, given)
            return result[0, list(self.outputs)]

        try:
            per_example = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))
            tensors = per_example(self.rest, x)
        except RuntimeError:  # some operations, an LSTM's among them, have no batching rule
            rows = [self._one_by_one(example) for example in x.split(1)]
            tensors = {name: torch.stack([row[name] for row in rows]) for name in self.rest}
        path = "differentiated as it is"
        return [DenseBlock(name, tensors[name].detach(), path) for name in self.rest]

    def _one_by_one(self, example: Tensor) -> dict[str, Tensor]:
        parameters = {name: p.clone().requires_grad_() for name, p in self.rest.items()}
        with torch.enable_grad():
            outputs = torch.func.functional_call(self.model, parameters, (example,))[0]
        rows = [_gradients(outputs[c], list(parameters.values()), keep=True) for c in self.outputs]
        stacked = (torch.stack(row) for row in zip(*rows, strict=True))
        return dict(zip(parameters, stacked, strict=True))


def _gradients(output: Tensor, points: Sequence[Tensor], *, keep: bool) -> tuple[Tensor, ...]:
    """Differentiate one output; `keep` the graph for further ones."""
    return torch.autograd.grad(
        output, points, retain_graph=keep, allow_unused=True, materialize_grads=True
    )


def _find_layers(model: nn.Module, x: Tensor) -> tuple[Layer, ...]:
    """Find the layers that a rule may serve, by running 2 and then 3 examples.

    One axis of a layer's inputs and outputs must follow the number of examples, an example's
    outputs must depend only on its own entries, and every use of a parameter must be by a call of
    its layer.
    """
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if rule_for(module) and any(p in names for p in module._parameters.values())
    ]
    two, three = (x[torch.arange(n, device=x.device) % len(x)] for n in (2, 3))
    written = _find_written_over(model, two, candidates)
    with _capture([(*named, True) for named in candidates]) as few, torch.no_grad():
        model(two)
    with _capture([(*named, True) for named in candidates]) as calls, torch.enable_grad():
        three = three.requires_grad_() if three.is_floating_point() else three
        outputs = model(three.clone())
    if not outputs.requires_grad:
        return ()
    uses = _count_uses(outputs)
    axes = {name: _find_batch_axis(few[name], calls[name]) for name, _ in candidates}
    followed = {name: calls[name] for name, axis in axes.items() if axis is not None}
    reached = _find_reached_calls(outputs, three, followed, axes)
    layers = []
    for name, module in candidates:
        axis, own_calls, rule = axes[name], reached.get(name, ()), rule_for(module)
        own = {key: names[p] for key, p in module._parameters.items() if p in names}
        if (
            rule
            and own_calls
            and axis is not None
            and (axis == 0 or any_axis(module))
            and all(uses[module.get_parameter(key)] == len(own_calls) for key in own)
        ):
            weight, bias = own.get("weight"), own.get("bias")
            layers.append(Layer(name, module, rule, weight, bias, own_calls, axis, name in written))
    return tuple(layers)


Calls = list[tuple[Tensor, Tensor]]


def _find_batch_axis(few: Calls, more: Calls) -> int | None:
    """Axis along which the inputs and outputs of all calls have 2, then 3 entries, and only it."""
    if len(few) != len(more):
        return None
    found = set()
    for tensor, larger in zip(itertools.chain(*few), itertools.chain(*more), strict=True):
        if tensor.ndim != larger.ndim:
            return None
        sizes = zip(tensor.shape, larger.shape, strict=True)
        found.add(tuple((d, a, b) for d, (a, b) in enumerate(sizes) if a != b))
    match list(found):
        case [((axis, 2, 3),)]:
            return axis
    return None


def _find_reached_calls(
    outputs: Tensor, x: Tensor, calls: Mapping[str, Calls], axes: Mapping[str, int | None]
) -> dict[str, tuple[int, ...]]:
    """Find each layer's calls that reach the outputs, if examples keep to their own entries.

    A layer where an example's outputs depend on another example (batch statistics) is left out.
    """
    network = "the examples"
    points = [
        (name, k, made)
        for name, of_layer in {**calls, network: [(x, x)]}.items()
        for k, (_, made) in enumerate(of_layer)
        if made.requires_grad
    ]
    reached: dict[str, set[int]] = {}
    mixed = set()
    weights = torch.arange(1, outputs.shape[1] + 1).to(outputs)
    for i, output in enumerate(outputs):
        found = torch.autograd.grad(
            output @ weights, [made for *_, made in points], retain_graph=True, allow_unused=True
        )
        of_others = [r for r in range(len(outputs)) if r != i]
        for (name, k, _), gradient in zip(points, found, strict=True):
            if gradient is not None:
                reached.setdefault(name, set()).add(k)
                if gradient.movedim(axes.get(name) or 0, 0)[of_others].any():
                    mixed.add(name)
    if network in mixed:
        return {}
    return {name: tuple(sorted(ks)) for name, ks in reached.items() if name not in mixed}


def _count_uses(outputs: Tensor) -> Counter[Tensor]:
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


def _find_written_over(
    model: nn.Module, x: Tensor, modules: Iterable[tuple[str, nn.Module]]
) -> set[str]:
    seen: list[tuple[str, Tensor, int]] = []

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, named: Mapping[str, Any], output: Tensor) -> None:
            seen.extend((name, t, t._version) for t in (*args, *named.values(), output))

        return hook

    with _hooks((module, record(name)) for name, module in modules), torch.no_grad():
        model(x)
    return {name for name, tensor, version in seen if tensor._version != version}


@contextmanager
def _capture(modules: Iterable[tuple[str, nn.Module, bool]]) -> Iterator[dict[str, Calls]]:
    """Record (input, output) of each call of the named modules, of copies where asked for."""
    modules = list(modules)
    calls: dict[str, Calls] = {name: [] for name, *_ in modules}

    def record(name: str, copied: bool) -> Callable[..., Tensor]:
        def hook(
            _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
        ) -> Tensor:
            (given,) = (*args, *named.values())
            given = given.detach()
            calls[name].append((given.clone() if copied else given, output))
            return output.clone() if copied else output

        return hook

    with _hooks((module, record(name, copied)) for name, module, copied in modules):
        yield calls


@contextmanager
def _hooks(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield
