"""Features of the empirical tangent kernel for one logit.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4.1 and appendix B: phi(x) = d f_1(x) / d w for one logit f_1, and p random
coordinates of it. The Gaussian projection is the usual alternative (Johnson and Lindenstrauss).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..jacobian.blocks import Block
from ..jacobian.differentiate import differentiate_in_chunks
from ..jacobian.operator import Jacobian
from ..support.memory import require_memory
from .projection import blocks_of_matrix
from .sketch import GradientSketch

PROJECTION_BYTES = 512 * 2**20  # of the widest parameter's gradients


def entk_features(
    model: nn.Module,
    x: Tensor,
    num_features: int,
    seed: int,
    output: int = 0,
    *,
    method: Literal["subsample", "projection", "sketch"] = "subsample",
    dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
) -> Tensor:
    """Tangent features (n, p) of one logit, in fewer dimensions than parameters; on the CPU.

    Peak memory is n p numbers for the result, and for a chunk of b examples b times an example's
    factors, its features in float32, and with ``"projection"`` or ``"sketch"`` its largest
    parameter's gradient.

    Parameters
    ----------
    model : nn.Module
        Map from (n, ...) to (n, C); it is used in evaluation mode.
    x : Tensor, shape (n, ...)
        Examples, on the model's device.
    num_features : int
        Number p of features.
    seed : int
        Seed of the coordinates, the matrix or the sketch; clients that share it share them.
    output : int
        Index of the logit.
    method : {"subsample", "projection", "sketch"}
        ``"subsample"``: p of the P coordinates of d f_output(x) / d w, drawn without replacement
        and unscaled, as in the paper; (P/p) times their inner products estimates the kernel of that
        logit. ``"projection"``: the whole gradient times a (P, p) matrix of independent Gaussian
        entries of variance 1/p; their inner products estimate the kernel itself, for about P p
        operations an example. ``"sketch"``: a count sketch of the gradient, which also estimates
        the kernel, with more variance, for about P + p log p operations (:mod:`.sketch`).
    dtype : torch.dtype
        Dtype of the result: float16, float32 or float64.
    chunk_size : int, optional
        Examples b at a time; by default as in :func:`jacobian`, or, with ``"projection"``, as many
        as make 512 MiB of the largest parameter's gradients.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> entk_features(model, torch.ones(4, 3), 5, seed=0).shape
    torch.Size([4, 5])
    """
    return TangentFeatures(model, num_features, seed, output, method, dtype, chunk_size)(x)


@dataclass(eq=False, repr=False)
class TangentFeatures:
    """The function x -> features of :func:`entk_features`; the arguments are those.

    Results that do not depend on the examples are kept, so that many small calls cost little more
    than a large one. The model may get other weights, but no other form, between calls.
    """

    model: nn.Module
    num_features: int
    seed: int
    output: int = 0
    method: Literal["subsample", "projection", "sketch"] = "subsample"
    dtype: torch.dtype = torch.float32
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        sizes = {n: p.numel() for n, p in self.model.named_parameters() if p.requires_grad}
        total, sampled = sum(sizes.values()), self.method == "subsample"
        if self.method not in ("subsample", "projection", "sketch"):
            raise ValueError(
                f"method: expected 'subsample', 'projection' or 'sketch', got {self.method!r}"
            )
        if self.num_features < 1 or (sampled and self.num_features > total):
            raise ValueError(
                f"num_features: expected 1 ... {total}, the model's trainable parameters, "
                f"got {self.num_features}"
            )
        if self.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ValueError(f"dtype: expected float16, float32 or float64, got {self.dtype}")
        if self.method == "projection":  # few chunks: the matrix is made anew for each
            widest = max(sizes.values(), default=1)
            self.chunk_size = self.chunk_size or max(1, PROJECTION_BYTES // (4 * widest))
        self._names = list(sizes)
        self._chosen = _coordinates(sizes, self.num_features, self.seed) if sampled else {}
        self._sketch = GradientSketch(self._names, self.num_features, self.seed)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of examples (n, ...), on the CPU."""
        width = self.num_features
        require_memory(
            len(x) * width * self.dtype.itemsize,
            f"{width} features of {len(x)} examples",
            cure="lower num_features or use fewer examples",
        )
        features = torch.empty(len(x), width, dtype=self.dtype)
        alone = self.method == "subsample" and x.device.type == "cpu"  # few entries, each by itself
        chunks = differentiate_in_chunks(
            self.model,
            x,
            "factors" if alone else "factored",
            outputs=[self.output],
            chunk_size=self.chunk_size,
            more_bytes=4 * width,
        )
        with chunks as parts:
            for start, part in parts:
                rows = features[start : start + part.num_examples]
                if self.method == "subsample":
                    on_cpu = part.device.type == "cpu"
                    there = rows if on_cpu else torch.empty_like(rows, device=part.device)
                    _select(part, self._chosen, there)
                else:
                    add = self._sketch.add if self.method == "sketch" else self._add_projection
                    sums = torch.zeros(len(rows), width, dtype=part.dtype, device=part.device)
                    for block in part.blocks:
                        add(block, sums)
                    there = sums.to(rows.dtype)
                if there is not rows:
                    rows.copy_(there)
                if not all(map(torch.isfinite, there.aminmax())):  # one pass; NaN spreads
                    half = self.dtype == torch.float16
                    raise ValueError(
                        f"features: some are not finite in {self.dtype}; look for NaN in the "
                        "inputs" + (", or store them in float32" if half else "")
                    )
        return features

    def _add_projection(self, block: Block, sums: Tensor) -> None:
        for name, tensor in block.dense().items():
            flat, seeds = tensor.flatten(1), (self.seed, self._names.index(name))
            for columns, matrix in blocks_of_matrix(flat.shape[1], self.num_features, seeds):
                sums.addmm_(flat[:, columns], matrix.to(sums))


def _coordinates(
    sizes: dict[str, int], num_features: int, seed: int
) -> dict[str, tuple[slice, Tensor]]:
    """Parameter name -> columns of the features, and the coordinates that they hold."""
    total = sum(sizes.values())
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(total, dtype=torch.bool)
    mask[torch.randperm(total, generator=generator)[:num_features]] = True
    drawn = mask.nonzero().flatten()
    starts = np.cumsum([0, *sizes.values()])
    edges = torch.searchsorted(drawn, torch.from_numpy(starts)).tolist()
    return {
        name: (slice(first, last), drawn[first:last] - start)
        for name, start, first, last in zip(sizes, starts, edges, edges[1:], strict=False)
        if last > first
    }


def _select(part: Jacobian, chosen: dict[str, tuple[slice, Tensor]], rows: Tensor) -> None:
    for block in part.blocks:
        for name in block.names:
            if name in chosen:
                columns, coordinates = chosen[name]
                out = rows[:, columns].unsqueeze(1)
                block.write_columns(name, coordinates.to(part.device), out)
