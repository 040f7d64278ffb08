"""FedBN: FedAvg in which BatchNorm stays with the clients.

Source: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*,
ICLR 2021, section 3 and algorithm 1: all layers but BatchNorm's are averaged; BatchNorm's
parameters and statistics are each client's own.
"""

from torch import nn

from fedntk.ntk.options import argument, part
from fedntk.ntk.parts import batch_norm_arrays

from ..core.secure import SecureAggregation
from .personalised import PersonalStrategy


class FedBN(PersonalStrategy):
    """FedBN (Li et al. 2021). Clients are :class:`~fedntk.clients.PersonalisedClient`.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    >>> sorted(FedBN(network=network).personal)[:2]
    ['1.bias', '1.num_batches_tracked']
    """

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    secure: SecureAggregation | None = part("clients mask their weights", default=None)

    def prepare(self) -> None:
        """Find BatchNorm's arrays."""
        self.personal = batch_norm_arrays(self.network)
        if not self.personal:
            raise ValueError("network: expected one with BatchNorm layers, got one without any")
