"""FedYogi: FedAdam whose second moment grows and falls by additive steps.

Source: Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, algorithm 2; but for this line
it is FedAdam:

    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)
"""

import numpy as np

from .fed_adam import FedAdam
from .server_optimizer import Floats


class FedYogi(FedAdam):
    """FedYogi (Reddi et al. 2021). Clients are :class:`~fedntk.clients.SGDClient`.

    Flower's class of this name begins with v = 0.
    """

    def second_moment(self, square: Floats, before: Floats) -> Floats:
        """Return v from Delta^2."""
        return np.asarray(before - (1 - self.beta_2) * square * np.sign(before - square))
