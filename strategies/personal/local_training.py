"""Training without communication: each client has a network of its own ("SingleSet").

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 6: the baseline that any federated method has to beat.
"""

from typing import Any

from flwr.app import ArrayRecord

from .personalised import PersonalisedStrategy

__all__ = ["LocalTraining"]


class LocalTraining(PersonalisedStrategy):
    """Local training. Clients are :class:`~fedntk.clients.PersonalisedClient`.

    All arrays are personal: clients are sent the first weights once, train on from their own, and
    send metrics alone. What the Result holds are the first weights.

    Parameters
    ----------
    **options
        Of :class:`PersonalisedStrategy`, but for `personal`.
    """

    def settings(self) -> dict[str, Any]:
        """Name no array: it is all of them, whatever the network."""
        return {**super().settings(), "personal": []}

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Have all arrays stay with the clients."""
        self.personal = frozenset(initial_arrays)
        return super().begin(initial_arrays, num_rounds, done)
