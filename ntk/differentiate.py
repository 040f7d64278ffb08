"""Jacobians of a network: by ``torch.func``, or in factors read off its linear layers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .blocks import Block, DenseBlock, LinearBlock
from .jacobian import Jacobian
from .memory import require_memory

__all__ = ["Structure", "jacobian"]

Structure = Literal["factored", "dense"]


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
