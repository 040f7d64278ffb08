"""Local training ("SingleSet"): each client has a network of its own, and nothing is shared.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 6: the baseline that any federated method has to beat.
"""

from flwr.app import ArrayRecord

from .personalised import PersonalStrategy


class LocalTraining(PersonalStrategy):
    """Local training. Clients are :class:`~fedntk.clients.PersonalisedClient`.

    All arrays are personal: clients are sent the first weights once, train on from their own, and
    send only metrics. The Result holds the first weights.
    """

    rules = ("none",)

    def personal_names(self, arrays: ArrayRecord) -> frozenset[str]:
        """Have all arrays stay with the clients."""
        return frozenset(arrays)
