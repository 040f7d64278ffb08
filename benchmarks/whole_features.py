"""Features as whole numbers, int8, with labels of ten classes: their sums and regression."""

import numpy as np
import torch
from torch import Tensor

from fedntk.ntk import Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics


class WholeFeatures:
    """Random Fourier features of a width, in steps of 8 bits."""

    def __init__(self, width: int) -> None:
        self.step = 2.0 ** np.ceil(np.log2(np.sqrt(2 / width) / 127))
        self.fixed = FixedPoint(np.full(width, self.step, np.float32), bits=8)
        self.identity = Normaliser.identity(width)

    def sums(self, features: Tensor, labels: Tensor) -> FeatureStatistics:
        """Add up features (n, p)."""
        real = [features.float() * self.step]
        return FeatureStatistics.of(real, labels, 10, fixed_point=self.fixed)

    def equations(self, sums: FeatureStatistics) -> NormalEquations:
        """Return the ridge regression with a bias, as OneExchange has it."""
        return NormalEquations.of(sums.scaled(self.fixed), self.identity, bias=True)

    def rows(self, features: Tensor) -> Tensor:
        """Return features with a 1 appended (n, p + 1), float64."""
        return torch.cat([features.double() * self.step, torch.ones(len(features), 1)], 1)
