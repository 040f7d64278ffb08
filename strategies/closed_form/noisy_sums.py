"""Noise in the sums of least squares, added once: differential privacy of an example or a client.

What it protects, and why: see :mod:`fedntk.ntk.convex.private_sums`.
"""

import secrets
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.convex.private_sums import SumNoise, solve_noisy
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.sum_task import NoiseOptions

from ..core.replies import Reply


class NoiseShares(NamedTuple):
    """How many clients' shares of noise are in a secure sum, and how few could have opened it."""

    clients: int
    quorum: int


class NoisySums(NoiseOptions):
    """One release of the sums with noise, from which the model follows; each reply counts as one.

    A trusted server adds Gaussian noise; under secure aggregation each client adds a share of
    Skellam noise to its own sums, and the threshold gives the fewest shares. The strategy tells
    clients ``to_config()`` with every message, in evaluation as well: a client with a limit on its
    privacy refuses to evaluate on the examples of its sums. It goes with OneExchange; the moments
    by which TCT normalises features would need noise of their own.

    Attributes
    ----------
    released : bool
        Whether sums with noise may have been sent out: a second release adds to epsilon.
    epsilon_reached : float
        Epsilon of the clients whose shares of noise are in the sum.
    """

    epsilon: float = option(
        "epsilon of differential privacy, of sums that are released once",
        to_clients=True,
        above=0,
        kw_only=False,
    )
    released: bool = state(bool, reset=False)
    epsilon_reached: float = state(float)

    def require_unreleased(self) -> None:
        """Refuse a second release."""
        if self.released:
            raise ValueError(
                "noise: sums with noise were released, or may have before its run was cut off, and "
                "a second release adds to epsilon; make a new strategy, in another folder, and add "
                "up the epsilons"
            )

    def check_reply(self, reply: Reply) -> None:
        """Refuse a reply that tells how many examples it is of."""
        if reply.num_examples != 1:
            raise BadReply("num-examples", f"expected 1 with noise, got {reply.num_examples}")

    def check_rows(self, sums: FeatureStatistics, max_examples: int) -> None:
        """Refuse sums of rows beyond the radius, or of more than a client may have.

        A client with more than `client_examples` would not have the privacy that epsilon claims.
        """
        sums.require_rows(self.radius, min(max_examples, self.client_examples or max_examples))

    def solve(
        self, sums: FeatureStatistics, shares: NoiseShares | None = None
    ) -> NDArray[np.float64]:
        """Return weights (C, p) from sums with clients' shares of noise; without, it is added here.

        They are those for rows of norm R, times R: for features of norm 1 scores are near one-hot.
        """
        num_classes, width = sums.class_sums.shape
        noise = SumNoise.of(self, width, num_classes, shares.quorum if shares else 0)
        if shares is None:
            sums = noise.add(sums, np.random.default_rng(secrets.randbits(256)))
            self.released = True  # whatever becomes of them; what `add` refuses has had no noise
            self.epsilon_reached = noise.epsilon(self.delta)
            variance = float(noise.variances()[0])
        else:
            self.epsilon_reached = noise.epsilon(self.delta, shares.clients - self.colluding)
            variance = float(noise.variances(shares.clients)[0])
        gram, cross = torch.from_numpy(sums.matrix()), torch.from_numpy(sums.class_sums.T)
        return self.radius * solve_noisy(gram, cross, variance).T.numpy()
