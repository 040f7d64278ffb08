"""FedNCM: the classifier of the nearest class mean, from the clients' class means.

Source: Legate et al., *Guiding The Last Layer in Federated Learning with Pre-Trained Models*,
NeurIPS 2023, as others describe it; its text was not at hand. Clients send the mean of a
pre-trained network's features over their examples of each class, and how many these are. The server
forms the mean m_c over all clients' examples of class c, and the last layer's weights for the class
are m_c / ||m_c||, 0 for a class that nobody has. There is no bias: the predicted class is the one
whose mean has the smallest angle to an example's features.
"""

from collections.abc import Sequence

import numpy as np

from fedntk.ntk.payloads.prototypes import Prototypes

from .closed_form import ClosedFormStrategy, Layer, unit_rows


class FedNCM(ClosedFormStrategy):
    """FedNCM (Legate et al. 2023). Clients are :class:`~fedntk.clients.ClosedFormClient`."""

    statistics = Prototypes

    def last_layer(self, sums: Sequence[Prototypes]) -> Layer:
        """Return the class means, each of norm 1 (C, p), and zeros for a bias."""
        return unit_rows(Prototypes.pooled(sums).means.astype(np.float64))
