"""FedAdam: FedAvg with Adam on the server.

Source: Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, algorithm 2, with Delta the mean
of the clients' changes, m = 0 and v = tau^2 before the first round, and no correction of bias:

    m <- beta_1 m + (1 - beta_1) Delta
    v <- beta_2 v + (1 - beta_2) Delta^2
    w <- w + eta m / (sqrt(v) + tau)
"""

import numpy as np

from fedntk.ntk.options import option

from .server_optimizer import Floats, ServerOptimizer


class FedAdam(ServerOptimizer):
    """FedAdam (Reddi et al. 2021). Clients are :class:`~fedntk.clients.SGDClient`.

    Flower's class of this name begins with v = 0, and corrects the bias of the moments.
    """

    beta_1: float = option("decay of m", default=0.9, at_least=0, below=1)
    beta_2: float = option("decay of v", default=0.99, at_least=0, below=1)
    tau: float = option(
        "added to the root of v: the smaller, the more alike the coordinates' steps are",
        default=1e-3,
        above=0,
    )

    @property
    def first_moments(self) -> tuple[float, ...]:
        """0 for m, tau^2 for v."""
        return 0.0, self.tau**2

    def direction(self, change: Floats, moments: Floats) -> tuple[Floats, Floats]:
        """Return m / (sqrt(v) + tau), and m and v."""
        mean = self.beta_1 * moments[0] + (1 - self.beta_1) * change
        square = self.second_moment(change**2, moments[1])
        return mean / (np.sqrt(square) + self.tau), np.stack([mean, square])

    def second_moment(self, square: Floats, before: Floats) -> Floats:
        """Return v from Delta^2."""
        return np.asarray(self.beta_2 * before + (1 - self.beta_2) * square)
