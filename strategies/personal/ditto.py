"""Ditto: FedAvg, and beside it a model of each client's own, held near the global one.

Source: Li, Hu, Beirami and Smith, *Ditto: Fair and Robust Federated Learning Through
Personalization*, ICML 2021, section 3 and algorithm 1:

    min over v_k of  F_k(v_k) + (lambda / 2) ||v_k - w*||^2,  with w* the global model's optimum
"""

from fedntk.ntk.options import part
from fedntk.ntk.robust_averages import DEFENCES

from ..core.secure import SecureAggregation
from .personalised import PersonalStrategy


class Ditto(PersonalStrategy):
    """Ditto (Li et al. 2021). Clients are :class:`~fedntk.clients.DittoClient`.

    The Result holds the global model, which is FedAvg's, bit for bit. Each client keeps its model
    v_k, which never comes to the server.
    """

    client = "DittoClient"
    replies = "global weights"
    rules = (*DEFENCES, "validation")

    secure: SecureAggregation | None = part("clients mask their weights", default=None)
