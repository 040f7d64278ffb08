"""D-PSGD: clients average with their neighbours, and step along their own gradients.

Source: Lian et al., *Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study
for Decentralized Parallel Stochastic Gradient Descent*, NeurIPS 2017, algorithm 1. In iteration k
client i, at the weights x_i, computes the gradient g_i of a batch at x_i, and

    x_i <- sum over j of W_ij x_j - gamma g_i(x_i)

The gradient is that before the average, so both can be had at the same time. In the comparison of
Thompson et al., *NTK-DFL*, ICML 2025, appendix C.2, a round is one local epoch. Here it is

    x_i <- sum over j of W_ij x_j + (T_i(x_i) - x_i)

with T_i the clients' local epochs of SGD: algorithm 1 itself if these are one batch.
"""

from fedntk.ntk.payloads.gossip_options import GossipOptions

from .relay import RelayStrategy


class DPSGD(GossipOptions, RelayStrategy):
    """D-PSGD (Lian et al. 2017). Clients are :class:`~fedntk.clients.DPSGDClient`.

    It differs from :class:`~fedntk.strategies.DFedAvg` with one local epoch in the order: the steps
    that a client took in a round reach its neighbours in the next one.
    """

    client = "DPSGDClient"
