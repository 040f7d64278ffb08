"""A sum of the clients' whole numbers; the server learns only the total. Without Flower.

Source: Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS
2017, figure 4. Client u adds masks to its words x_u, modulo 2^32 or 2^64:

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv),

with s_uv agreed on by u and v (X25519 of mask keys that are drawn for one sum) and b_u its own. In
the sum of all y_u the s_uv cancel. The other clients hold Shamir shares of b_u and of the seed of
u's mask key. They reveal those of b_u if y_u arrived, those of the seed if not; never both.

Shares and mask keys travel encrypted under keys of pairs of clients; the server relays them. All
keys depend on nonces that the clients draw for the sum, the s_uv also on what the words are about:
a server can open a sum once, and only if it asked all for the same thing. Before clients give
shares, they compare who dropped out: round 3 of the figure, with tags of keyed BLAKE2b in place of
signatures. PRG is ChaCha20, keys are derived by HKDF-SHA256, and shares are pycryptodome's, over
GF(2^128). The page on privacy says what this protects against whom.
"""

import hashlib
import hmac
import itertools
import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, reduce
from operator import xor
from typing import Any, Self

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from .sealing import KEY_BYTES, SealError, agree, public_bytes
from .wire import frame

FEWEST = 3  # clients of a sum: each of two would learn the other's numbers
SECRET_BYTES = 16  # of a secret, and of a share of it: numbers of GF(2^128)
PARCEL_BYTES = 92  # nonce 12, mask key 32, two shares, tag 16
MODULUS = 1 << 128 | 0x87  # x^128 + x^7 + x^2 + x + 1, as pycryptodome has it
TAG_BYTES = 16  # by which a client tells another who is in the sum
NOBODY = (-1,)  # is in a sum that was given up
NONCE_BYTES = 12
EXCHANGE_BYTES = 16  # of a sum's name, and of the nonce that each client draws for it
CHUNK = 2**20  # words that are masked at a time
MOST_SETS = 1000  # of shares that are tried if more are false than can be corrected
Words = NDArray[np.uint32] | NDArray[np.uint64]
MOST_PRODUCTS = 10**6  # in GF(2^128), for that
Tags = Mapping[int, bytes]  # client -> its tag


def exchange_of(nonces: Iterable[bytes]) -> bytes:
    """Return the name of a sum, 16 bytes, from its clients' nonces of 16 bytes, each used once."""
    text = b"fedntk secure sum 1 exchange\0" + frame(nonces)
    return hashlib.sha256(text).digest()[:EXCHANGE_BYTES]


@dataclass(frozen=True)
class Promise:
    """What a client tells the server before its words; the server knows right shares by it."""

    mask_key: bytes  # public, 32 raw bytes
    commitment: bytes  # to b_u, 32 bytes


@dataclass(frozen=True)
class Roster:
    """Who takes part in a sum. All clients must agree on it, as their keys depend on it."""

    exchange: bytes  # name of the sum, 16 bytes: see exchange_of
    clients: tuple[int, ...]  # three ids or more, ascending
    keys: tuple[bytes, ...]  # their public keys, 32 raw bytes each
    # clients who must be in the sum and give shares to open it: more than half, and three or more
    threshold: int

    def __post_init__(self) -> None:
        count = len(self.clients)
        if count < FEWEST:
            raise SealError(f"expected at least {FEWEST} clients of a secure sum, got {count}")
        if len(self.keys) != count or any(len(key) != KEY_BYTES for key in self.keys):
            raise SealError(f"expected {count} public keys of {KEY_BYTES} bytes")
        if list(self.clients) != sorted(set(self.clients)) or len(set(self.keys)) != count:
            raise SealError("expected clients in order, each once, with keys of their own")
        if not max(count / 2, FEWEST - 1) < self.threshold <= count:
            raise SealError(
                f"threshold: expected more than half of {count} clients, at least {FEWEST} and at "
                f"most all, got {self.threshold}: with fewer a server could open a single client's "
                "numbers, or one client another's"
            )

    @cached_property
    def digest(self) -> bytes:
        """Checksum of the whole roster, 32 bytes."""
        numbers = f"{self.threshold} {self.clients}".encode()
        return hashlib.sha256(frame([self.exchange, numbers, *self.keys])).digest()

    def position(self, client: int) -> int:
        """Return a client's place, from 0; raise SealError if it takes no part."""
        if client not in self.clients:
            raise SealError(f"client {client} takes no part in this sum")
        return self.clients.index(client)

    def key_of(self, client: int) -> bytes:
        """Return a client's public key."""
        return self.keys[self.position(client)]

    def require_enough(self, left: Collection[Any]) -> None:
        """Refuse to go on with fewer clients than are needed to open the sum."""
        if len(left) < self.threshold:
            raise SealError(
                f"{len(left)} clients are left, {self.threshold} are needed for the sum"
            )

    def derive(self, secret: bytes, purpose: str) -> bytes:
        """Return a key of 32 bytes for one purpose in this sum."""
        info = f"fedntk secure sum 1 {purpose}\0".encode() + self.digest
        return HKDF(SHA256(), 32, salt=None, info=info).derive(secret)

    def mask_key(self, seed: bytes) -> X25519PrivateKey:
        """Return the private mask key that a client makes from its seed."""
        return X25519PrivateKey.from_private_bytes(self.derive(seed, "mask key"))

    def promise(self, seed: bytes, self_mask: bytes) -> Promise:
        """Return what commits a client to its seed and b_u; neither can be found from it."""
        text = b"fedntk secure sum 1 own mask\0" + self.digest + self_mask
        return Promise(public_bytes(self.mask_key(seed)), hashlib.sha256(text).digest())

    def add_self_mask(self, words: Words, self_mask: bytes, sign: int) -> None:
        """Add or subtract PRG(b_u), in place."""
        _add_stream(words, self.derive(self_mask, "own mask"), sign)

    def add_pair_mask(
        self, words: Words, key: X25519PrivateKey, other_key: bytes, about: bytes, sign: int
    ) -> None:
        """Add or subtract PRG(s_uv) of the owners of two mask keys, in place."""
        seed = self.derive(agree(key, other_key), f"pair {about.hex()}")
        _add_stream(words, seed, sign)


@dataclass
class Masker:
    """A client's part in one sum. Its methods raise SealError if the others break the protocol.

    Examples
    --------
    Four clients add up; the last one's words never arrive.

    >>> from fedntk.trust import new_key
    >>> keys = [new_key() for _ in range(4)]
    >>> roster = Roster(bytes(16), (0, 1, 2, 3), tuple(public_bytes(key) for key in keys), 3)
    >>> maskers = [Masker(roster, k, key) for k, key in enumerate(keys)]
    >>> parcels = [masker.parcels() for masker in maskers]
    >>> for k, masker in enumerate(maskers):
    ...     masker.receive({j: parcels[j][k] for j in range(4) if j != k})
    >>> words = [masker.mask(np.array([10, -k]).astype(np.uint32))
    ...          for k, masker in enumerate(maskers)]
    >>> total = MaskedSum(roster, {k: masker.promise for k, masker in enumerate(maskers)})
    >>> left = [0, 1, 2]
    >>> tags = [maskers[k].confirm(left) for k in left]
    >>> shares = {k: maskers[k].reveal({j: tags[j][k] for j in left if j != k}) for k in left}
    >>> total.unmask(words[0] + words[1] + words[2], left, shares).view(np.int32)
    array([30, -3], dtype=int32)
    """

    roster: Roster
    client: int
    private_key: X25519PrivateKey = field(repr=False)  # of the key in the roster
    # seed of the mask key, and b_u: 16 bytes each
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    self_mask: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    # client that shares masks -> its public mask key and shares of its two secrets, 64 bytes
    received: dict[int, bytes] = field(default_factory=dict, repr=False)
    arrived: tuple[int, ...] = ()  # clients in the sum, as confirmed; NOBODY: it was given up

    def __post_init__(self) -> None:
        if self.roster.key_of(self.client) != public_bytes(self.private_key):
            raise SealError("the server has another public key of this client")

    @property
    def promise(self) -> Promise:
        """What this client tells the server about its secrets."""
        return self.roster.promise(self.seed, self.self_mask)

    def parcels(self) -> dict[int, bytes]:
        """Return 92 bytes for each other client: the mask key and shares of both secrets."""
        roster, mask_key = self.roster, self.promise.mask_key
        shares_of_seed, shares_of_mask = (
            Shamir.split(roster.threshold, len(roster.clients), secret, ssss=False)
            for secret in (self.seed, self.self_mask)
        )
        parcels: dict[int, bytes] = {}
        for other, (_, of_seed), (_, of_mask) in zip(
            roster.clients, shares_of_seed, shares_of_mask, strict=True
        ):
            content = mask_key + of_seed + of_mask
            if other == self.client:
                self.received[other] = content
                continue
            nonce = secrets.token_bytes(NONCE_BYTES)
            key, info = self._channel(other, sends=True)
            parcels[other] = nonce + ChaCha20Poly1305(key).encrypt(nonce, content, info)
        return parcels

    def receive(self, parcels: Mapping[int, bytes]) -> None:
        """Open the other clients' parcels; :meth:`mask` adds masks with their senders."""
        self.roster.require_enough({**parcels, self.client: b""})
        for sender, parcel in parcels.items():
            key, info = self._channel(sender, sends=False)
            try:
                nonce, sealed = parcel[:NONCE_BYTES], parcel[NONCE_BYTES:]
                content = ChaCha20Poly1305(key).decrypt(nonce, sealed, info)
            except (InvalidTag, ValueError):
                raise SealError(
                    f"what client {sender} sent does not open: it is damaged, or of another sum"
                ) from None
            if len(parcel) != PARCEL_BYTES:
                raise SealError(f"client {sender}: expected {PARCEL_BYTES} bytes of shares")
            self.received[sender] = content

    def mask(self, words: Words, about: bytes = b"") -> Words:
        """Return the client's words with its masks, modulo 2^32 or 2^64.

        `words` are uint32 or uint64 of shape (m,), negative numbers modulo the same; `about` is
        their subject. The masks of two clients with different subjects do not cancel.
        """
        result = words.copy()
        self.roster.add_self_mask(result, self.self_mask, 1)
        key = self.roster.mask_key(self.seed)
        for other, content in self.received.items():
            if other != self.client:
                sign = 1 if self.client < other else -1
                self.roster.add_pair_mask(result, key, content[:KEY_BYTES], about, sign)
        return result

    def confirm(self, arrived: Iterable[int]) -> dict[int, bytes]:
        """Tell each other client which clients' words `arrived`: return tags, 16 bytes each.

        A client confirms only one set, of as many clients as the threshold or more, with itself.
        """
        survivors = set(arrived)
        if self.client not in survivors or survivors - self.received.keys():
            raise SealError("expected clients of this sum, this one among them")
        self.roster.require_enough(survivors)
        if self.arrived and survivors != set(self.arrived):
            raise SealError("this client has confirmed other clients of the sum before")
        self.arrived = tuple(sorted(survivors))
        return {v: self._tag(v, sends=True) for v in self.arrived if v != self.client}

    def reveal(self, tags: Tags) -> dict[int, bytes]:
        """Return shares of b_v of the clients whose words arrived, of the other clients' seeds.

        As many as the threshold must have confirmed the same, by their `tags` to this client, which
        counts itself. That is more than half of all, and each confirms once: so all shares that
        clients give are for one set of clients.
        """
        agreeing = self._agreeing(tags, self.arrived) + bool(self.arrived)
        if agreeing < self.roster.threshold:
            raise SealError(
                f"{agreeing} clients were told the same of who is in the sum, fewer than the "
                f"{self.roster.threshold} who were agreed on: it stays closed"
            )
        of_seed, of_mask = slice(-2 * SECRET_BYTES, -SECRET_BYTES), slice(-SECRET_BYTES, None)
        return {
            v: content[of_mask if v in self.arrived else of_seed]
            for v, content in sorted(self.received.items())
        }

    def void(self) -> dict[int, bytes]:
        """Destroy all secrets of the sum, for good; tell each other client: return tags."""
        self.seed, self.self_mask, self.arrived = bytes(SECRET_BYTES), bytes(SECRET_BYTES), NOBODY
        self.received = dict.fromkeys(self.roster.clients, b"")  # and no parcels are taken again
        return {v: self._tag(v, sends=True) for v in self.received if v != self.client}

    def require_void(self, tags: Tags, malicious: int) -> None:
        """Refuse unless the sum can never open, by `tags` of :meth:`void`, some `malicious`."""
        clients, threshold = self.roster.clients, self.roster.threshold
        left = len(clients) - 1 - self._agreeing(tags, clients) + malicious
        if self.arrived != NOBODY or left >= threshold:
            raise SealError(f"{left} clients may yet open the sum, {threshold} are enough")

    def _agreeing(self, tags: Tags, clients: Iterable[int]) -> int:
        """Return how many of the other clients say by their tags what this one would say."""
        others = tags.keys() & set(clients) - {self.client}
        return sum(hmac.compare_digest(tags[v], self._tag(v, sends=False)) for v in others)

    def _tag(self, other: int, *, sends: bool) -> bytes:
        key, _ = self._channel(other, sends=sends, what="tag")
        text = np.array(self.arrived, np.int64).tobytes()
        return hashlib.blake2b(text, digest_size=TAG_BYTES, key=key).digest()

    def _channel(self, other: int, *, sends: bool, what: str = "parcel") -> tuple[bytes, bytes]:
        """Return the key for what one client sends another in this sum, and its purpose."""
        sender, receiver = (self.client, other) if sends else (other, self.client)
        secret = agree(self.private_key, self.roster.key_of(other))
        purpose = f"{what} from {sender} to {receiver}"
        return self.roster.derive(secret, purpose), purpose.encode()

    def to_bytes(self) -> bytes:
        """Write all of it but the private key, secrets included: only the client may read it."""
        fields = {**vars(self), "roster": asdict(self.roster)}
        del fields["private_key"]
        return json.dumps(fields, default=bytes.hex).encode()

    @classmethod
    def from_bytes(cls, data: bytes, private_key: X25519PrivateKey) -> Self:
        """Read what :meth:`to_bytes` returned."""
        fields, read = json.loads(data), bytes.fromhex
        roster = fields["roster"]
        clients, keys = tuple(roster["clients"]), tuple(map(read, roster["keys"]))
        return cls(
            Roster(read(roster["exchange"]), clients, keys, roster["threshold"]),
            fields["client"],
            private_key,
            read(fields["seed"]),
            read(fields["self_mask"]),
            {int(k): read(content) for k, content in fields["received"].items()},
            tuple(fields["arrived"]),
        )


@dataclass(frozen=True)
class MaskedSum:
    """The server's part: it opens the sum of words, and no words of one client.

    With m givers of shares, e of them false, it opens if m - e >= threshold + e, and often if not.
    """

    roster: Roster
    promises: Mapping[int, Promise]  # of the clients with parcels that were handed on
    about: bytes = b""  # subject of the words, as in Masker.mask
    names: Mapping[int, int] = field(default_factory=dict)  # of clients in errors, if others
    # client -> those of whose secrets wrong shares of it were in the way: it or they lie
    conflicts: dict[int, set[int]] = field(default_factory=dict)

    def unmask(
        self, total: Words, arrived: Iterable[int], revealed: Mapping[int, Mapping[int, bytes]]
    ) -> Words:
        """Return the sum without masks; SealError if too few clients gave right shares.

        `total` (m,) is the sum of the masked words of clients that `arrived`; `revealed` has what
        each client returned from :meth:`Masker.reveal`.
        """
        survivors, result = sorted(arrived), total.copy()
        for client in self.promises:
            in_sum = client in survivors
            shares = {
                self.roster.position(k) + 1: int.from_bytes(shares_of[client])
                for k, shares_of in revealed.items()
                if client in shares_of
            }
            secret = self._secret(shares, client, in_sum)
            if in_sum:
                self.roster.add_self_mask(result, secret, -1)
                continue
            key = self.roster.mask_key(secret)
            for other in survivors:  # their words have the mask with the client that is missing
                public, sign = self.promises[other].mask_key, 1 if client < other else -1
                self.roster.add_pair_mask(result, key, public, self.about, sign)
        return result

    def _secret(self, shares: Mapping[int, int], client: int, in_sum: bool) -> bytes:
        """Return a client's secret; shares (point -> share) of givers in no conflict go first."""
        threshold, givers = self.roster.threshold, self.roster.clients
        promise = self.promises[client]
        part = "commitment" if in_sum else "mask_key"
        ordered = sorted(shares, key=lambda x: (len(self.conflicts.get(givers[x - 1], ())), x))
        self.roster.require_enough(shares)
        for tried, points in enumerate(_sets(shares, ordered, threshold)):
            some = {x: shares[x] for x in points}
            secret = _value(some).to_bytes(SECRET_BYTES)
            if getattr(self.roster.promise(secret, secret), part) == getattr(promise, part):
                for x in shares.keys() - some.keys():
                    giver = givers[x - 1]
                    if (tried or giver in self.conflicts) and _value(some, x) != shares[x]:
                        self.conflicts.setdefault(giver, set()).add(client)
                return secret
        owner, *named = (self.names.get(k, k) for k in (client, *(givers[x - 1] for x in shares)))
        raise SealError(
            f"shares of client {owner}'s secret are not of what it promised: it, or more than "
            f"{(len(shares) - threshold) // 2} of {named}, does not follow the protocol"
        )


def _sets(shares: Mapping[int, int], ordered: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield points whose shares may all be right: the first; what decoding leaves; any others."""
    yield ordered[:size]
    for count in range(len(ordered), size, -1):
        wrong = _wrong_points({x: shares[x] for x in ordered[:count]}, size)
        yield [x for x in ordered[:count] if x not in wrong][:size]
    most = min(MOST_SETS, MOST_PRODUCTS // size**2)
    yield from itertools.islice(itertools.combinations(ordered, size), most)


def _multiply(a: int, b: int) -> int:
    product = 0
    while b:
        if b & 1:
            product ^= a
        b >>= 1
        a <<= 1
        if a >> 128:
            a ^= MODULUS
    return product


def _inverse(a: int) -> int:
    """Return 1 / a in GF(2^128), by Euclid's algorithm for polynomials."""
    b, of_a, of_b = MODULUS, 1, 0
    while a != 1:
        if a < b:
            a, b, of_a, of_b = b, a, of_b, of_a
        shift = a.bit_length() - b.bit_length()
        a ^= b << shift
        of_a ^= of_b << shift
    return of_a


@lru_cache
def _coefficients(points: tuple[int, ...], at: int = 0) -> tuple[int, ...]:
    """Return Lagrange's coefficients of a polynomial's values at `points` for its value at `at`."""
    coefficients = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = _multiply(above, at ^ other), _multiply(below, x ^ other)
        coefficients.append(_multiply(above, _inverse(below)))
    return tuple(coefficients)


def _value(shares: Mapping[int, int], at: int = 0) -> int:
    """Return the value of the polynomial through Shamir's shares; at 0 it is the secret."""
    return reduce(xor, map(_multiply, shares.values(), _coefficients(tuple(shares), at)))


def _wrong_points(shares: Mapping[int, int], threshold: int) -> set[int]:
    """Return where (m - threshold) / 2 or fewer of m shares are wrong: Massey 1969, decoding."""
    terms, syndromes = list(map(_multiply, shares.values(), _coefficients(tuple(shares)))), []
    locator, before, length, scale = [1], [0, 1], 0, 1
    for n in range(len(shares) - threshold):
        terms = list(map(_multiply, terms, shares))
        syndromes.append(reduce(xor, terms))
        error = reduce(xor, map(_multiply, locator, reversed(syndromes)))
        step = _multiply(error, _inverse(scale))
        pairs = itertools.zip_longest(locator, before, fillvalue=0)
        longer = [a ^ _multiply(b, step) for a, b in pairs]
        if error and 2 * length <= n:
            before, length, scale = locator, n + 1 - length, error
        locator, before = longer, [0, *before]
    return {x for x in shares if not reduce(lambda value, c: _multiply(value, x) ^ c, locator, 0)}


def _add_stream(words: Words, key: bytes, sign: int) -> None:
    stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        mask = np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype)
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)
