"""Bucket features: each group of inputs chooses one row of a table, and scores are sums of rows.

Source: Bacellar et al., *Single-Round Scalable Analytic Federated Learning* (SAFLe), CVPR 2026, as
others describe it (arXiv 2512.03336, read in summaries only): inputs are put into buckets by
several functions, shuffled and grouped, and a group's buckets index a table of embeddings. That is
a linear model of sparse features: G groups of g inputs in b buckets each have p = G b^g, G not 0.

Here an example's inputs are scaled to mean 0 and variance 1, and the limits of buckets are normal,
drawn from the seed. Each input is in about as many groups as any other. With p below d b^g / g some
inputs are in no group: with pairs in two buckets take p >= 2 d.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .fourier import in_equal_parts

BUCKETS, GROUP = 2, 2
SPREAD = 0.3  # standard deviation of the limits; these three chosen on validation examples


class BucketFeatures(nn.Module):
    """h (n, d) -> z (n, p), float32: in each group 1 / sqrt(G) at its row, so z has norm 1.

    Nothing is trained or in the state dict: the seed gives groups and limits, on any device. There
    are `buckets` b for an input and `group` g inputs in a group; p is a multiple of b^g.
    """

    chosen: Tensor  # the groups' inputs (G g,), int64
    limits: Tensor  # between buckets (G g, b - 1), increasing

    def __init__(
        self, size: int, num_features: int, seed: int, buckets: int = BUCKETS, group: int = GROUP
    ) -> None:
        super().__init__()
        rows = buckets**group
        if buckets < 2 or group < 1 or num_features < 1 or num_features % rows:
            raise ValueError(
                f"bucket features: expected a multiple of {buckets}^{group} features, with at "
                f"least 2 buckets and 1 input in a group, got {num_features}"
            )
        self.rows, self.buckets, self.group = rows, buckets, group
        inputs = num_features // rows * group
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(size) for _ in range(math.ceil(inputs / size))]
        limits = np.sort(SPREAD * generator.standard_normal((inputs, buckets - 1)), axis=1)
        self.register_buffer("chosen", torch.from_numpy(np.concatenate(orders)[:inputs]), False)
        self.register_buffer("limits", torch.from_numpy(limits).float(), False)

    @property
    def bound(self) -> float:
        """Largest magnitude of a feature."""
        return math.sqrt(self.group / len(self.chosen))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sparse features, as a dense tensor."""
        scaled = in_equal_parts(lambda part: layer_norm(part, part.shape[1:]), inputs.float())
        buckets = (scaled[:, self.chosen, None] > self.limits).sum(2)
        powers = self.buckets ** torch.arange(self.group, device=inputs.device)
        row = (buckets.unflatten(1, (-1, self.group)) * powers).sum(2)
        sums = scaled.new_zeros(*row.shape, self.rows)
        sums.scatter_(2, row.unsqueeze(2), self.bound)
        return sums.flatten(1)
