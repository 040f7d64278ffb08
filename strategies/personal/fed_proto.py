"""FedProto: clients keep their networks, and share class prototypes.

Source: Tan et al., *FedProto: Federated Prototype Learning across Heterogeneous Clients*, AAAI
2022, eq. (6), for the clients N_j of a round that have class j, client i with n_ij examples of it:

    C^j <- sum over i in N_j of (n_ij / n_j) C_i^j,  n_j = sum over i in N_j of n_ij

The paper's line has a factor 1 / |N_j| before the sum, under which prototypes shrink as clients
come. It is left out: so C^j is the mean over all examples of the class, and one client's is its
own. (The authors' program takes the plain mean over clients.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.payloads.prototypes import GLOBAL_PROTOTYPES, Prototypes

from ..core.averaging import named_arrays
from ..core.exchange import Pairs
from ..core.features import FeatureStrategy
from ..core.replies import screen_own_sizes
from .personalised import PersonalStrategy


class FedProto(FeatureStrategy, PersonalStrategy):
    """FedProto (Tan et al. 2022). Clients are :class:`~fedntk.clients.FedProtoClient`.

    The whole network stays with the clients, which start from the same weights. The Result holds
    these, and the global prototypes: ``global-prototypes.means`` (C, p), float32, and
    ``global-prototypes.counts`` (C,), their examples; with a count of 0 there is none yet. A class
    that no client of a round has keeps its prototype.
    """

    client = "FedProtoClient"
    replies = "prototypes"
    defences = ("none", "geometric-median")

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Begin without prototypes, unless a state was loaded."""
        network = self.network_of(initial_arrays)
        self.personal = frozenset(network)
        if not done:
            none = Prototypes.none(*self.shape).to_global_arrays()
            initial_arrays = ArrayRecord({**network, **{n: Array(a) for n, a in none.items()}})
        return super().begin(initial_arrays, num_rounds, done)

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the first weights, which all clients start from."""
        return ArrayRecord({n: a for n, a in arrays.items() if n not in GLOBAL_PROTOTYPES})

    @property
    def prototypes(self) -> Prototypes:
        """The global prototypes with which the current round, or the last one, began."""
        return Prototypes.from_global_arrays(named_arrays(self.global_arrays))

    def screen(self, own: Sequence[Prototypes], most: float) -> list[BadReply | None]:
        """Refuse prototypes whose root mean square is far above that of others."""
        return screen_own_sizes(own, most)

    def merge(self, pairs: Pairs[Any]) -> Mapping[str, NDArray[Any]]:
        """Return the mean prototype of each class, and the former one where none came.

        With ``defence="geometric-median"`` it is :meth:`Prototypes.geometric_median`.
        """
        robust = self.defence == "geometric-median"
        pool = Prototypes.geometric_median if robust else Prototypes.pooled
        pooled = pool([own for _, own in pairs])
        return self.prototypes.update_from(pooled).to_global_arrays()
