"""An (n, p) matrix of features that need not fit in memory: its products, some rows at a time."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..support.memory import available_memory, require_memory
from ..support.precision import full_float32

CHUNK_BYTES = 128 * 2**20  # rows in memory at a time, as float32
CACHED_BYTES = 16 * 2**20  # the same of rows that a CPU has to copy, so that they stay in its cache
BLOCK_BYTES = 1024 * 2**20  # of two blocks of rows, and at most as much of their inner products


class FeatureRows:
    """Features Z (n, p) of float16, float32 or float64, in an array that may be a mapped file.

    Products are formed on `device`, where float16 becomes float32. With `bias` a feature that is 1
    is appended, without a copy of the rows: `shape` is (n, p + 1).
    """

    def __init__(
        self, array: NDArray[Any], *, device: torch.device | str = "cpu", bias: bool = False
    ) -> None:
        self._array = array
        self._bias = bias
        self.device = torch.device(device)
        self.shape = (array.shape[0], array.shape[1] + bias)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (positions, rows without a bias), at most 128 MiB of float32 at a time.

        The next rows may take the place of the last.
        """
        cached = self._array.dtype == np.float16 and self.device.type == "cpu"
        size, room = CACHED_BYTES if cached else CHUNK_BYTES, None
        for rows in self._slices(size // (4 * self.shape[1])):
            features = self._floats(rows, room)
            room = features if room is None else room
            yield rows, features

    def _slices(self, size: int) -> list[slice]:
        n, size = self.shape[0], max(1, size)
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def _floats(self, rows: slice, room: Tensor | None = None) -> Tensor:
        """Return rows without a bias, on the device; made in `room` if they have to be made."""
        features = torch.from_numpy(self._array[rows]).to(self.device)
        if features.dtype != torch.float16:
            return features
        return features.float() if room is None else room[: len(features)].copy_(features)

    @full_float32()
    def __matmul__(self, weights: Tensor) -> Tensor:
        """Z W (n, C) of weights (p, C), in their dtype and on the CPU."""
        width = self.shape[1] - self._bias
        on_device, bias = weights[:width].to(self.device), weights[width:].sum(0)  # 0 without one
        products = [(z.to(on_device) @ on_device).cpu() + bias for _, z in self.chunks()]
        return torch.cat([torch.zeros(0, weights.shape[1], dtype=weights.dtype), *products])

    @full_float32()
    def transposed_matmul(self, coefficients: Tensor) -> Tensor:
        """Z^T A (p, C) of coefficients A (n, C), in their dtype and on the CPU."""
        width, num_columns = self.shape[1] - self._bias, coefficients.shape[1]
        result = torch.zeros(width, num_columns, dtype=coefficients.dtype, device=self.device)
        for rows, z in self.chunks():
            result.addmm_(z.to(result).T, coefficients[rows].to(self.device))
        sums = coefficients.sum(0, keepdim=True)[: int(self._bias)]
        return torch.cat([result.cpu(), sums])

    @full_float32()
    def gram(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Z Z^T (n, n) on the CPU, formed in float32 or float64."""
        n, width = self.shape
        itemsize, room, rows_here = dtype.itemsize, BLOCK_BYTES, 2
        if self.device.type != "cpu":  # all rows go there at once if they fit
            room, rows_here = max(room, available_memory(self.device) // 4), 0
        size = max(1, min(n, room // (2 * itemsize * width), math.isqrt(room // 4)))
        require_memory(
            itemsize * (n * n + size * (rows_here * width + size)),
            f"the kernel of {n} examples",
            cure="give the client fewer examples",
        )
        kernel = torch.empty(n, n, dtype=dtype)
        slices = self._slices(size)
        for i, left in enumerate(slices):
            a = self._floats(left).to(dtype)
            kernel[left, left] = (a @ a.T).cpu()
            for right in slices[:i]:
                block = (a @ self._floats(right).to(dtype).T).cpu()
                kernel[left, right] = block
                kernel[right, left] = block.T
        return kernel.add_(1.0) if self._bias else kernel
