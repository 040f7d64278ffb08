"""FedAvgM: FedAvg with momentum on the server.

Source: Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification*, 2019, section 4.3, with Delta the mean of the clients' changes:

    v <- beta v + Delta,  w <- w + eta v
"""

import numpy as np

from fedntk.ntk.options import option

from .server_optimizer import Floats, ServerOptimizer


class FedAvgM(ServerOptimizer):
    """FedAvgM (Hsu et al. 2019). Clients are :class:`~fedntk.clients.SGDClient`.

    The paper's eta is 1; another one is that of Reddi et al. 2021.
    """

    server_learning_rate: float = option("eta of the server", default=1.0, above=0)
    server_momentum: float = option("beta; 0: none", default=0.9, at_least=0, below=1)
    first_moments = (0.0,)

    def direction(self, change: Floats, moments: Floats) -> tuple[Floats, Floats]:
        """Return v, twice."""
        velocity = np.asarray(self.server_momentum * moments[0] + change)
        return velocity, velocity[None]
