"""DeepAFL: residual blocks before the last layer, all solved for by least squares.

Source: Tang et al., *DeepAFL: Deep Analytic Federated Learning*, ICLR 2026, arXiv 2603.00579;
read were the abstract and the authors' program. With features Phi_t, one-hot labels Y, and random
features F_t = sigma(Phi_t B_t):

    W_t = argmin ||Y - Phi_t W||^2 + lambda ||W||^2,
    Omega_{t+1} = argmin ||(Y - Phi_t W_t) - F_t Omega W_t||^2 + gamma ||Omega||^2,
    Phi_{t+1} = Phi_t + F_t Omega_{t+1}.

There clients are asked twice a layer: for the sums that give W_t, then for F_t^T F_t and
F_t^T (Y - Phi_t W_t). Here they send the sums of (Phi_t, F_t) once. As Phi_{t+1} is a linear
function of these, the sums give W_t, Omega_{t+1} and W_{t+1}: one exchange a layer. Phi_0 are the
last layer's inputs: see :mod:`fedntk.ntk.features.layers`. There is no bias.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from fedntk.ntk.convex.pooled_statistics import sandwiched_ridge
from fedntk.ntk.features.layers import RESIDUAL_LAYER, ResidualFeatures
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics

from ..core.channel import Rounds
from ..core.replies import result_of
from ..core.round import Round
from ..core.uploads import Update
from .afl import AFL


class DeepAFL(AFL):
    """DeepAFL (Tang et al. 2026): a block in each of the first rounds, asked of all clients.

    The network is of :func:`~fedntk.ntk.with_residual_features`; its blocks begin anew.
    """

    takes_real_targets = False

    ridge: float = option(
        "lambda over the examples' mean squared norm; 0: least norm", default=0.01, at_least=0
    )
    block_ridge: float = option(
        "gamma over mean squared norms of random features and class weights", default=0.01, above=0
    )
    num_solved: int = state(int)  # blocks

    def prepare_method(self) -> None:
        """Find the blocks."""
        name, blocks = ResidualFeatures.find(self.network, self.shape[1])
        prefix = f"{name}." if name else ""
        self.omegas = [f"{prefix}omegas.{t}" for t in range(len(blocks.directions))]
        self.block_width = int(blocks.directions.shape[2])

    @property
    def width(self) -> int:
        """Number of features that clients add up: p + m."""
        return self.shape[1] + self.block_width

    def first_arrays(self, arrays: ArrayRecord) -> ArrayRecord:
        """Set the blocks to 0 before the first is computed."""
        if self.num_solved:
            return arrays
        zeros = np.zeros((self.block_width, self.shape[1]), np.float32)
        return ArrayRecord({**arrays, **{name: Array(zeros) for name in self.omegas}})

    def task(self) -> dict[str, Any]:
        """Add which layer's random features are to be sent."""
        return {**super().task(), RESIDUAL_LAYER: self.num_solved}

    def train_round(self, r: Round) -> Rounds[Update]:
        """Compute the next block, and the last layer after it; train no more after the last."""
        if self.solved:
            return Update(None)
        uploads = yield from self.ask_sums(r)  # of (Phi_t, F_t)
        if not self.enough(uploads):
            return Update(uploads)
        arrays = result_of(lambda: self.with_block(r.arrays, uploads.values))
        if arrays is not None:
            self.num_solved += 1
            self.solved = self.num_solved == len(self.omegas)
        return Update(uploads, arrays)

    def with_block(self, arrays: ArrayRecord, sums: Sequence[FeatureStatistics]) -> ArrayRecord:
        """Return arrays with the next Omega (m, p), and the last layer after it, in place."""
        joint, p = FeatureStatistics.join(sums), self.shape[1]
        matrix = joint.matrix()
        weight, _ = self.last_layer([joint.mapped(np.eye(self.width, p))])  # W_t
        cross = joint.class_sums.T[p:] - matrix[p:, :p] @ weight.T  # F^T (Y - Phi W)
        gram, right, linear = map(torch.from_numpy, (matrix[p:, p:], cross, weight.T))
        omega = sandwiched_ridge(gram, right, linear, self.block_ridge, joint.num_examples).numpy()
        new = {self.omegas[self.num_solved]: Array(omega.astype(np.float32))}
        step = np.concatenate([np.eye(p), omega])  # Phi_{t+1} = (Phi_t, F_t) times it
        layer = self.last_layer([joint.mapped(step)])
        return self.with_layer(ArrayRecord({**arrays, **new}), layer)
