"""Networks that a configuration can name."""

import math

from torch import nn


def no_linear(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A classifier without a linear layer."""
    convolution = nn.Conv1d(1, num_classes, math.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, -1)), convolution, nn.Flatten())
