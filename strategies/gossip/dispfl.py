"""DisPFL: each client trains a sparse model of its own, and averages what others have of it.

Source: Dai, Shen, He, Tian and Tao, *DisPFL: Towards Communication-Efficient Personalized Federated
Learning via Decentralized Sparse Training*, ICML 2022. In round k client i has weights w_i, the
mask m_i that they were trained in, and a next mask m_i'. With its neighbours and itself as j,

    w_i <- m_i' * (sum over j of w_j) / (sum over j of m_j)      coordinate by coordinate
    w_i <- local epochs of SGD in m_i';  m_i <- m_i'
    m_i' <- m_i without its smallest weights, and as many with the largest gradients

Layers' densities are those of Erdos-Renyi kernels. The share that is pruned goes down by a cosine:
alpha / 2 (1 + cos(pi (k - 1) / T)). These lines follow the authors' program. The shares of other
mixing matrices weight both sums, and biases and norms are always whole.
"""

from collections.abc import Sequence

from fedntk.ntk.averages import masked_mean
from fedntk.ntk.payloads.gossip_options import DisPFLOptions
from fedntk.ntk.support.arrays import ArrayDict, Arrays

from .relay import RelayStrategy


class DisPFL(DisPFLOptions, RelayStrategy):
    """DisPFL (Dai et al. 2022). Clients are :class:`~fedntk.clients.DisPFLClient`.

    Each client is judged by its own model. The global arrays are the mean over the clients of each
    number that is not zero.
    """

    client = "DisPFLClient"

    def mean_of(self, models: Sequence[Arrays]) -> ArrayDict:
        """Return the mean of each number over the models in which it is not zero."""
        masks = [{n: m[n] != 0 for n in m if m[n].dtype.kind == "f"} for m in models]
        return masked_mean(models, masks, [1] * len(models))
