"""Which layers of a network a rule may serve: found by running a few of its examples."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .readout import ELEMENTWISE
from .rows import nodes_behind
from .rules import Layer, any_axis, linear, rule_for
from .structure import COPY

Calls = list[tuple[Tensor, Tensor]]  # of a layer: input and output
Seen = list[tuple[str, Tensor, int]]  # what went into a module or came out, and its version then
INPUT_OF = {"AddmmBackward0": 1, "MmBackward0": 0}  # place of a linear layer's input


def find_layers(model: nn.Module, x: Tensor, without: Collection[str] = ()) -> tuple[Layer, ...]:
    """Find the layers that a rule may serve, by running 2 and then 3 examples.

    One axis of a layer's inputs and outputs must follow the number of examples, and every use of a
    parameter must be by a call of its layer that reaches the outputs. Layers of the parameters
    `without` are left out.
    """
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    held = {
        name: {key: names[p] for key, p in module._parameters.items() if p in names}
        for name, module in model.named_modules()
        if rule_for(module)
    }
    modules = {
        name: model.get_submodule(name)
        for name, parameters in held.items()
        if parameters and not any(parameter in without for parameter in parameters.values())
    }
    two, three = (x[torch.arange(n, device=x.device) % len(x)] for n in (2, 3))
    seen: Seen = []
    with capture(((*named, False) for named in modules.items()), seen) as few, torch.no_grad():
        model(two.clone())
    written = written_over(seen)
    with capture((*named, True) for named in modules.items()) as calls, torch.enable_grad():
        outputs = model(three.clone())
    if not outputs.requires_grad:
        return ()
    uses: Counter[Tensor] = Counter()  # operations that read each parameter
    for _, inputs in nodes_behind(outputs.grad_fn):
        uses.update(parent.variable for parent, _ in inputs if hasattr(parent, "variable"))
    axes = {name: _batch_axis(few[name], calls[name]) for name in modules}
    reached = _reached_calls(outputs, calls)
    layers = []
    for name, module in modules.items():
        axis, reaching, rule = axes[name], reached.get(name, ()), rule_for(module)
        follows = axis == 0 or (axis is not None and any_axis(module))
        once = all(uses[module.get_parameter(key)] == len(reaching) for key in held[name])
        if rule and axis is not None and reaching and follows and once:
            weight, bias = held[name].get("weight"), held[name].get("bias")
            layers.append(Layer(name, rule, weight, bias, reaching, axis, name in written))
    readouts = _readouts(outputs, layers, calls)
    return tuple(replace(layer, readout=readouts.get(layer.name)) for layer in layers)


def _readouts(
    outputs: Tensor, layers: Sequence[Layer], calls: Mapping[str, Calls]
) -> dict[str, str]:
    """Layer -> parameter that reads it out, by the graph: the last linear layer has "".

    Between the two are only operations that take each number by itself.
    """
    linear_layers = {
        calls[layer.name][0][1].grad_fn: layer
        for layer in layers
        if layer.rule is linear and layer.weight and len(calls[layer.name]) == 1
        if calls[layer.name][0][1].ndim == 2
    }
    readouts: dict[str, str] = {}
    node, readout = outputs.grad_fn, ""
    while node is not None and len(readouts) < 2:
        if node in linear_layers:
            layer, place = linear_layers[node], INPUT_OF.get(node.name())
            readouts[layer.name], readout = readout, str(layer.weight)
            node = None if place is None else node.next_functions[place][0]
        elif node.name() == COPY or (readout and node.name() in ELEMENTWISE):
            node = node.next_functions[0][0]
        else:
            break
    return readouts


def _batch_axis(few: Calls, more: Calls) -> int | None:
    """Axis along which the inputs and outputs of all calls have 2, then 3 entries, and only it."""
    if len(few) != len(more):
        return None
    changes = set()
    for tensor, larger in zip(itertools.chain(*few), itertools.chain(*more), strict=True):
        if tensor.ndim != larger.ndim:
            return None
        sizes = zip(tensor.shape, larger.shape, strict=True)
        changes.add(tuple((d, a, b) for d, (a, b) in enumerate(sizes) if a != b))
    match list(changes):
        case [((axis, 2, 3),)]:
            return axis
    return None


def _reached_calls(outputs: Tensor, calls: Mapping[str, Calls]) -> dict[str, tuple[int, ...]]:
    points = [(name, k, z) for name in calls for k, (_, z) in enumerate(calls[name])]
    points = [point for point in points if point[-1].requires_grad]
    if not points:
        return {}
    slopes = torch.autograd.grad(
        outputs.sum(), [z for *_, z in points], retain_graph=True, allow_unused=True
    )
    reached = [point for point, slope in zip(points, slopes, strict=True) if slope is not None]
    return {name: tuple(k for other, k, _ in reached if other == name) for name in calls}


def written_over(seen: Seen) -> set[str]:
    """Names of modules whose inputs or outputs were changed afterwards."""
    return {name for name, tensor, version in seen if tensor._version != version}


@contextmanager
def capture(
    modules: Iterable[tuple[str, nn.Module, bool]], seen: Seen | None = None
) -> Iterator[dict[str, Calls]]:
    """Record (input, output) of each call of the named layers, of copies where asked for."""
    modules = list(modules)
    calls: dict[str, Calls] = {name: [] for name, *_ in modules}

    def record(name: str, forward: Callable[..., Tensor], copied: bool) -> Callable[..., Tensor]:
        def recorded(*args: Tensor, **named: Any) -> Tensor:
            output = forward(*args, **named)
            source = args[0] if args else named["x" if "x" in named else "input"]
            if seen is not None:
                seen.extend((name, tensor, tensor._version) for tensor in (source, output))
            calls[name].append((source.clone() if copied else source, output))
            return output.clone() if copied else output

        return recorded

    layers: list[Any] = [module for _, module, _ in modules]
    try:  # not by hooks: those of others may change what the layer returns
        for (name, _, copied), layer in zip(modules, layers, strict=True):
            layer.forward = record(name, layer.forward, copied)
        yield calls
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
