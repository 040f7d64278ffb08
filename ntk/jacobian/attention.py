"""Torch's multi-head attention with its projections as linear layers, which a rule serves.

``nn.MultiheadAttention`` uses its weights in one function. Here the projections are modules that
are called, and torch's own function, with the identity for each projection, does what is between.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..support.precision import Undo, process_wide

LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_open: list[Undo] = []


@contextmanager
def no_fast_path(model: nn.Module) -> Iterator[None]:
    """Switch off, for a model with attention, what torch does without gradients."""
    if any(isinstance(module, LAYERS) for module in model.modules()):
        with process_wide(_open, _switch_off):
            yield
    else:
        yield


def _switch_off() -> Undo:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return [partial(torch.backends.mha.set_fastpath_enabled, before)]


@contextmanager
def separate_projections(model: nn.Module) -> Iterator[None]:
    """Let the model's attention layers call ``in_proj`` and ``out_proj``, modules of their own.

    Only those with one matrix for queries, keys and values; if these differ, ``in_proj`` is called
    for each.
    """
    layers: list[Any] = [
        module
        for module in model.modules()
        if type(module).forward is nn.MultiheadAttention.forward
        and module.in_proj_weight is not None
    ]
    try:
        for layer in layers:
            projection = nn.Linear(1, 1, device="meta")
            projection.weight, projection.bias = layer.in_proj_weight, layer.in_proj_bias
            layer.in_proj = projection
            layer.forward = partial(_attend, layer)
        yield
    finally:
        for layer in layers:
            del layer.forward, layer.in_proj


def _attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    projected: dict[int, Tensor] = {}
    for tensor in (query, key, value):
        if id(tensor) not in projected:
            projected[id(tensor)] = layer.in_proj(tensor)
    projections = [projected[id(x)].chunk(3, -1)[k] for k, x in enumerate((query, key, value))]
    between = copy.copy(layer)
    identity = torch.eye(layer.embed_dim, dtype=query.dtype, device=query.device)
    weights_of = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), identity)
    without = dict.fromkeys(("in_proj_weight", "in_proj_bias"))
    between._parameters = layer._parameters | weights_of | without
    between._modules = {"out_proj": SimpleNamespace(weight=identity, bias=None)}
    between._qkv_same_embed_dim = False
    attended, weights = nn.MultiheadAttention.forward(between, *projections, *args, **options)  # type: ignore[arg-type]
    return layer.out_proj(attended), weights
