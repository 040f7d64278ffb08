"""Sketches of gradients: few numbers with inner products that estimate those of the gradients.

Source: the count sketch of Charikar, Chen and Farach-Colton, *Finding Frequent Items in Data
Streams*, ICALP 2002: each coordinate is added, with a random sign, to one of p random buckets. Of
an outer product u v^T it is the circular convolution of count sketches of u and v, so that the
product is never formed: Pham and Pagh, *Fast and Scalable Polynomial Kernels via Explicit Feature
Maps* (TensorSketch), KDD 2013. Inner products of either are right on average. Their standard
deviation is up to about |x| |x'| sqrt(2 / p), of an outer product some twice that.
"""

import numpy as np
import torch
from torch import Tensor

from ..jacobian.blocks import Block
from ..jacobian.factors import FactoredBlock


class CountSketch:
    """The linear map x (n, d) -> (n, p) that adds each coordinate to a bucket, with a sign."""

    def __init__(self, size: int, width: int, seeds: tuple[int, ...]) -> None:
        generator = np.random.default_rng(seeds)
        self._buckets = torch.from_numpy(generator.integers(width, size=size))
        self._signs = torch.from_numpy(generator.integers(2, size=size, dtype=np.int8) * 2 - 1)

    def add(self, x: Tensor, sums: Tensor) -> None:
        """Add the sketch of x (n, d) to `sums` (n, p), on its device."""
        sums.index_add_(1, self._buckets.to(x.device), x * self._signs.to(x))


class GradientSketch:
    """The sketch of one logit's gradients, from a Jacobian's blocks, one after another.

    The gradient of a layer with few positions is a sum of few outer products: their factors are
    sketched. The position of a parameter among the network's `names` is in its sketches' seed.
    """

    def __init__(self, names: list[str], width: int, seed: int) -> None:
        self._names, self._width, self._seed = names, width, seed
        self._made: dict[tuple[str, int, int], CountSketch] = {}

    def add(self, block: Block, sums: Tensor) -> None:
        """Add the sketch of a block of one output to `sums` (n, p)."""
        if isinstance(block, FactoredBlock) and self._takes_factors(block):
            inputs = block.patches()[:, 0]
            if block.bias is not None:
                inputs = torch.cat([inputs, inputs.new_ones(*inputs.shape[:2], 1)], 2)
            sums += self._of_outer_products(block.weight, block.gradients[:, 0], inputs)
            return
        for name, tensor in block.dense().items():
            flat = tensor.flatten(1)
            self._sketch(name, flat.shape[1], 0).add(flat, sums)

    def _takes_factors(self, block: FactoredBlock) -> bool:
        """Whether to sketch the factors at all positions is less work than the whole gradient."""
        work = 2 * block.positions * self._width
        return work <= block.dense_size and block.groups == 1 and not block.integers

    def _of_outer_products(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Sketch the sum over positions of outer products: (n, S, d), (n, S, d') -> (n, p)."""
        spectra = []
        for side, x in enumerate((left, right), start=1):
            sums = x.new_zeros(x.shape[0] * x.shape[1], self._width)
            self._sketch(name, x.shape[2], side).add(x.flatten(0, 1), sums)
            spectra.append(torch.fft.rfft(sums).unflatten(0, x.shape[:2]))
        product = (spectra[0] * spectra[1]).sum(1)
        result: Tensor = torch.fft.irfft(product, n=self._width)
        return result

    def _sketch(self, name: str, size: int, side: int) -> CountSketch:
        key = (name, size, side)
        if key not in self._made:
            seeds = (self._seed, self._names.index(name), side)
            self._made[key] = CountSketch(size, self._width, seeds)
        return self._made[key]
