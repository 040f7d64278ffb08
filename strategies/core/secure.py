"""Secure aggregation: the server learns only the sum over the clients.

Source: Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS
2017: see :mod:`fedntk.trust.secure_sum`. It takes five exchanges: public keys; shares of the
clients' secrets, which the server hands on; masked words; tags by which clients see that all were
told of the same words; shares, by which the sum is opened. If too few are left before the last one,
two others give it up for good. The client half is :mod:`fedntk.clients.core.secure_sum`.
"""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import getLogger
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.options import Declared, argument, option, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.feature_statistics import SumStep
from fedntk.ntk.payloads.masked_average import BESIDE, AverageTask, average_digest, average_of
from fedntk.ntk.support.arrays import Arrays, byte_rows, require_array
from fedntk.trust import MaskedSum, NotEnrolled, Promise, Roster, SealError, check_public_key
from fedntk.trust.sealing import KEY_BYTES
from fedntk.trust.secure_sum import (
    EXCHANGE_BYTES,
    FEWEST,
    PARCEL_BYTES,
    SECRET_BYTES,
    TAG_BYTES,
    Words,
    exchange_of,
)

from .averaging import named_arrays, record_of
from .channel import Forgets, Parse, Rounds
from .registry import SentParts
from .replies import Reply
from .round import Round
from .sampling import Sample
from .trust_protocols import VouchesForKeys
from .uploads import Uploads

logger = getLogger("flwr")
Records = dict[str, NDArray[Any]]
PerClient = Callable[[int], Mapping[str, ArrayRecord]]
T = TypeVar("T")


class PublicPart(NamedTuple):
    """What the server knows of a client before a sum."""

    key: bytes
    voucher: bytes  # empty if nobody vouches
    nonce: bytes


class WordFormat(NamedTuple):
    """Number and dtype of a client's words, and a digest of what they are about."""

    size: int
    dtype: np.dtype[Any]
    about: bytes


class SumPlan(NamedTuple, Generic[T]):
    """What a secure sum is of."""

    task: Callable[[SumStep], Mapping[str, Any]]  # configuration of a step
    words_of: Callable[[int], WordFormat]  # of all clients' number of examples
    read: Callable[[Words, int], T]  # the sum, its number of examples -> result, or ValueError
    arrays: ArrayRecord | None = None  # of the step "masked"; the global ones by default
    config: Callable[[int], Mapping[str, Any]] | None = None  # of a client, besides the task
    records: PerClient | None = None  # of a client in the step "masked"
    # step, client, configuration -> what is sent in place of arrays and records
    contents: Callable[[SumStep, int, ConfigRecord], RecordDict] | None = None
    sent: Forgets | None = None  # as for a round's ask


class SecureSum(NamedTuple, Generic[T]):
    """A sum, None if it stayed closed, the replies of the clients in it, and its quorum."""

    total: T | None
    uploads: Uploads[Any]
    quorum: int


class SecureAggregation(Declared):
    """Clients mask what they send, and the server learns only the sum over all of them.

    It takes four more exchanges in the round, and at least three clients. Clients that drop out
    after they gave shares do not keep the sum closed if the fraction `threshold` of the clients
    with public keys go on to the end; what they had masked is left out.
    """

    threshold: float = option(
        "fraction of the clients who must stay to the end", default=2 / 3, above=0.5, at_most=1
    )
    vouching: VouchesForKeys | None = argument(
        "vouches for the clients' public keys in the strategy's run, such as "
        "fedntk.trust.KeyServer; without it a server that breaks the protocol could name keys of "
        "its own for the clients",
        default=None,
    )
    run_key: str = state(lambda: secrets.token_hex(8))  # names the run for the clients' folders

    def mean(
        self,
        r: Round,
        enough: Callable[[Uploads[Any]], bool],
        *,
        arrays: ArrayRecord | None = None,
        **more: Any,
    ) -> Rounds[tuple[Arrays | None, Uploads[Any], dict[str, float]]]:
        """Return the mean of the clients' weights, if any, who is in it, and metrics beside it.

        It is of the global `arrays`, or of some of them. A reply counts as one example. `more` are
        further fields of the :class:`SumPlan`.
        """
        arrays = r.arrays if arrays is None else arrays
        model = named_arrays(arrays)

        def words_of(clients: int) -> WordFormat:
            about = average_digest(model, self.run_key, r.number)
            size = sum(array.size for array in model.values())
            return WordFormat(size + BESIDE, np.dtype(np.uint64), about)

        plan: SumPlan[Any] = SumPlan(
            lambda step: AverageTask(masked_step=step, run_key=self.run_key).to_config(),
            words_of,
            lambda words, clients: average_of(words, model, clients),
            arrays,
            **more,
        )
        result = yield from self.sum(r, plan, enough)
        mean, beside = (None, {}) if result.total is None else result.total
        return mean, result.uploads, beside

    def sum(
        self,
        r: Round,
        plan: SumPlan[T],
        enough: Callable[[Uploads[Any]], bool],
        clients: Sample | None = None,
    ) -> Rounds[SecureSum[T]]:
        """Go through the exchanges of a sum over a sample of clients, by default the round's."""
        return (yield from _OneSum(self, r, plan).complete(enough, clients))


class _OneSum(Generic[T]):
    """The server's part in one sum, in which clients go by their places in its roster."""

    def __init__(self, options: SecureAggregation, r: Round, plan: SumPlan[T]) -> None:
        self._options, self._r, self._plan = options, r, plan
        self._sent: Forgets = SentParts() if plan.sent is None else plan.sent
        self._place: dict[int, int] = {}  # node -> place in the roster
        self.rejected = Counter[str]()

    def _ask(
        self,
        step: SumStep,
        parse: Parse[Any],
        nodes: Sequence[int] | Sample | None,
        common: Records | None = None,
        addressed: Mapping[int, Records] | None = None,
    ) -> Rounds[Uploads[Any]]:
        """Make the exchange of a step; `addressed` has arrays by client."""
        plan = self._plan

        def records(client: int) -> Mapping[str, ArrayRecord]:
            extra = plan.records(client) if step == "masked" and plan.records is not None else {}
            arrays = {**(common or {}), **(addressed or {}).get(client, {})}
            return {**extra, wire.SECURE_SUM: record_of(arrays)} if arrays else extra

        def config(client: int) -> Mapping[str, Any]:
            specific = {} if plan.config is None else plan.config(client)
            return {**specific, **plan.task(step)}

        def content(client: int, told: ConfigRecord) -> RecordDict:
            made = RecordDict() if plan.contents is None else plan.contents(step, client, told)
            return RecordDict({**made, **records(client)})

        uploads = yield from self._r.ask(
            parse,
            clients=nodes,
            arrays=plan.arrays if step == "masked" else ArrayRecord(),
            config=config,
            records=records,
            contents=None if plan.contents is None else content,
            sent=self._sent,
        )
        self.rejected += uploads.rejected
        return uploads

    def complete(
        self, enough: Callable[[Uploads[Any]], bool], sample: Sample | None
    ) -> Rounds[SecureSum[T]]:
        channel = self._r.channel
        everyone = yield from self._ask("public-key", self._public_part, sample)
        last, voidable, exchange, quorum = everyone.keep(()), list[int](), Records(), 0
        try:
            members = everyone.judge(_screen_copied_keys(everyone.values))
            self.rejected += members.rejected - everyone.rejected
            last = members
            counts = dict(zip(members.nodes, members.counts, strict=True))
            self._place = place = {node: k for k, node in enumerate(members.nodes)}
            roster, described = self._roster(members.values)
            quorum = roster.threshold
            words = self._plan.words_of(sum(counts.values()))
            exchange = {wire.EXCHANGE: np.frombuffer(roster.exchange, np.uint8)}
            read_shares = partial(_read_shares, roster)
            shared = yield from self._ask("shares", read_shares, members.nodes, described)
            promises = {place[upload.node]: upload.value[0] for upload in shared}
            parcels = [parcel for _, parcel in shared.values]
            common = {
                **exchange,
                wire.CLIENTS: _ids(promises),
                wire.WORD_BYTES: np.array(words.dtype.itemsize, np.int64),
            }
            voidable = shared.nodes
            read_words = partial(_read_words, counts, words)
            addressed = self._addressed(wire.PARCELS, shared, parcels)
            masked = yield from self._ask("masked", read_words, voidable, common, addressed)
            last = masked
            arrived = [place[node] for node in masked.nodes]
            if not enough(masked):
                yield from self._void(exchange, voidable)
                return SecureSum(None, self._counted(last), quorum)
            roster.require_enough(arrived)
            told = {**exchange, wire.CLIENTS: _ids(arrived)}
            confirmed, common, tags = yield from self._tags("confirm", told, masked.nodes)
            roster.require_enough([place[node] for node in confirmed])
            voidable = []
            read_opened = partial(_read_opened, sorted(promises))
            revealed = yield from self._ask("reveal", read_opened, confirmed, common, tags)
            total = masked.values[0].copy()
            for client_words in masked.values[1:]:
                total += client_words
            names = dict(enumerate(members.clients))
            shares = {place[upload.node]: upload.value for upload in revealed}
            server = MaskedSum(roster, promises, words.about, names)
            total = server.unmask(total, arrived, shares)
            for node in revealed.nodes:
                if wrong := server.conflicts.get(place[node]):
                    others = [names[k] for k in sorted(wrong)]
                    bad = BadReply("false-shares", f"of clients {others}, or these lied to it")
                    channel.log_drop(node, bad)
                    self.rejected[bad.reason] += 1
            result = self._plan.read(total, sum(counts[node] for node in masked.nodes))
            return SecureSum(result, self._counted(last), quorum)
        except ValueError as error:  # SealError, BadReply, vouchers of several lengths
            logger.warning("no secure sum (%s): the model stays as it was", error)
            self.rejected["secure-sum"] += len(last)
            refusal = channel.last_refusal or str(error)
        yield from self._void(exchange, voidable)
        channel.last_refusal = refusal
        return SecureSum(None, self._counted(last.keep(())), quorum)

    def _counted(self, uploads: Uploads[Any]) -> Uploads[Any]:
        """Return uploads without their words, with all that this sum rejected."""
        return uploads.without_values().with_rejected(self.rejected - uploads.rejected)

    def _addressed(
        self, name: str, uploads: Uploads[Any], rows: Sequence[NDArray[np.uint8]]
    ) -> dict[int, Records]:
        """Return by client its rows of what all sent, one from each sender."""
        return {
            upload.client: {name: np.stack([sent[self._place[upload.node]] for sent in rows])}
            for upload in uploads
        }

    def _public_part(self, reply: Reply) -> PublicPart:
        """Check the reply to the first exchange."""
        shapes = {wire.PUBLIC_KEY: (KEY_BYTES,), wire.NONCE: (EXCHANGE_BYTES,)}
        key, nonce = _bytes_in(reply, shapes)
        vouching = self._options.vouching
        try:
            public = check_public_key(key.tobytes())
            run = self._r.strategy.run
            voucher = b"" if vouching is None else vouching.voucher(public, run)
            return PublicPart(public, voucher, nonce.tobytes())
        except (SealError, NotEnrolled, ConnectionError) as error:
            raise BadReply("public-key", str(error)) from None

    def _tags(
        self, step: SumStep, common: Records, nodes: Sequence[int]
    ) -> Rounds[tuple[list[int], Records, dict[int, Records]]]:
        """Get clients' tags for each other; return who did, and what the next step sends."""
        shape = {wire.TAGS: (len(self._place), TAG_BYTES)}
        uploads = yield from self._ask(
            step, lambda reply: _bytes_in(reply, shape)[0], nodes, common
        )
        clients = _ids(self._place[node] for node in uploads.nodes)
        addressed = self._addressed(wire.TAGS, uploads, uploads.values)
        return uploads.nodes, {**common, wire.CLIENTS: clients}, addressed

    def _void(self, exchange: Records, nodes: Sequence[int]) -> Rounds[None]:
        """Have clients give up a sum of which none gave shares, so that they may give another."""
        if nodes:
            rejected = Counter(self.rejected)
            told, common, tags = yield from self._tags(
                "void", {**exchange, wire.CLIENTS: _ids([])}, nodes
            )
            yield from self._ask("free", lambda _: None, told, common, tags)
            self.rejected = rejected  # of the sum itself

    def _roster(self, members: Sequence[PublicPart]) -> tuple[Roster, Records]:
        """Return who takes part, and the arrays that say so."""
        threshold = max(FEWEST, math.ceil(self._options.threshold * len(members)))
        clients = range(len(members))
        keys, vouchers, nonces = ([public[i] for public in members] for i in range(3))
        roster = Roster(exchange_of(nonces), tuple(clients), tuple(keys), threshold)
        described: Records = {
            wire.NONCES: byte_rows(nonces),
            wire.CLIENTS: _ids(clients),
            wire.KEYS: byte_rows(keys),
            wire.VOUCHERS: byte_rows(vouchers),
            wire.THRESHOLD: np.array(threshold, np.int64),
        }
        return roster, described


def _screen_copied_keys(members: Sequence[PublicPart]) -> list[BadReply | None]:
    """Refuse public keys that more than one client sent: who copied is not known."""
    times, bad = (
        Counter(m.key for m in members),
        BadReply("public-key", "another client sent the same"),
    )
    return [None if times[public.key] == 1 else bad for public in members]


def _bytes_in(reply: Reply, shapes: Mapping[str, tuple[int, ...]]) -> list[NDArray[np.uint8]]:
    """Check the shapes of a reply's arrays, all of bytes."""
    arrays = reply.ordered_arrays(*shapes)
    for array, (name, shape) in zip(arrays, shapes.items(), strict=True):
        require_array(name, array, shape=shape, dtype=np.uint8)
    return arrays


def _read_shares(roster: Roster, reply: Reply) -> tuple[Promise, NDArray[np.uint8]]:
    """Check a client's promise, and its parcels, a row for each client of the roster."""
    shapes = {wire.PROMISE: (2, KEY_BYTES), wire.PARCELS: (len(roster.clients), PARCEL_BYTES)}
    promise, parcels = _bytes_in(reply, shapes)
    return Promise(promise[0].tobytes(), promise[1].tobytes()), parcels


def _read_words(counts: Mapping[int, int], words: WordFormat, reply: Reply) -> Words:
    """Check masked words: only their number and dtype can be."""
    (masked,) = reply.ordered_arrays(wire.MASKED)
    require_array("masked words", masked, shape=(words.size,), dtype=words.dtype)
    if reply.num_examples != (n := counts[reply.node]):
        raise BadReply("num-examples", f"{n} with the public key, {reply.num_examples} now")
    return masked


def _read_opened(senders: list[int], reply: Reply) -> dict[int, bytes]:
    clients, shares = reply.ordered_arrays(wire.CLIENTS, wire.SHARES)
    require_array(wire.CLIENTS, clients, shape=(len(senders),), dtype=np.int64)
    require_array(wire.SHARES, shares, shape=(len(senders), SECRET_BYTES), dtype=np.uint8)
    if clients.tolist() != senders:
        raise BadReply("clients", "expected shares of the secrets of all whose parcels came")
    return {k: row.tobytes() for k, row in zip(senders, shares, strict=True)}


def _ids(clients: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(clients), np.int64)
