"""DFedAvg and DFedAvgM: local epochs of SGD, then an average with the neighbours.

Source: Sun, Li and Wang, *Decentralized Federated Averaging*, IEEE Transactions on Pattern Analysis
and Machine Intelligence 45, 2023 (arXiv 2104.11375). In round k client i has the weights x_i, the
examples of F_i, and the mixing matrix W:

    z_i = E epochs of SGD with momentum on F_i, begun at x_i without momentum
    x_i <- sum over j of W_ij z_j

The paper's W is symmetric and doubly stochastic; by default here it weights by examples, as in the
comparison of Thompson et al., *NTK-DFL*, ICML 2025. Its quantisation is not here.

Two exchanges a round: ``train``, in which clients send z_i, and ``average``. Each further gossip
step (Shi et al., *Improving the Model Consistency of Decentralized Federated Learning*, ICML 2023)
is another average of the averages, and one more exchange.
"""

from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from .relay import RelayStrategy, Step


class DFedAvg(DFedAvgOptions, RelayStrategy):
    """DFedAvg, and with the clients' momentum DFedAvgM (Sun, Li and Wang 2023).

    Clients are :class:`~fedntk.clients.DFedAvgClient`, which have epochs, batches, learning rate
    and momentum. :class:`~fedntk.strategies.DPSGD` has the other order.
    """

    client = "DFedAvgClient"

    def plan(self, *, first: bool) -> list[Step]:
        """Return the exchanges: trained weights, then their averages."""
        return train_and_average(self.gossip_steps)


def train_and_average(gossip_steps: int) -> list[Step]:
    """Return the exchanges of a round: trained weights, then their averages."""
    return [Step("train"), *(Step("average", k) for k in range(gossip_steps))]
