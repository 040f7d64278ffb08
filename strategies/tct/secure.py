"""Sums over features of which the server sees the sum over all clients alone.

Source of the protocol: Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving
Machine Learning*, CCS 2017: see :mod:`fedntk.trust.secure_sum`. It takes five exchanges: public
keys; shares of the clients' secrets, which the server hands on; masked sums; tags by which clients
see that all were told of the same sums; shares, by which the sum is opened.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.features.fixed_point import MOST_BITS
from fedntk.ntk.payloads import (
    UNQUANTISED,
    ConvexTask,
    FeatureStatistics,
    Solve,
    packed_size,
    sums_digest,
    word_dtype,
)
from fedntk.ntk.support.arrays import require_array
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

from ..core.exchange import Pairs, logger
from ..core.replies import Reply
from ..core.trust_protocols import VouchesForKeys
from .statistics import PooledStatistics, Sums

if TYPE_CHECKING:
    from .tct import TCT

__all__ = ["SecureStatistics", "check_secure"]

EVERYONE = -1  # in the place of a client's id
Step = Literal["public-key", "shares", "masked-statistics", "confirm", "reveal"]
Records = dict[str, NDArray[Any]]
T = TypeVar("T")


class SecureStatistics(PooledStatistics):
    """The exchange of sums, masked so that they can be opened together alone.

    Clients that drop out after they gave shares do not keep the sum closed, as long as `threshold`
    of the clients go on to the end; what they had masked is left out.

    Parameters
    ----------
    tct : TCT
        Whose phase it is.
    threshold : float
        Share of the clients with public keys who are needed to open the sum.
    vouching : VouchesForKeys, optional
        Vouches for the public keys.
    """

    name = "secure-statistics"

    def __init__(self, tct: "TCT", threshold: float, vouching: VouchesForKeys | None) -> None:
        super().__init__(tct)
        self.threshold, self.vouching = threshold, vouching
        self._ask("public-key")

    def _ask(
        self,
        step: Step,
        common: Mapping[str, NDArray[Any]] | None = None,
        own: Mapping[int, Mapping[str, NDArray[Any]]] | None = None,
    ) -> None:
        """Set what comes next, and which arrays all clients, or each of them, get for it."""
        self._step: Step = step
        self._common, self._own = common or {}, own or {}
        self.needs = ("network",) if step == "masked-statistics" else ()

    def task(self, client: int) -> ConvexTask:
        """Ask for what the exchange is about."""
        return replace(super().task(client), step=self._step)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, and what of the protocol goes to this client."""
        content = super().content_for(client, arrays, config)
        if self._step != "masked-statistics":
            content.pop("steps", None)
        if found := {**self._common, **self._own.get(client, {})}:
            content["secure-sum"] = ArrayRecord({k: Array(a) for k, a in found.items()})
        return content

    def messages(self, *args: Any) -> list[Message]:
        """Ask all clients for their public keys."""
        self._ask("public-key")
        return super().messages(*args)

    # ------------------------------------------------------------- the protocol

    def collected(self, replies: Iterable[Message]) -> tuple[Mapping[int, Sums], MetricRecord]:
        """Go through the five exchanges; return one sum, over the clients whose numbers came."""
        found = self.answers(replies, self._known)
        rejected = found.rejected
        pairs = self.tct.screened(found.pairs, rejected, _own_keys)
        last = [reply for reply, _ in pairs]
        sums: dict[int, Sums] = {}
        try:
            roster, described = self._roster({r.client: known for r, known in pairs})
            counts = {reply.client: reply.num_examples for reply in last}
            dtype = word_dtype(sum(counts.values()), self._fixed)
            exchange: Records = {"exchange": np.frombuffer(roster.exchange, np.uint8)}

            self._ask("shares", described)
            shared = self._next(last, _shares_for(roster), rejected)
            promises = {reply.client: own.promise for reply, own in shared}
            parcels = [own.parcels for _, own in shared]
            rows = {r.client: {"parcels": _addressed(r, roster, parcels)} for r, _ in shared}
            word_bytes = np.array(dtype.itemsize, np.int64)
            common = {**exchange, "clients": _ids(promises), "word-bytes": word_bytes}
            self._ask("masked-statistics", common, rows)
            masked = self._next([r for r, _ in shared], self._words(counts, dtype), rejected)
            last = [reply for reply, _ in masked]
            arrived = [reply.client for reply in last]

            if not self.tct.enough(len(masked)):
                self._ask("public-key")
                return sums, self.tct.round_metrics(last, rejected)
            self._ask("confirm", {**exchange, "clients": _ids(arrived)})
            told = self._next(last, _tags_for(roster), rejected)
            tags = [own for _, own in told]
            rows = {r.client: {"tags": _addressed(r, roster, tags)} for r, _ in told}
            self._ask("reveal", {**exchange, "clients": _ids(r.client for r, _ in told)}, rows)
            revealed = self._next([r for r, _ in told], _shares_of(sorted(promises)), rejected)
            total = masked[0][1].copy()
            for _, words in masked[1:]:
                total += words
            given = {reply.client: own for reply, own in revealed}
            total = MaskedSum(roster, promises, self._about(dtype)).opened(total, arrived, given)
            counted = sum(counts[client] for client in arrived)
            sums[EVERYONE] = FeatureStatistics.from_words(
                total, counted, self.tct.width, self.tct.shape[1], self._fixed
            )
        except ValueError as error:  # SealError, BadReply, vouchers of several lengths
            logger.log(WARNING, "no secure sum (%s): the model stays as it was", error)
            rejected["secure-sum"] += len(last)
            last = []
        self._ask("public-key")
        return sums, self.tct.round_metrics(last, rejected)

    def _next(
        self, replies: Iterable[Reply], parse: Callable[[Reply], T], rejected: Counter[str]
    ) -> Pairs[T]:
        """Make one more exchange with the clients of some replies."""
        nodes = [reply.node for reply in replies]
        answers = self.tct.asked_again(nodes, parse, MessageType.TRAIN)
        for reply, _ in answers.pairs:
            self.tct.sent.mark(reply.client, *self.needs)
        rejected += answers.rejected
        return answers.pairs

    def _about(self, dtype: Any) -> bytes:
        """Return what clients make of the network, the feature map and the steps."""
        tct = self.tct
        network = [tct.global_arrays[name].numpy() for name in tct.network.state_dict()]
        return sums_digest(ConvexTask.key_of(tct.feature_map, network), self._fixed, dtype)

    @property
    def _fixed(self) -> FixedPoint:
        if self.fixed_point is None:
            raise RuntimeError("no steps of fixed-point numbers: messages makes them")
        return self.fixed_point

    def _known(self, reply: Reply) -> "_Known":
        """Return a client's public key, its voucher, empty if nobody vouches, and its nonce."""
        key, nonce = _arrays(reply, 2)
        require_array("public key", key, shape=(KEY_BYTES,), dtype=np.uint8)
        require_array("nonce", nonce, shape=(EXCHANGE_BYTES,), dtype=np.uint8)
        try:
            public = check_public_key(key.tobytes())
            vouching = self.vouching
            voucher = b"" if vouching is None else vouching.voucher(public, self.tct.run)
            return _Known(public, voucher, nonce.tobytes())
        except (SealError, NotEnrolled, ConnectionError) as error:
            raise BadReply("public-key", str(error)) from None

    def _roster(self, known: Mapping[int, "_Known"]) -> tuple[Roster, Records]:
        """Return who takes part, and the arrays that say so."""
        clients, threshold = sorted(known), max(FEWEST, math.ceil(self.threshold * len(known)))
        keys, vouchers, nonces = ([known[k][i] for k in clients] for i in range(3))
        roster = Roster(exchange_of(nonces), tuple(clients), tuple(keys), threshold)
        described: Records = {
            "nonces": _rows(nonces),
            "clients": _ids(clients),
            "keys": _rows(keys),
            "vouchers": _rows(vouchers),
            "threshold": np.array(threshold, np.int64),
        }
        return roster, described

    def _words(self, counts: Mapping[int, int], dtype: Any) -> Callable[[Reply], Words]:
        """Return how masked words are checked: nothing but their number can be."""
        width, num_classes = self.tct.width, self.tct.shape[1]
        shape = (packed_size(width) + num_classes * (width + 1),)

        def parse(reply: Reply) -> Words:
            (words,) = _arrays(reply, 1)
            require_array("masked sums", words, shape=shape, dtype=dtype)
            if reply.num_examples != counts[reply.client]:
                raise BadReply(
                    "num-examples",
                    f"{counts[reply.client]} with the public key, {reply.num_examples} now",
                )
            return words

        return parse


class _Known(NamedTuple):
    """What is known of a client before a sum."""

    key: bytes
    voucher: bytes
    nonce: bytes


def _own_keys(known: Sequence[_Known], _: float) -> list[BadReply | None]:
    """Refuse public keys that more than one client sent: who copied it is not known."""
    times = Counter(own.key for own in known)
    return [
        None if times[own.key] == 1 else BadReply("public-key", "another client sent the same")
        for own in known
    ]


class _Shared(NamedTuple):
    """What a client sent with its shares: a row of parcels for each client of the roster."""

    promise: Promise
    parcels: NDArray[np.uint8]


def _shares_for(roster: Roster) -> Callable[[Reply], _Shared]:
    def parse(reply: Reply) -> _Shared:
        promise, parcels = _arrays(reply, 2)
        require_array("promise", promise, shape=(2, KEY_BYTES), dtype=np.uint8)
        shape = (len(roster.clients), PARCEL_BYTES)
        require_array("parcels", parcels, shape=shape, dtype=np.uint8)
        return _Shared(Promise(promise[0].tobytes(), promise[1].tobytes()), parcels)

    return parse


def _tags_for(roster: Roster) -> Callable[[Reply], NDArray[np.uint8]]:
    def parse(reply: Reply) -> NDArray[np.uint8]:
        (tags,) = _arrays(reply, 1)
        shape = (len(roster.clients), TAG_BYTES)
        require_array("tags", tags, shape=shape, dtype=np.uint8)
        return tags

    return parse


def _addressed(
    reply: Reply, roster: Roster, sent: Sequence[NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Return what is for one client, a row of each of those who sent any."""
    position = roster.position(reply.client)
    return np.stack([own[position] for own in sent])


def _shares_of(senders: list[int]) -> Callable[[Reply], dict[int, bytes]]:
    def parse(reply: Reply) -> dict[int, bytes]:
        clients, shares = _arrays(reply, 2)
        require_array("clients", clients, shape=(len(senders),), dtype=np.int64)
        require_array("shares", shares, shape=(len(senders), SECRET_BYTES), dtype=np.uint8)
        if clients.tolist() != senders:
            raise BadReply("clients", "expected shares of the secrets of all whose parcels came")
        return {k: row.tobytes() for k, row in zip(senders, shares, strict=True)}

    return parse


def _arrays(reply: Reply, count: int) -> list[NDArray[Any]]:
    arrays = list(reply.arrays().values())
    if len(arrays) != count:
        raise BadReply("arrays", f"expected {count}, got {len(arrays)}")
    return arrays


def _ids(clients: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(clients), np.int64)


def _rows(parts: Sequence[bytes]) -> NDArray[np.uint8]:
    """Return byte strings of one length as rows."""
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)


def check_secure(solve: Solve, bits: int, *, kept: bool, split: bool) -> None:
    """Refuse what does not go with sums of which the server sees the joint ones alone."""
    if solve != "statistics" or bits == UNQUANTISED:
        raise ValueError(
            "secure_aggregation: masks are added to whole numbers; expected bits = 2 ... "
            f"{MOST_BITS} and solve='statistics', got bits = {bits} and solve={solve!r}"
        )
    if kept or split:
        raise ValueError(
            "secure_aggregation: the server has no client's sums to keep, nor of what clients "
            "hold out; expected keep_sums=None and validation_share=0"
        )
