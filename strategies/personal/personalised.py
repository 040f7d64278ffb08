"""FedAvg of some of a network's arrays, while the others stay with the clients.

Source: Pillutla et al., *Federated Learning with Partial Model Personalization*, ICML 2022, FedSim:
u <- sum over the sampled clients k of (n_k / n) u_k, and v_k stays with client k.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import DEFENCES

from ..core.averaging import cast_like, named_arrays
from ..core.exchange import Aggregated, Pairs
from ..core.kept_rounds import KeepingStrategy
from ..core.replies import Reply, check_weights
from ..core.secure_average import Average, AveragingStrategy

PERSONAL = "personal"  # record of first values


class PersonalStrategy(KeepingStrategy, AveragingStrategy):
    """Average the shared arrays, and leave the personal ones with the clients.

    Clients are :class:`~fedntk.clients.PersonalisedClient`. The arrays named in ``personal``, which
    a method sets, never come to the server. New clients, and those that lost theirs, start from the
    initial ones, which the Result holds.

    A client's personal arrays count as of the last round in which its reply was accepted: a reply
    that is lost or dropped leaves both its parts as they were.
    """

    client = "PersonalisedClient"
    replies = "shared weights"
    averages = False
    masks = False  # a method whose `merge` is this mean sets True
    defences = DEFENCES

    personal: Collection[str] = state(frozenset, saved=False, reset=False)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Check that the network has the personal arrays."""
        if odd := sorted(set(self.personal) - initial_arrays.keys()):
            raise ValueError(f"personal: the network has no arrays named {odd[:5]}")
        return super().begin(initial_arrays, num_rounds, done)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return the client's shared arrays, and the initial personal ones if it has none."""
        shared = ArrayRecord({n: a for n, a in arrays.items() if n not in self.personal})
        own = self.config_for(client, config)
        content = super().content_for(client, stage, self.shared_for(client, shared), own)
        if self.personal and client not in self.trained:
            content[PERSONAL] = ArrayRecord({n: arrays[n] for n in arrays if n in self.personal})
        return content

    def shared_for(self, client: int, shared: ArrayRecord) -> ArrayRecord:
        """Return a client's shared arrays: the global ones by default."""
        return shared

    def forget_lost(self, client: int) -> None:
        """Have a client start from the initial personal arrays again."""
        self.trained.pop(client, None)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Merge what was accepted, and note whose personal arrays are of this round."""
        merged, added, metrics = self.collect(replies)
        self.train_metrics[server_round] = metrics
        if merged is None:
            return None, metrics
        self.trained |= {reply.client: server_round for reply in added}
        expected = {n: a for n, a in named_arrays(self.global_arrays).items() if n in merged}
        return ArrayRecord({**self.global_arrays, **cast_like(merged, expected)}), metrics

    def collect(self, replies: Iterable[Message]) -> Average:
        """Return what the accepted replies change of the global arrays, those, and metrics."""
        if self.secure_aggregation:
            return self.average(replies, self.shared)
        pairs, rejected, _ = self.answers(replies, self.parse, MessageType.TRAIN)
        pairs = self.apply_screen(pairs, rejected, self.screen)
        pairs = self.judged(pairs, rejected, self.shared, lambda own: own)
        added = [reply for reply, _ in pairs]
        metrics = self.round_metrics(added, rejected)
        self.train_metrics[self.server_round] = metrics  # to which `merge` may add
        return self.merge(pairs) if self.enough(len(pairs)) else None, added, metrics

    @property
    def takes_weights(self) -> bool:
        """Whether nothing is personal, so that clients reply with all weights."""
        return not self.personal or super().takes_weights

    @property
    def shared(self) -> dict[str, NDArray[Any]]:
        """The global arrays that travel, as they were when the current round began."""
        arrays = named_arrays(self.global_arrays)
        return {name: array for name, array in arrays.items() if name not in self.personal}

    def parse(self, reply: Reply) -> Any:
        """Return what the method needs of a reply, or raise BadReply; by default its weights."""
        return check_weights(reply.arrays(), self.shared)

    def screen(self, own: Sequence[Any], most: float) -> list[BadReply | None]:
        """Refuse what :meth:`parse` made of replies that are far out of the others' range."""
        return screen_changes(self.shared, own, most)

    def merge(self, pairs: Pairs[Any]) -> Mapping[str, NDArray[Any]]:
        """Return what the accepted replies change of the global arrays."""
        if not self.shared:
            return {}
        return self.robust_mean_of(self.shared, pairs)


class PersonalisedStrategy(PersonalStrategy):
    """FedAvg of all but some named arrays (Pillutla et al. 2022, FedSim).

    Examples
    --------
    >>> PersonalisedStrategy(personal=["2.weight", "2.bias"]).personal
    ('2.bias', '2.weight')
    """

    masks = True

    personal: Sequence[str] = option("names of arrays that stay with the clients", default=())

    def __post_init__(self) -> None:
        super().__post_init__()
        self.personal = tuple(sorted(self.personal))
