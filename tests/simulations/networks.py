"""Networks that a configuration can name."""

import math

from torch import Tensor, nn


def no_linear(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A classifier without a linear layer."""
    convolution = nn.Conv1d(1, num_classes, math.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, -1)), convolution, nn.Flatten())


def normalised(input_shape: tuple[int, ...], num_classes: int, *more: nn.Module) -> nn.Module:
    """A small classifier with BatchNorm."""
    width = math.prod(input_shape)
    layers = nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), *more, nn.Linear(16, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)


def dropout(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A small classifier with BatchNorm and dropout."""
    return normalised(input_shape, num_classes, nn.Dropout(0.5))


class Halved(nn.Module):
    """Halves what it is given in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def halving(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A linear classifier that changes its inputs."""
    width = math.prod(input_shape)
    return nn.Sequential(Halved(), nn.Flatten(), nn.Linear(width, num_classes))


def three_classes(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A classifier after a frozen layer, with three outputs whatever is asked."""
    frozen = nn.Linear(*input_shape, 4).requires_grad_(requires_grad=False)
    return nn.Sequential(frozen, nn.Linear(4, 3))
