"""Features of the empirical tangent kernel for one logit.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4.1 and appendix B: phi(x) = d f_1(x) / d w for one logit f_1, and p random
coordinates of it. The Gaussian projection is the usual alternative (Johnson and Lindenstrauss).
The other is the count sketch of Charikar, Chen and Farach-Colton, *Finding Frequent Items in Data
Streams*, ICALP 2002: each coordinate is added, with a random sign, to one of p random buckets. Of
an outer product u v^T it is the circular convolution of count sketches of u and v, so that the
product is never formed: Pham and Pagh, *Fast and Scalable Polynomial Kernels via Explicit Feature
Maps* (TensorSketch), KDD 2013. Inner products are right on average, with a standard deviation of
up to about |x| |x'| sqrt(2 / p), of an outer product some twice that.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..jacobian.blocks import Block
from ..jacobian.differentiate import differentiate_in_chunks
from ..jacobian.factors import FactoredBlock
from ..jacobian.operator import Jacobian
from ..support.memory import require_memory
from .projection import blocks_of_matrix

Method = Literal["subsample", "projection", "sketch"]
PROJECTION_BYTES = 512 * 2**20  # of the widest parameter's gradients


def entk_features(
    model: nn.Module,
    x: Tensor,
    num_features: int,
    seed: int,
    output: int = 0,
    *,
    method: Method = "subsample",
    dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
) -> Tensor:
    """Tangent features (n, p) of one logit, in fewer dimensions than parameters; on the CPU.

    Peak memory is n p numbers for the result, and for each of b examples its factors, its features
    in float32, and with ``"projection"`` or ``"sketch"`` its largest parameter's gradient.

    Parameters
    ----------
    model : nn.Module
        Map from (n, ...) to (n, C); it is used in evaluation mode.
    x : Tensor, shape (n, ...)
        Examples, on the model's device.
    num_features : int
        Number p of features.
    seed : int
        Seed of the coordinates, the matrix or the sketch.
    output : int
        Index of the logit.
    method : {"subsample", "projection", "sketch"}
        ``"subsample"``: p of the P coordinates of d f_output(x) / d w, drawn without replacement
        and unscaled, as in the paper: (P/p) times their inner products estimates the logit's
        kernel. Inner products of the others estimate the kernel itself. ``"projection"``: the
        gradient times a (P, p) matrix of Gaussian entries of variance 1/p, in about P p operations
        an example. ``"sketch"``: its count sketch, in about P + p log p, with more variance.
    dtype : torch.dtype
        float16, float32 or float64, of the result.
    chunk_size : int, optional
        Examples b at a time; by default as in :func:`jacobian`, with ``"projection"`` as many as
        make 512 MiB of the largest parameter's gradients.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> entk_features(model, torch.ones(4, 3), 5, seed=0).shape
    torch.Size([4, 5])
    """
    return TangentFeatures(model, num_features, seed, output, method, dtype, chunk_size)(x)


class CountSketch:
    """Linear map x (n, d) -> (n, p) that adds each coordinate to a random bucket, with a sign."""

    def __init__(self, size: int, width: int, seeds: tuple[int, ...]) -> None:
        generator = np.random.default_rng(seeds)
        self._buckets = torch.from_numpy(generator.integers(width, size=size))
        self._signs = torch.from_numpy(generator.integers(2, size=size, dtype=np.int8) * 2 - 1)

    def add(self, x: Tensor, sums: Tensor) -> None:
        """Add the sketch of x (n, d) to `sums` (n, p), on its device."""
        sums.index_add_(1, self._buckets.to(x.device), x * self._signs.to(x))


@dataclass(eq=False, repr=False)
class TangentFeatures:
    """The function x -> features of :func:`entk_features`, which prepares once for many calls.

    The model may get other weights, but no other form, between calls.
    """

    model: nn.Module
    num_features: int
    seed: int
    output: int = 0
    method: Method = "subsample"
    dtype: torch.dtype = torch.float32
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        sizes = {n: p.numel() for n, p in self.model.named_parameters() if p.requires_grad}
        total, sampled = sum(sizes.values()), self.method == "subsample"
        if self.method not in get_args(Method):
            raise ValueError(f"method: expected one of {get_args(Method)}, got {self.method!r}")
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
        self._sketches: dict[tuple[str, int, int], CountSketch] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of examples (n, ...), on the CPU."""
        width = self.num_features
        require_memory(
            len(x) * width * self.dtype.itemsize,
            f"{width} features of {len(x)} examples",
            cure="lower num_features or use fewer examples",
        )
        features = torch.empty(len(x), width, dtype=self.dtype)
        sampled = self.method == "subsample"
        chunks = differentiate_in_chunks(
            self.model,
            x,
            "factors" if sampled and x.device.type == "cpu" else "factored",
            outputs=[self.output],
            chunk_size=self.chunk_size,
            more_bytes=4 * width,
        )
        with chunks as parts:
            for start, part in parts:
                rows = features[start : start + part.num_examples]
                if sampled:
                    on_cpu = part.device.type == "cpu"
                    there = rows if on_cpu else torch.empty_like(rows, device=part.device)
                    self._select(part, there)
                else:
                    add = self._add_sketch if self.method == "sketch" else self._add_projection
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

    def _select(self, part: Jacobian, rows: Tensor) -> None:
        for block in part.blocks:
            for name in self._chosen.keys() & block.names:
                columns, coordinates = self._chosen[name]
                out = rows[:, columns].unsqueeze(1)
                block.write_columns(name, coordinates.to(part.device), out)

    def _add_projection(self, block: Block, sums: Tensor) -> None:
        for name, tensor in block.dense().items():
            flat, seeds = tensor.flatten(1), (self.seed, self._names.index(name))
            for columns, matrix in blocks_of_matrix(flat.shape[1], self.num_features, seeds):
                sums.addmm_(flat[:, columns], matrix.to(sums))

    def _add_sketch(self, block: Block, sums: Tensor) -> None:
        if (  # with few positions the gradient sums few outer products: factors are sketched
            isinstance(block, FactoredBlock)
            and 2 * block.positions * self.num_features <= block.dense_size
            and block.groups == 1
            and not block.integers
        ):
            sums += self._sketch_products(block)
            return
        for name, tensor in block.dense().items():
            flat = tensor.flatten(1)
            self._sketch(name, flat.shape[1], 0).add(flat, sums)

    def _sketch_products(self, block: FactoredBlock) -> Tensor:
        inputs, spectra = block.patches()[:, 0], []  # (n, S, d')
        if block.bias is not None:
            inputs = torch.cat([inputs, inputs.new_ones(*inputs.shape[:2], 1)], 2)
        for side, x in enumerate((block.gradients[:, 0], inputs), start=1):
            sums = x.new_zeros(x.shape[0] * x.shape[1], self.num_features)
            self._sketch(block.weight, x.shape[2], side).add(x.flatten(0, 1), sums)
            spectra.append(torch.fft.rfft(sums).unflatten(0, x.shape[:2]))
        product = (spectra[0] * spectra[1]).sum(1)
        result: Tensor = torch.fft.irfft(product, n=self.num_features)
        return result

    def _sketch(self, name: str, size: int, side: int) -> CountSketch:
        key = (name, size, side)
        if key not in self._sketches:
            seeds = (self.seed, self._names.index(name), side)
            self._sketches[key] = CountSketch(size, self.num_features, seeds)
        return self._sketches[key]


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
