"""Fed3R: the last layer by ridge regression, from sums that clients add to.

Source: Fani et al., *Accelerating Heterogeneous Federated Learning with Closed-form Classifiers*,
ICML 2024. With features z of a pre-trained network, one-hot labels y and a ridge lambda:

    A = sum of z z^T,  b = sum of z y^T,  W = (A + lambda I)^{-1} b,

with A and b added up client by client in any order; then each class's weights are divided by their
norm. If the layer has a bias, features have a 1 appended, which the ridge counts like the others,
and a class's bias is divided by the norm of its weights without it, as in the authors' program.
Here lambda is `ridge` times the examples' mean squared norm. The paper's random features (Fed3R-RF)
are a property of the network: see :func:`fedntk.ntk.with_fourier_features`.
"""

from collections.abc import Sequence

from fedntk.ntk.options import option
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.sum_task import weights_of_classes

from .closed_form import ClosedFormStrategy, Layer, least_squares, unit_rows


class Fed3R(ClosedFormStrategy):
    """Fed3R (Fani et al. 2024). Clients are :class:`~fedntk.clients.ClosedFormClient`."""

    class_weights: tuple[float, ...] = weights_of_classes()
    ridge: float = option(
        "lambda over the examples' mean squared norm, with the 1", default=0.01, above=0
    )

    def last_layer(self, sums: Sequence[FeatureStatistics]) -> Layer:
        """Return weights of norm 1 (C, p), and biases; both are 0 for a class that nobody has."""
        joint, width = FeatureStatistics.join(sums), self.shape[1]
        linear = least_squares(joint, self.ridge, bias=bool(self.bias))
        return unit_rows(linear[:, :width], linear[:, width] if self.bias else 0.0)
