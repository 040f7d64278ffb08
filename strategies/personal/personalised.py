"""FedAvg of some of a network's arrays, while the others stay with the clients.

Source: Pillutla et al., *Federated Learning with Partial Model Personalization*, ICML 2022, FedSim:
u <- sum over the sampled clients k of (n_k / n) u_k, and v_k stays with client k.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import ArrayRecord

from fedntk.ntk.options import option, part, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.robust_averages import DEFENCES

from ..core.averaging import cast_like, named_arrays
from ..core.channel import Parse, Rounds
from ..core.registry import ClientRounds
from ..core.replies import accuracy_of, check_weights, screen_accuracies
from ..core.round import Clients, Round, accept_any
from ..core.secure import SecureAggregation
from ..core.strategy import Strategy
from ..core.uploads import Update, Uploads

T = TypeVar("T")


class PersonalStrategy(Strategy):
    """Average the shared arrays, and leave the personal ones with the clients.

    Clients are :class:`~fedntk.clients.PersonalisedClient`. The arrays named in ``personal``, which
    a method sets, never come to the server. New clients, and those that lost theirs, start from the
    initial ones, which the Result holds.

    A client's personal arrays count as of the last round in which its reply was accepted: a reply
    that is lost or dropped leaves both its parts as they were.
    """

    client = "PersonalisedClient"
    replies = "shared weights"
    takes_real_targets = True
    rules = DEFENCES
    nests = "nowhere"

    trained: ClientRounds = state(ClientRounds)
    personal: Collection[str] = state(frozenset, saved=False, reset=False)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Check that the network has the personal arrays."""
        self.personal = self.personal_names(initial_arrays)
        if missing := sorted(set(self.personal) - initial_arrays.keys()):
            raise ValueError(f"personal: the network has no arrays named {missing[:5]}")
        return initial_arrays

    def personal_names(self, arrays: ArrayRecord) -> Collection[str]:
        """Return the names of the arrays that stay with the clients."""
        return self.personal

    def train_round(self, r: Round) -> Rounds[Update]:
        """Average the shared arrays, and note whose personal arrays are of this round."""
        shared = split(r.arrays, self.personal)[0]
        model = named_arrays(shared)
        metrics: Mapping[str, Any] = {}
        secure = self.part_of(SecureAggregation)
        if secure is not None:
            mean, uploads, metrics = yield from secure.mean(
                r,
                self.enough,
                arrays=shared,
                config=self.trained.config,
                records=lambda client: first_values(r, self.personal, self.trained, client),
                sent=self.trained,
            )
            if mean is None:
                return Update(uploads, None, metrics)
        else:
            uploads = yield from ask_personal(
                r, lambda reply: check_weights(reply.arrays(), model), self.personal, self.trained
            )
            uploads = self.screening.drop_outliers(uploads, model)
            if not self.enough(uploads):
                return Update(uploads)
            mean = self.screening.mean(uploads, model) if model else {}
        self.trained.set(uploads.clients, r.number)
        arrays = ArrayRecord({**r.arrays, **cast_like(mean, model)})
        return Update(uploads, arrays, metrics)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate their own models."""
        uploads = yield from ask_personal(r, accuracy_of, self.personal, self.trained)
        return self.screening.drop(uploads, screen_accuracies)


class PersonalisedStrategy(PersonalStrategy):
    """FedAvg of all but some named arrays (Pillutla et al. 2022, FedSim).

    Examples
    --------
    >>> PersonalisedStrategy(personal=["2.weight", "2.bias"]).personal
    ('2.bias', '2.weight')
    """

    personal: Sequence[str] = option("names of arrays that stay with the clients", default=())
    secure: SecureAggregation | None = part("clients mask their weights", default=None)

    def prepare(self) -> None:
        """Sort the names."""
        self.personal = tuple(sorted(self.personal))


def split(arrays: ArrayRecord, personal: Collection[str]) -> tuple[ArrayRecord, ArrayRecord]:
    """Return the shared arrays and the personal ones."""
    shared = {name: array for name, array in arrays.items() if name not in personal}
    return ArrayRecord(shared), ArrayRecord({n: arrays[n] for n in arrays if n in personal})


def first_values(
    r: Round, personal: Collection[str], trained: ClientRounds, client: int
) -> dict[str, ArrayRecord]:
    """Return the initial personal arrays as a record, for a client that has none."""
    if not personal or client in trained:
        return {}
    return {wire.PERSONAL: split(r.arrays, personal)[1]}


def ask_personal(
    r: Round,
    parse: Parse[T],
    personal: Collection[str],
    trained: ClientRounds,
    *,
    config: Mapping[str, Any] | None = None,
    shared_for: Callable[[int, ArrayRecord], ArrayRecord] | None = None,
    clients: Clients | None = None,
    stage: str | None = None,
) -> Rounds[Uploads[T]]:
    """Ask clients of which each has some personal arrays; ones that lost them begin anew.

    `shared_for` makes the shared arrays of a client from the global ones, which it gets otherwise.
    """
    key = r.owner.arrayrecord_key
    shared = split(r.arrays, personal)[0]

    def records(client: int) -> dict[str, ArrayRecord]:
        model = {} if shared_for is None else {key: shared_for(client, shared)}
        return {**model, **first_values(r, personal, trained, client)}

    return (
        yield from r.ask(
            parse,
            stage=stage,
            clients=clients,
            arrays=shared,
            config=lambda client: {**(config or {}), **trained.config(client)},
            records=records,
            sent=trained,
            require_kind=None if personal else accept_any,  # all weights travel
        )
    )
