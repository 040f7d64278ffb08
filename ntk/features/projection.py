"""Gaussian random projections, made from a seed and never stored.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2;
the usual alternative (Johnson and Lindenstrauss) to the coordinates of Yu et al., NeurIPS 2022.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..precision import full_float32

__all__ = ["blocks_of_matrix", "random_projection"]

BLOCK_BYTES = 64 * 2**20  # of the matrix, made at a time
ROWS = 4096  # of it that share a generator


@full_float32()
def random_projection(x: Tensor, num_features: int, seed: int) -> Tensor:
    """``x P`` with a (d, p) matrix P of independent Gaussian entries of variance 1/p.

    Inner products are kept on average: x P is the paper's Z = X P, with its standard Gaussian
    entries, over sqrt(p) (Yue et al. 2022, section 4.2). P is made in blocks of rows from the seed,
    on the CPU and so the same for any device, and is never stored as a whole.

    The seed may have any size, and 128 bits of it count: P cannot be found by trying seeds, as it
    could with torch's generator, which keeps 32 bits of a seed on the CPU. Parties that share a
    seed share P if their NumPy makes the same normal numbers from it.

    Parameters
    ----------
    x : Tensor, shape (n, d)
        Rows to project.
    num_features : int
        p.
    seed : int
        Of P, at least 0.

    Returns
    -------
    Tensor, shape (n, p)
        In the dtype and on the device of `x`.

    Raises
    ------
    ValueError
        If `x` has not two axes or p is under 1.

    Examples
    --------
    >>> random_projection(torch.eye(3), 2, seed=0).shape
    torch.Size([3, 2])
    """
    if x.ndim != 2 or num_features < 1:
        raise ValueError(
            "random_projection: expected (n, d) and at least one feature, "
            f"got {tuple(x.shape)} and {num_features}"
        )
    result = x.new_zeros(len(x), num_features)
    for columns, block in blocks_of_matrix(x.shape[1], num_features, (seed,)):
        result.addmm_(x[:, columns], block.to(x))
    return result


def blocks_of_matrix(
    rows: int, width: int, seeds: tuple[int, ...]
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the Gaussian matrix (rows, width) of variance 1/width in blocks of rows, float32.

    The generator starts anew every `ROWS` rows; within these, blocks follow one another.
    """
    size = min(ROWS, max(1, BLOCK_BYTES // (4 * width)))
    for first in range(0, rows, ROWS):
        generator = np.random.default_rng([*seeds, first // ROWS])
        last = min(first + ROWS, rows)
        for start in range(first, last, size):
            stop = min(start + size, last)
            block = generator.standard_normal((stop - start, width), dtype=np.float32)
            yield slice(start, stop), torch.from_numpy(block).div_(math.sqrt(width))
