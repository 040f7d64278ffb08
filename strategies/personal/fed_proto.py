"""FedProto: clients keep their networks, and share class prototypes.

Source: Tan et al., *FedProto: Federated Prototype Learning across Heterogeneous Clients*, AAAI
2022, eq. (6), for the clients N_j of a round that have class j, client i with n_ij examples of it:

    C^j <- sum over i in N_j of (n_ij / n_j) C_i^j,  n_j = sum over i in N_j of n_ij

The paper's line has a factor 1 / |N_j| before the sum, under which prototypes shrink as clients
come. It is left out: so C^j is the mean over all examples of the class.
"""

from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord
from torch import nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads.prototypes import GLOBAL_PROTOTYPES, Prototypes

from ..core.averaging import cast_like, named_arrays
from ..core.channel import Parse, Rounds
from ..core.registry import ClientRounds
from ..core.replies import Reply, accuracy_of, screen_accuracies, screen_own_sizes
from ..core.round import Round
from ..core.strategy import Strategy
from ..core.uploads import Update, Uploads
from .personalised import ask_personal

T = TypeVar("T")


class FedProto(Strategy):
    """FedProto (Tan et al. 2022). Clients are :class:`~fedntk.clients.FedProtoClient`.

    The whole network stays with the clients, which start from the same weights. The Result holds
    these, and the global prototypes: ``global-prototypes.means`` (C, p), float32, and
    ``global-prototypes.counts`` (C,), their examples; with a count of 0 there is none yet. A class
    that no client of a round has keeps its prototype.
    """

    client = "FedProtoClient"
    replies = "prototypes"
    rules = ("none", "geometric-median")
    nests = "nowhere"

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    head: str = option(
        "layer before which features are taken; the last linear one by default", default=""
    )
    trained: ClientRounds = state(ClientRounds)

    def prepare(self) -> None:
        """Find the last layer."""
        self.feature_map = FeatureMap("last-layer", head=self.head)
        _, last = self.feature_map.last_layer(self.network)
        self.shape = (last.out_features, last.in_features)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Begin without prototypes, unless a state was loaded."""
        if done:
            return initial_arrays
        none = Prototypes.none(*self.shape).to_global_arrays()
        prototypes = {name: Array(array) for name, array in none.items()}
        return ArrayRecord({**self.network_of(initial_arrays), **prototypes})

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the first weights, which all clients start from."""
        return ArrayRecord({n: a for n, a in arrays.items() if n not in GLOBAL_PROTOTYPES})

    @property
    def prototypes(self) -> Prototypes:
        """The global prototypes with which the current round, or the last one, began."""
        return Prototypes.from_global_arrays(named_arrays(self.global_arrays))

    def train_round(self, r: Round) -> Rounds[Update]:
        """Pool the clients' prototypes; a class without any keeps its former one."""

        def parse(reply: Reply) -> Prototypes:
            return Prototypes.from_arrays(
                reply.arrays(),
                num_classes=self.shape[0],
                width=self.shape[1],
                max_examples=self.max_examples,
                num_examples=reply.num_examples,
            )

        uploads = yield from self._ask(r, parse)
        uploads = self.screening.drop(uploads, screen_own_sizes)
        if not self.enough(uploads):
            return Update(uploads)
        robust = self.screening.rule == "geometric-median"
        pool = Prototypes.geometric_median if robust else Prototypes.pooled
        before = Prototypes.from_global_arrays(r.model)
        new = before.update_from(pool(uploads.values)).to_global_arrays()
        self.trained.set(uploads.clients, r.number)
        expected = {name: r.model[name] for name in new}
        return Update(uploads, ArrayRecord({**r.arrays, **cast_like(new, expected)}))

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate their own networks."""
        uploads = yield from self._ask(r, accuracy_of)
        return self.screening.drop(uploads, screen_accuracies)

    def _ask(self, r: Round, parse: Parse[T]) -> Rounds[Uploads[T]]:
        personal, place = frozenset(self.network_of(r.arrays)), self.feature_map.to_config()
        return (yield from ask_personal(r, parse, personal, self.trained, config=place))
