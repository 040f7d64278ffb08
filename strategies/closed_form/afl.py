"""AFL: the last layer by least squares, in one exchange, the same for every split of the examples.

Source: He et al., *AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
Models*, CVPR 2025. Client k solves a ridge regression on its features Z_k and one-hot labels Y_k,

    C_k = Z_k^T Z_k + gamma I,  W_k = C_k^{-1} Z_k^T Y_k,

and sends W_k and C_k. The server aggregates two solutions at a time by the absolute aggregation
law, exactly, and in the end takes gamma of all K clients out again (the RI process):

    W = (C - K gamma I)^{-1} C W_agg,  C = sum of the C_k.

That is W = (sum Z_k^T Z_k)^{-1} sum Z_k^T Y_k, the joint solution without gamma. So clients here
send Z_k^T Z_k and Z_k^T Y_k themselves, C_k - gamma I and C_k W_k of the paper: there is no gamma.
If the joint matrix is singular, W is the solution of least norm. The layer has no bias; one that
the network has is set to 0.
"""

from collections.abc import Sequence

import numpy as np

from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.sum_task import weights_of_classes

from .closed_form import ClosedFormStrategy, Layer, least_squares


class AFL(ClosedFormStrategy):
    """AFL (He et al. 2025), the paper's with a ridge of 0.

    Clients are :class:`~fedntk.clients.ClosedFormClient`.
    """

    takes_real_targets = True

    real_targets: bool = argument("whether clients have real targets, not classes", default=False)
    class_weights: tuple[float, ...] = weights_of_classes()
    ridge: float = option(
        "over the examples' mean squared norm; 0: solution of least norm", default=0.0, at_least=0
    )

    def check(self) -> None:
        """Refuse real targets if the method is of classes."""
        if self.real_targets and not self.takes_real_targets:
            raise ValueError(f"real_targets: {type(self).__name__} is of classes; expected False")
        if self.real_targets and self.class_weights:
            raise ValueError("class_weights: real targets have no classes; expected none")

    @property
    def num_targets(self) -> int:
        """Number of real targets."""
        return self.shape[0] if self.real_targets else 0

    def last_layer(self, sums: Sequence[FeatureStatistics]) -> Layer:
        """Return the joint solution (C, p), and zeros for a bias."""
        joint = FeatureStatistics.join(sums)
        layer = least_squares(joint, self.ridge, num_targets=self.num_targets)
        return layer, np.zeros(self.shape[0])
