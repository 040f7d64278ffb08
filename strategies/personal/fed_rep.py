"""FedRep: FedPer whose clients train their heads first, and then the shared body.

Source: Collins et al., *Exploiting Shared Representations for Personalized Federated Learning*,
ICML 2021, algorithm 1: client k descends on its head h_k with the body fixed, then on the body with
h_k fixed, and the server averages bodies. Clients count by their examples, and not alike.
"""

from .fed_per import FedPer


class FedRep(FedPer):
    """FedRep (Collins et al. 2021). Clients are :class:`~fedntk.clients.FedRepClient`."""

    client = "FedRepClient"
