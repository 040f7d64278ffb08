"""Which row of a layer belongs to which example.

A network may reorder its batch, by length for instance, and put it back; a layer's rule needs the
row of each example. :func:`keeps_rows` proves from the graph of a chunk that row i is example i;
else :func:`rows_of_examples` takes it from one more backward pass, with a weight for each example.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .readout import NAMES

# Operations by what they do to the parts of examples. Those are consecutive in a tensor's logical
# order, so that what only reshapes keeps them.
RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "Clone"}
BY_NUMBER = {  # and matrix by matrix
    *NAMES,
    *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Sqrt", "Rsqrt", "Abs"),
    *("Sin", "Cos", "Erf", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Where"),
    *("MaskedFill", "LogSigmoid", "PreluKernel", "ToCopy", "Expand", "Bmm", "MseLoss"),
    *("ScaledDotProductFlashAttentionForCpu", "BinaryCrossEntropyWithLogits"),
}
BY_SLICE = {  # along the first axis, of the input at this place
    **dict.fromkeys(("Convolution", "NativeBatchNorm", "CudnnBatchNorm"), 0),
    **dict.fromkeys(("NativeGroupNorm", "NativeLayerNorm", "FusedRmsNorm", "NllLoss", "Mm"), 0),
    **dict.fromkeys(("MaxPool2DWithIndices", "AvgPool2D", "AdaptiveAvgPool2D"), 0),
    **dict.fromkeys(("ConstantPadNd", "UpsampleNearest2D", "UpsampleBilinear2D"), 0),
    "Addmm": 1,
}
ALONG_AXES = {  # that they name
    *("Transpose", "Select", "Slice", "Cat", "Stack", "Split", "Unbind", "Sum", "Mean", "Var"),
    *("Max", "Min", "Amax", "Amin", "Softmax", "LogSoftmax", "Logsumexp", "LinalgVectorNorm"),
    *("Glu", "Cumsum", "Flip", "Gather", "IndexSelect"),
}
AXES = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1")


def keeps_rows(outputs: Tensor, points: Sequence[Tensor]) -> bool:
    """Whether the graph shows that row i of each point (n, ...) acts only on row i of `outputs`."""
    reaching = {point.grad_fn for point in points}
    for node, inputs in nodes_behind(outputs.grad_fn):
        places = [k for k, (parent, _) in enumerate(inputs) if parent in reaching]
        if not all(_keeps(node, k, inputs[k], len(outputs)) for k in places):
            return False
        if places:
            reaching.add(node)
    return True


def nodes_behind(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of a graph that read others, with those, each after those that it reads."""
    seen, stack = {None}, [(root, None)]
    while stack:
        node, inputs = stack.pop()
        if inputs is not None:
            yield node, inputs
        elif node not in seen:
            seen.add(node)
            if inputs := node.next_functions:
                stack.append((node, inputs))
                stack += [(parent, None) for parent, _ in inputs]


def _keeps(node: Any, place: int, source: tuple[Any, int], n: int) -> bool:
    """Whether an operation leaves the n parts of its input, an output of another, in place."""
    kind = node.name().rpartition("Backward")[0]
    if kind in RESHAPES:
        return True
    parent, output = source
    before, after = parent._input_metadata[output].shape, node._input_metadata[0].shape
    if not len(before) or not len(after) or before[0] != after[0] or before[0] % n:
        return False
    if kind in BY_NUMBER or (kind == "Slice" and before == after):
        return len(before) == len(after) and getattr(node, "_saved_reduction", 0) == 0
    if kind in BY_SLICE:
        return place == BY_SLICE[kind] and not (
            getattr(node, "_saved_training", False)
            or getattr(node, "_saved_reduction", 0)
            or len(getattr(node, "_saved_normalized_shape", ())) >= len(before)
            or len(getattr(node, "_saved_pad", ())) > 2 * (len(before) - 1)
        )
    if kind == "Permute":
        return bool(node._saved_dims[0] == 0)
    axes = [getattr(node, name) for name in AXES if hasattr(node, name)]
    if kind not in ALONG_AXES or not axes or None in axes:
        return False
    fewest = min(len(before), len(after))
    flat = [d for axis in axes for d in (axis if isinstance(axis, tuple) else (axis,))]
    signed = [d - 2**64 if d >= 2**63 else d for d in flat]
    return all(d > 0 or -fewest < d < 0 for d in signed)


def draw_weights(n: int, like: Tensor) -> Tensor:
    """Return n different weights in 1 ... 2, from a fixed seed."""
    generator = torch.Generator().manual_seed(n)
    places = torch.randperm(n, generator=generator) + torch.rand(n, generator=generator) / 2
    return (1 + places / n).to(like)


def rows_of_examples(plain: Tensor, weighted: Tensor, weights: Tensor) -> Tensor | None:
    """Return the row of each example; None if rows are not examples.

    Both are gradients (rows, ...) of sums over n examples, the second with a weight for each. Of a
    row that acts on one example the second is the first times its weight.
    """
    n = len(weights)
    if len(plain) != n:
        return None
    noise = min(0.1 / n, 1e-9 if plain.dtype == torch.float64 else 1e-4)
    plain, weighted = (gradient.reshape(n, -1).double() for gradient in (plain, weighted))
    scale = plain.abs().amax(1, keepdim=True)
    scale = torch.where(scale == 0, 1.0, scale)
    plain, weighted, weights = plain / scale, weighted / scale, weights.double()
    sizes = plain.square().sum(1)
    ratios = (plain * weighted).sum(1) / torch.where(sizes == 0, 1.0, sizes)
    examples = (ratios[:, None] - weights).abs().argmin(1)
    rests = (weighted - weights[examples, None] * plain).square().sum(1)
    if not bool((rests <= sizes * noise**2).all()):
        return None
    used = (sizes > 0).nonzero().flatten()
    rows = torch.full((n,), -1, device=plain.device)
    rows[examples[used]] = used
    if int((rows >= 0).sum()) != len(used):
        return None  # two rows act on one example
    rows[rows < 0] = (sizes == 0).nonzero().flatten()  # they act on none
    return rows
