"""Sums over clients; the server sees only the total. For any strategy.

Source: Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS
2017: see :mod:`fedntk.trust.secure_sum`. It takes five exchanges: public keys; shares of the
clients' secrets, which the server hands on; masked words; tags by which clients see that all were
told of the same words; shares, by which the sum is opened. If too few are left before the last one,
two others give it up for good. The client half is :mod:`fedntk.clients.core.secure_sum`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import MessageType, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.payloads.feature_statistics import SumStep
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

from .averaging import record_of
from .exchange import Pairs, Parse, logger
from .lost_state import Answers, ResendingStrategy
from .replies import Reply

Records = dict[str, NDArray[Any]]
NEXT: dict[str, SumStep] = {"confirm": "reveal", "void": "free"}
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


class SecureSums:
    """The server's part in a secure sum, in which clients go by their places in its roster.

    Clients that drop out after they gave shares do not keep the sum closed if `secure_threshold`,
    a share of the clients with public keys, go on to the end; what they had masked is left out. The
    strategy's messages must tell :attr:`step`, and go through :meth:`add_to`.
    """

    step: SumStep  # the current exchange
    quorum: int = 0  # fewest clients with whom the last sum could be opened

    def __init__(self, strategy: ResendingStrategy) -> None:
        self._strategy = strategy
        self._threshold, self._vouching = strategy.secure_threshold, strategy.vouching
        self.begin()

    def begin(self) -> None:
        """Go to the first exchange, of public keys."""
        self._prepare("public-key")

    def _prepare(
        self,
        step: SumStep,
        common: Mapping[str, NDArray[Any]] | None = None,
        own: Mapping[int, Mapping[str, NDArray[Any]]] | None = None,
    ) -> None:
        self.step = step
        self._common, self._own = common or {}, own or {}

    def add_to(self, content: RecordDict, client: int) -> None:
        """Add the arrays that a client is sent for the current exchange, if there are any."""
        if found := {**self._common, **self._own.get(client, {})}:
            content["secure-sum"] = record_of(found)

    def public_part(self, reply: Reply) -> PublicPart:
        """Check the reply to the first exchange."""
        shapes = {"public-key": (KEY_BYTES,), "nonce": (EXCHANGE_BYTES,)}
        key, nonce = _bytes_in(reply, shapes)
        try:
            public = check_public_key(key.tobytes())
            vouching, run = self._vouching, self._strategy.run
            voucher = b"" if vouching is None else vouching.voucher(public, run)
            return PublicPart(public, voucher, nonce.tobytes())
        except (SealError, NotEnrolled, ConnectionError) as error:
            raise BadReply("public-key", str(error)) from None

    def complete(
        self,
        found: Answers[PublicPart],
        format_for: Callable[[int], WordFormat],
        read: Callable[[Words, int], T],
    ) -> tuple[T | None, list[Reply]]:
        """Go through the other exchanges and read the sum of the words that came.

        Returns None if the sum stays closed, and the replies of the clients in the sum. Rejected
        replies are added to those `found` in the first exchange. From all clients' number of
        examples `format_for` makes the format of their words; from sum and number of examples
        `read` makes the result, or raises ValueError.
        """
        pairs, rejected, _ = found
        last, voidable, exchange = list[Reply](), list[Reply](), Records()
        try:
            pairs = self._strategy.apply_screen(pairs, rejected, _screen_copied_keys)
            last = [reply for reply, _ in pairs]
            counts = {reply.node: reply.num_examples for reply in last}
            self._place = place = {reply.node: k for k, reply in enumerate(last)}
            roster, described = self._roster([known for _, known in pairs])
            words = format_for(sum(counts.values()))
            exchange = {"exchange": np.frombuffer(roster.exchange, np.uint8)}

            self._prepare("shares", described)
            shared = self._next(last, partial(_read_shares, roster), rejected)
            promises = {place[reply.node]: promise for reply, (promise, _) in shared}
            parcels = [own for _, (_, own) in shared]
            rows = {r.client: {"parcels": _address(place[r.node], parcels)} for r, _ in shared}
            word_bytes = np.array(words.dtype.itemsize, np.int64)
            common = {**exchange, "clients": _ids(promises), "word-bytes": word_bytes}
            self._prepare("masked", common, rows)
            read_words = partial(_read_words, counts, words)
            voidable = [reply for reply, _ in shared]
            masked = self._next(voidable, read_words, rejected)
            last = [reply for reply, _ in masked]
            arrived = [place[reply.node] for reply in last]
            if not self._strategy.enough(len(masked)):
                self._void(exchange, voidable)
                return None, last
            roster.require_enough(arrived)
            told = self._tags("confirm", {**exchange, "clients": _ids(arrived)}, last, rejected)
            roster.require_enough(told)
            voidable = []
            open_shares = partial(_read_opened, sorted(promises))
            revealed = self._next(told, open_shares, rejected)
            total = masked[0][1].copy()
            for _, own_words in masked[1:]:
                total += own_words
            given = {place[reply.node]: own for reply, own in revealed}
            names = {place[reply.node]: reply.client for reply, _ in pairs}
            server = MaskedSum(roster, promises, words.about, names)
            total = server.unmask(total, arrived, given)
            for reply, _ in revealed:
                if wrong := server.conflicts.get(place[reply.node]):
                    said = f"of clients {[names[k] for k in sorted(wrong)]}, or these lied to it"
                    self._strategy.drop(reply.node, BadReply("false-shares", said), rejected)
            return read(total, sum(counts[reply.node] for reply in last)), last
        except ValueError as error:  # SealError, BadReply, vouchers of several lengths
            logger.warning("no secure sum (%s): the model stays as it was", error)
            rejected["secure-sum"] += len(last)
            refusal = self._strategy.last_refusal or str(error)
            self._void(exchange, voidable)
            self._strategy.last_refusal = refusal
            return None, []
        finally:
            self.begin()

    def _tags(
        self, step: SumStep, common: Records, replies: Iterable[Reply], rejected: Counter[str]
    ) -> list[Reply]:
        """Get clients' tags for each other; the next exchange hands them on to those returned."""
        self._prepare(step, common)
        shape, place = {"tags": (len(self._place), TAG_BYTES)}, self._place
        pairs = self._next(replies, lambda reply: _bytes_in(reply, shape), rejected)
        tags = [own for _, (own,) in pairs]
        rows = {r.client: {"tags": _address(place[r.node], tags)} for r, _ in pairs}
        clients, then = _ids(place[reply.node] for reply, _ in pairs), NEXT[step]
        self._prepare(then, {**common, "clients": clients}, rows)
        return [reply for reply, _ in pairs]

    def _void(self, exchange: Records, replies: Sequence[Reply]) -> None:
        """Have clients give up a sum of which none gave shares, so that they may give another."""
        if replies:
            told = self._tags("void", {**exchange, "clients": _ids([])}, replies, Counter())
            self._next(told, lambda _: None, Counter())

    def _next(self, replies: Iterable[Reply], parse: Parse[T], rejected: Counter[str]) -> Pairs[T]:
        """Make one more exchange with the clients of some replies."""
        nodes = [reply.node for reply in replies]
        found = self._strategy.ask_again(nodes, parse, MessageType.TRAIN)
        rejected += found.rejected
        return found.pairs

    def _roster(self, known: Sequence[PublicPart]) -> tuple[Roster, Records]:
        """Return who takes part, and the arrays that say so."""
        threshold = max(FEWEST, math.ceil(self._threshold * len(known)))
        self.quorum = threshold
        clients = range(len(known))
        keys, vouchers, nonces = ([own[i] for own in known] for i in range(3))
        roster = Roster(exchange_of(nonces), tuple(clients), tuple(keys), threshold)
        described: Records = {
            "nonces": _rows(nonces),
            "clients": _ids(clients),
            "keys": _rows(keys),
            "vouchers": _rows(vouchers),
            "threshold": np.array(threshold, np.int64),
        }
        return roster, described


def _screen_copied_keys(known: Sequence[PublicPart], _: float) -> list[BadReply | None]:
    """Refuse public keys that more than one client sent: who copied is not known."""
    times = Counter(own.key for own in known)
    return [
        None if times[own.key] == 1 else BadReply("public-key", "another client sent the same")
        for own in known
    ]


def _bytes_in(reply: Reply, shapes: Mapping[str, tuple[int, ...]]) -> list[NDArray[np.uint8]]:
    """Check the shapes of a reply's arrays, all of bytes."""
    arrays = reply.ordered_arrays(*shapes)
    for array, (name, shape) in zip(arrays, shapes.items(), strict=True):
        require_array(name, array, shape=shape, dtype=np.uint8)
    return arrays


def _read_shares(roster: Roster, reply: Reply) -> tuple[Promise, NDArray[np.uint8]]:
    """Check a client's promise, and its parcels, a row for each client of the roster."""
    shapes = {"promise": (2, KEY_BYTES), "parcels": (len(roster.clients), PARCEL_BYTES)}
    promise, parcels = _bytes_in(reply, shapes)
    return Promise(promise[0].tobytes(), promise[1].tobytes()), parcels


def _read_words(counts: Mapping[int, int], words: WordFormat, reply: Reply) -> Words:
    """Check masked words: only their number and dtype can be."""
    (masked,) = reply.ordered_arrays("masked")
    require_array("masked words", masked, shape=(words.size,), dtype=words.dtype)
    if reply.num_examples != (n := counts[reply.node]):
        raise BadReply("num-examples", f"{n} with the public key, {reply.num_examples} now")
    return masked


def _read_opened(senders: list[int], reply: Reply) -> dict[int, bytes]:
    clients, shares = reply.ordered_arrays("clients", "shares")
    require_array("clients", clients, shape=(len(senders),), dtype=np.int64)
    require_array("shares", shares, shape=(len(senders), SECRET_BYTES), dtype=np.uint8)
    if clients.tolist() != senders:
        raise BadReply("clients", "expected shares of the secrets of all whose parcels came")
    return {k: row.tobytes() for k, row in zip(senders, shares, strict=True)}


def _address(place: int, sent: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the rows for the client of a place, one from each sender."""
    return np.stack([own[place] for own in sent])


def _ids(clients: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(clients), np.int64)


def _rows(parts: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)
