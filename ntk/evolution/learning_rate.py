"""The largest stable learning rate of a kernel.

Gradient descent on the linearised network multiplies the part of the residual along an eigenvector
of the kernel by ``1 - eta s lambda`` in each step, with s = 1/n for cross-entropy and 1/(n C) for
MSE. At ``eta s lambda_max = 1`` none overshoots. The gradient flow depends only on ``eta t``, so
with that rate one grid of steps suits kernels of any size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AUTO = "auto"
AUTO_STEPS = (10, 30, 100, 300, 1000, 3000, 10_000)  # in times of the kernel's fastest part
MOST_PRODUCTS = 100


def largest_eigenvalue(product: Callable[[Tensor], Tensor], example: Tensor) -> float:
    """Largest eigenvalue of a positive semi-definite operator, by power iteration from below.

    `product` is the operator's product with a tensor like `example` (shape, dtype, device). The
    iteration stops once the estimate grows by less than 1e-4 in a product, or after 100.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(example.shape, generator=generator, dtype=torch.float64).to(example)
    value = 0.0
    for _ in range(MOST_PRODUCTS):
        vector = product(vector / vector.norm())
        before, value = value, float(vector.norm())
        if not torch.isfinite(vector).all():
            raise ValueError("the kernel is not finite; look for NaN in the inputs")
        if value <= before * (1 + 1e-4):
            break
    return value
