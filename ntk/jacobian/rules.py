"""One rule for each kind of layer: its Jacobian from what went in and the gradients that come back.

A rule serves a layer with PyTorch's own forward, if its parameters enter the network's outputs only
through calls of that layer; :mod:`.differentiate` makes sure of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import Block, DenseBlock, total
from .factors import ConvBlock, EmbeddingBlock, FactoredBlock, LinearBlock, TransposedConvBlock
from .readout import ReadoutBlock

Calls = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """A layer of the network, and the rule that serves it.

    From the inputs (n, ...) of each call, and the gradients (n, C, ...) of each of the C outputs
    by the layer's outputs, the rule makes columns of the Jacobian; factored if that takes at most
    half the memory, or if `always_factored` and there is one call.
    """

    name: str  # in ``model.named_modules()``
    rule: "Rule"
    weight: str | None  # name of the parameter; None if the layer lacks it or it is frozen
    bias: str | None
    calls: tuple[int, ...]  # those that reach the network's outputs
    batch_axis: int  # of its inputs and outputs
    copied: bool  # whether the network writes over its inputs or outputs
    readout: str | None = None  # parameter that reads it out; "" for the layer of the outputs
    always_factored: bool = field(default=False, compare=False)


Rule = Callable[[Layer, Any, Calls], list[Block]]  # of the layer, its module and the calls


def rule_for(module: nn.Module) -> Rule | None:
    """Return the rule that serves `module`, None if it has to be differentiated as it is."""
    for kinds, applies, rule in _RULES:
        if any(_computes_as(module, kind) for kind in kinds):
            # a parametrised weight is no parameter of the layer's own
            parameters = module._parameters
            named = set(parameters) <= {"weight", "bias"} and parameters.get("weight") is not None
            return rule if named and applies(module) else None
    return None


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    names = [name for name in ("forward", "_conv_forward", "weight", "bias") if hasattr(kind, name)]
    same = all(getattr(type(module), name, None) is getattr(kind, name) for name in names)
    return same and not any(name in vars(module) for name in names)


def any_axis(module: nn.Module) -> bool:
    """Whether the layer takes the examples along any axis, not only along the first."""
    return isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding))


def read_out(layer: Layer, inputs: Tensor, slopes: Tensor, matrix: Tensor | None) -> list[Block]:
    """Columns of a linear layer that is read out by `matrix`; as any other's if not smaller."""
    block = ReadoutBlock(str(layer.weight), layer.bias, str(layer.readout), matrix, inputs, slopes)
    small = 2 * (inputs.shape[1] + slopes.shape[1]) <= block.dense_size
    return [block] if small else _smaller(layer, [block.expanded()])


def linear(layer: Layer, _: nn.Linear, calls: Calls) -> list[Block]:
    """Take all calls as more positions: ``z = W a + b`` at each position of each."""
    inputs = torch.cat([a.flatten(1, -2) if a.ndim > 2 else a.unsqueeze(1) for a, _ in calls], 1)
    gradients = torch.cat(
        [g.flatten(2, -2) if g.ndim > 3 else g.unsqueeze(2) for _, g in calls], dim=2
    )
    if layer.weight is None:
        return _biases(layer, [gradients], "linear")
    return _smaller(layer, [LinearBlock(layer.weight, layer.bias, inputs, gradients)])


def _conv(layer: Layer, module: Any, calls: Calls) -> list[Block]:
    gradients = [g.flatten(3).transpose(2, 3) for _, g in calls]
    if layer.weight is None:
        return _biases(layer, gradients, "conv")
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padding = module._reversed_padding_repeated_twice
    padded = [functional.pad(a, padding, mode=mode) if any(padding) else a for a, _ in calls]
    size, stride, dilation = map(tuple, (module.kernel_size, module.stride, module.dilation))
    width = module.weight.shape[1]
    blocks = [
        ConvBlock(layer.weight, layer.bias, a.movedim(1, -1), g, size, stride, dilation, width)
        for a, g in zip(padded, gradients, strict=True)
    ]
    return _smaller(layer, blocks)


def _transposed_conv(layer: Layer, module: Any, calls: Calls) -> list[Block]:
    """Take the layer as a linear one at each place of its input; places of the output overlap."""
    biases = _biases(layer, [g.flatten(3).transpose(2, 3) for _, g in calls], "transposed conv")
    if layer.weight is None:
        return biases
    pairs = [_at_input_places(module, a, g) for a, g in calls]
    inputs, gradients = torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 2)
    block = TransposedConvBlock(layer.weight, None, inputs, gradients, tuple(module.weight.shape))
    return _smaller(layer, [block]) + biases


def _at_input_places(module: Any, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs (n, S, d_in) and the patch of gradients that each reaches, in groups."""
    sizes = zip(module.kernel_size, module.stride, module.dilation, a.shape[2:], strict=True)
    windows = functional.pad(g, [p for p in reversed(module.padding) for _ in (0, 1)])
    for d, (kernel, stride, dilation, places) in enumerate(sizes, start=3):
        windows = windows.unfold(d, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
        windows = windows.narrow(d, 0, places)
    dims = a.ndim - 2
    patches = windows.movedim(2, 2 + dims)  # (n, C, *places, d_out, *kernel_size)
    return a.flatten(2).transpose(1, 2), patches.flatten(2 + dims).flatten(2, 1 + dims)


def _embedding(layer: Layer, module: nn.Embedding, calls: Calls) -> list[Block]:
    """Tokens of all calls are positions; the padding token has no gradient."""
    tokens = torch.cat([a.reshape(len(a), -1) for a, _ in calls], dim=1).long()
    gradients = torch.cat([g.reshape(*g.shape[:2], -1, g.shape[-1]) for _, g in calls], dim=2)
    if module.padding_idx is not None:
        padding = (tokens == module.padding_idx)[:, None, :, None]
        gradients = gradients.masked_fill(padding, 0.0)
    weight = str(layer.weight)  # its only parameter
    return _smaller(layer, [EmbeddingBlock(weight, None, tokens, gradients, module.num_embeddings)])


def _normalise(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return functional.rms_norm(x, module.normalized_shape, eps=module.eps)
    return functional.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def _elementwise(layer: Layer, module: nn.Module, calls: Calls) -> list[Block]:
    """``z = w x' + b`` with x' normalised: the Jacobian is g x', summed over positions.

    Channels are the first axis after the batch, or the last ones of LayerNorm and RMSNorm.
    """
    first = not isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    shape = next(p for p in module._parameters.values() if p is not None).shape

    def summed(tensor: Tensor) -> Tensor:  # (n, C, ...) -> (n, C, *shape)
        remaining = (2,) if first else range(tensor.ndim - len(shape), tensor.ndim)
        others = [d for d in range(2, tensor.ndim) if d not in remaining]
        return tensor.sum(others) if others else tensor

    path = f"{type(module).__name__}, summed over positions"
    blocks: list[Block] = []
    if layer.weight is not None:
        parts = [summed(g * _normalise(module, a).unsqueeze(1)) for a, g in calls]
        blocks.append(DenseBlock(layer.weight, total(parts), path))
    if layer.bias is not None:
        blocks.append(DenseBlock(layer.bias, total([summed(g) for _, g in calls]), path))
    return blocks


def _biases(layer: Layer, gradients: Sequence[Tensor], kind: str) -> list[Block]:
    """Sum gradients (n, C, S, d_out) of each call over S; the weight is frozen."""
    if layer.bias is None:
        return []
    values = total([g.sum(2) for g in gradients])
    return [DenseBlock(layer.bias, values, f"bias of {kind}, summed over positions")]


def _smaller(layer: Layer, calls: Sequence[FactoredBlock]) -> list[Block]:
    """Keep factors if there is one call and they are at most half as large; else make it dense."""
    block = calls[0]
    small = 2 * sum(a[0].numel() for a in block.arrays) <= block.dense_size
    if len(calls) == 1 and (small or layer.always_factored):
        return [block]
    tensors = [call.dense() for call in calls]
    path = f"{block.kind}, summed over positions"
    return [DenseBlock(name, total([t[name] for t in tensors]), path) for name in block.names]


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RULES: tuple[tuple[tuple[type[nn.Module], ...], Callable[[Any], bool], Rule], ...] = (
    ((nn.Linear,), lambda _: True, linear),
    (_CONVOLUTIONS, lambda _: True, _conv),
    (_TRANSPOSED, lambda _: True, _transposed_conv),
    (_BATCH_NORMS, lambda m: m.running_mean is not None, _elementwise),
    ((nn.GroupNorm, nn.LayerNorm, nn.RMSNorm), lambda _: True, _elementwise),
    ((nn.Embedding,), lambda m: m.max_norm is None and not m.scale_grad_by_freq, _embedding),
)
