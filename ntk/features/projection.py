"""Projections to few features, made from a seed and never stored.

Source of the Gaussian one: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML
2022, section 4.2. The other is this package's: the lowest frequencies of images, which hold most of
their differences (Ahmed, Natarajan and Rao, *Discrete Cosine Transform*, IEEE Transactions
on Computers C-23, 1974), turned by a rotation from a secret seed.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..support.precision import full_float32

BLOCK_BYTES = 64 * 2**20  # of the matrix, made at a time
ROWS = 4096  # of it that share a generator


@full_float32()
def random_projection(x: Tensor, num_features: int, seed: int) -> Tensor:
    """``x P`` (n, p) with a (d, p) matrix P of independent Gaussian entries of variance 1/p.

    Inner products are kept on average: it is the paper's Z = X P over sqrt(p), in the dtype and on
    the device of x (n, d). 128 bits of the seed count, so that P cannot be found by trying seeds.
    Parties that share a seed share P if their NumPy makes the same normal numbers from it.

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


def low_frequencies(images: Tensor, num_features: int) -> Tensor:
    """Return the lowest frequencies' coefficients of a two-dimensional cosine transform.

    The transform (DCT-II, orthonormal) is of each channel of images (n, H, W) or (n, channels, H,
    W). Coefficients are sorted by (u / H)^2 + (v / W)^2 of their frequencies, then by channel.
    """
    if images.ndim not in (3, 4):
        raise ValueError(
            "low frequencies: expected images of shape (n, H, W) or (n, channels, H, W), got "
            f"{tuple(images.shape)}; use the Gaussian projection for other examples"
        )
    planes = images[:, None] if images.ndim == 3 else images
    channels, height, width = planes.shape[1:]
    if not 1 <= num_features <= channels * height * width:
        raise ValueError(
            f"low frequencies: expected 1 ... {channels * height * width} features, the numbers "
            f"in an image, got {num_features}"
        )
    u, v = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    order = np.argsort(((u / height) ** 2 + (v / width) ** 2).ravel(), kind="stable")
    order = order[: -(-num_features // channels)]
    rows, columns = u.ravel()[order], v.ravel()[order]
    along_rows = cosines(height, int(rows.max()) + 1).to(planes)
    along_columns = cosines(width, int(columns.max()) + 1).to(planes)
    coefficients = along_rows @ planes @ along_columns.T
    chosen = coefficients[:, :, torch.from_numpy(rows), torch.from_numpy(columns)]
    return chosen.transpose(1, 2).flatten(1)[:, :num_features]


def cosines(length: int, count: int) -> Tensor:
    """Return the first rows of the orthonormal DCT-II matrix, float64."""
    k, n = np.arange(count)[:, None], np.arange(length)
    matrix = np.sqrt(2 / length) * np.cos(np.pi * (n + 0.5) * k / length)
    matrix[0] /= np.sqrt(2)
    return torch.from_numpy(matrix)


@full_float32()
def rotated_low_frequencies(images: Tensor, num_features: int, seed: int) -> Tensor:
    """:func:`low_frequencies` times a random rotation: inner products are those of these images.

    The rotation is uniform over all orthogonal matrices (Mezzadri, *How to Generate Random Matrices
    from the Classical Compact Groups*, Notices of the AMS 54, 2007). Without the seed, of any size
    from 0, one does not know which feature is which; examples' lengths and angles are visible.
    """
    features = low_frequencies(images, num_features)
    drawn = np.random.default_rng([seed, *b"rotation"]).standard_normal((num_features,) * 2)
    rotation, triangle = np.linalg.qr(drawn)
    signs = np.sign(np.diag(triangle))  # else the draw is not uniform
    return features @ torch.from_numpy(rotation * signs).to(features)


def blocks_of_matrix(
    rows: int, width: int, seeds: tuple[int, ...]
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the Gaussian matrix (rows, width) of variance 1/width in blocks of rows, float32."""
    size = min(ROWS, max(1, BLOCK_BYTES // (4 * width)))
    for first in range(0, rows, ROWS):
        generator = np.random.default_rng([*seeds, first // ROWS])
        last = min(first + ROWS, rows)
        for start in range(first, last, size):
            stop = min(start + size, last)
            block = generator.standard_normal((stop - start, width), dtype=np.float32)
            yield slice(start, stop), torch.from_numpy(block).div_(math.sqrt(width))
