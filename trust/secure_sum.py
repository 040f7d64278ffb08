"""A sum of the clients' whole numbers, of which the server learns nothing else; without Flower.

Source: Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS
2017, figure 4. Client u adds masks to its words x_u, modulo 2^32 or 2^64:

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv),

with s_uv agreed on by u and v (X25519 of mask keys that are drawn for one sum) and b_u its own. In
the sum of all y_u the s_uv cancel. The other clients hold Shamir shares of b_u and of u's mask key.
They give those of b_u where y_u came, and those of the mask key where it did not; never both.

Here shares and mask keys travel encrypted under a key that two clients agree on by their public
keys. The server, which hands them on, can read neither, nor put others in their place, unless it
passed off a public key of its own as a client's. All keys depend on nonces that the clients draw
for the sum, and the s_uv also on what the words are of. So a server can open what clients sent for
a sum only once, and only if all were asked for the same thing. It can begin another sum of the same
words: of two sums over different clients it learns the difference. Before they give shares, clients
compare what they were told of who dropped out: that is round 3 of the figure, with tags of keyed
BLAKE2b in place of signatures. PRG is ChaCha20, keys are derived by HKDF-SHA256, and shares are
pycryptodome's, over GF(2^128).

What holds against whom: see the page on privacy. A client that does not follow the protocol can
spoil the sum. It learns nothing of the others.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from .sealing import KEY_BYTES, SealError, frame, public_bytes, unframe

__all__ = [
    "EXCHANGE_BYTES",
    "FEWEST",
    "PARCEL_BYTES",
    "SECRET_BYTES",
    "TAG_BYTES",
    "MaskedSum",
    "Masker",
    "Promise",
    "Roster",
    "exchange_of",
]

FEWEST = 3  # clients of a sum: of two each would learn the other's
SECRET_BYTES = 16  # a secret, and a share of it: numbers of GF(2^128)
PARCEL_BYTES = 92  # nonce 12, mask key 32, two shares, tag 16
TAG_BYTES = 16  # of a client's word to another on who is in the sum
NONCE_BYTES = 12
EXCHANGE_BYTES = 16  # of a sum's name, and of what each client draws for it
CHUNK = 2**20  # words that are masked at a time
Words = NDArray[np.uint32] | NDArray[np.uint64]


def exchange_of(nonces: Iterable[bytes]) -> bytes:
    """Return the name of a sum, 16 bytes, of what its clients drew for it.

    A client that draws a nonce for each sum, and takes part with it once, is in no sum of an
    earlier one's name: what was sealed for that opens no more.

    Parameters
    ----------
    nonces : iterable of bytes
        16 bytes of each client, in the roster's order.
    """
    text = b"fedntk secure sum 1 exchange\0" + frame(nonces)
    return hashlib.sha256(text).digest()[:EXCHANGE_BYTES]


@dataclass(frozen=True)
class Roster:
    """Who takes part in a sum: what all clients must agree on, as their keys depend on it.

    Attributes
    ----------
    exchange : bytes
        Names the sum, 16 bytes; see :func:`exchange_of`.
    clients : tuple of int
        Ids, ascending.
    keys : tuple of bytes
        Their public keys, 32 raw bytes each.
    threshold : int
        How many clients must give shares so that the sum can be opened, and be in it; more than
        half of them, and three at least.

    Raises
    ------
    SealError
        If there are fewer than three clients, or two of one id or key; or if the threshold is not
        above half of their number, three at least, and at most that.
    """

    exchange: bytes
    clients: tuple[int, ...]
    keys: tuple[bytes, ...]
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
        """Checksum of all of it, 32 bytes."""
        numbers = f"{self.threshold} {self.clients}".encode()
        return hashlib.sha256(frame([self.exchange, numbers, *self.keys])).digest()

    def position(self, client: int) -> int:
        """Return a client's place, from 0; SealError if it is none of these."""
        if client not in self.clients:
            raise SealError(f"client {client} takes no part in this sum")
        return self.clients.index(client)

    def derived(self, secret: bytes, purpose: str) -> bytes:
        """Return a key of 32 bytes for this sum alone."""
        info = f"fedntk secure sum 1 {purpose}\0".encode() + self.digest
        return HKDF(SHA256(), 32, salt=None, info=info).derive(secret)

    def mask_key(self, seed: bytes) -> X25519PrivateKey:
        """Return the private mask key that a client's seed stands for."""
        return X25519PrivateKey.from_private_bytes(self.derived(seed, "mask key"))

    def commitment(self, own: bytes) -> bytes:
        """Return what a client says of b_u beforehand, 32 bytes, from which it cannot be found."""
        return hashlib.sha256(b"fedntk secure sum 1 own mask\0" + self.digest + own).digest()

    def add_own_mask(self, words: Words, own: bytes, sign: int) -> None:
        """Add PRG(b_u), or take it away, in place."""
        _add_stream(words, self.derived(own, "own mask"), sign)

    def add_pair_mask(
        self,
        words: Words,
        client: int,
        key: X25519PrivateKey,
        other: int,
        other_key: bytes,
        about: bytes,
    ) -> None:
        """Add what a client's words have of the mask with another one: + or - PRG(s_uv)."""
        seed = self.derived(_agreed(key, other_key), f"pair {about.hex()}")
        _add_stream(words, seed, 1 if client < other else -1)


@dataclass(frozen=True)
class Promise:
    """What a client tells the server before its words, by which shares are known to be right.

    Attributes
    ----------
    mask_key : bytes
        Public mask key, 32 raw bytes.
    commitment : bytes
        To b_u, 32 bytes.
    """

    mask_key: bytes
    commitment: bytes


@dataclass
class Masker:
    """A client's part in one sum.

    Parameters
    ----------
    roster : Roster
        Who takes part.
    client : int
        Who this is.

    Attributes
    ----------
    seed, own : bytes
        What the mask key comes of, and b_u: 16 bytes each.
    shares : dict of int to tuple of bytes and bytes
        Client -> this client's shares of that one's `seed` and `own`. Those of whom there are any
        are the clients whose masks are in the words.
    arrived : tuple of int
        Whose words are in the sum, as this client was told and told the others; empty before.

    Raises
    ------
    SealError
        If the client is none of the roster's.

    Examples
    --------
    Four clients add up; the last one's words never arrive.

    >>> from fedntk.trust import new_key
    >>> keys = [new_key() for _ in range(4)]
    >>> roster = Roster(bytes(16), (0, 1, 2, 3), tuple(public_bytes(key) for key in keys), 3)
    >>> maskers = [Masker(roster, k) for k in range(4)]
    >>> parcels = [masker.parcels(key) for masker, key in zip(maskers, keys)]
    >>> for k, masker in enumerate(maskers):
    ...     masker.receive(keys[k], {j: parcels[j][k] for j in range(4) if j != k})
    >>> words = [masker.masked(np.array([10, -k]).astype(np.uint32))
    ...          for k, masker in enumerate(maskers)]
    >>> total = MaskedSum(roster, {k: masker.promise for k, masker in enumerate(maskers)})
    >>> left = [0, 1, 2]
    >>> tags = [maskers[k].confirm(keys[k], left) for k in left]
    >>> given = {k: maskers[k].reveal(keys[k], {j: tags[j][k] for j in left if j != k})
    ...          for k in left}
    >>> total.opened(words[0] + words[1] + words[2], left, given).view(np.int32)
    array([30, -3], dtype=int32)
    """

    roster: Roster
    client: int
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    own: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _mask_keys: dict[int, bytes] = field(default_factory=dict, repr=False)
    arrived: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.roster.position(self.client)

    @property
    def promise(self) -> Promise:
        """What the server is told."""
        public = public_bytes(self.roster.mask_key(self.seed))
        return Promise(public, self.roster.commitment(self.own))

    def parcels(self, private_key: X25519PrivateKey) -> dict[int, bytes]:
        """Return what each other client is sent, 92 bytes: mask key and shares of both secrets.

        Raises
        ------
        SealError
            If the roster has another public key for this client, or a key that is none.
        """
        roster, mask_key = self.roster, self.promise.mask_key
        if roster.keys[roster.position(self.client)] != public_bytes(private_key):
            raise SealError("the server has another public key of this client")
        count = len(roster.clients)
        of_seeds, of_owns = (
            Shamir.split(roster.threshold, count, secret, ssss=False)
            for secret in (self.seed, self.own)
        )
        parcels: dict[int, bytes] = {}
        for other, (_, of_seed), (_, of_own) in zip(roster.clients, of_seeds, of_owns, strict=True):
            if other == self.client:
                self.shares[other] = (of_seed, of_own)
                continue
            nonce = secrets.token_bytes(NONCE_BYTES)
            key, info = self._channel(private_key, other, sends=True)
            sealed = ChaCha20Poly1305(key).encrypt(nonce, mask_key + of_seed + of_own, info)
            parcels[other] = nonce + sealed
        return parcels

    def receive(self, private_key: X25519PrivateKey, parcels: Mapping[int, bytes]) -> None:
        """Take the other clients' parcels; whose came has its mask in this client's words.

        Raises
        ------
        SealError
            If one does not open, or they and this client are fewer than the threshold.
        """
        if len(parcels) + 1 < self.roster.threshold:
            raise SealError(
                f"{len(parcels) + 1} clients are left, fewer than the {self.roster.threshold} who "
                "are needed to open the sum"
            )
        for sender, parcel in parcels.items():
            key, info = self._channel(private_key, sender, sends=False)
            try:
                plain = ChaCha20Poly1305(key).decrypt(
                    parcel[:NONCE_BYTES], parcel[NONCE_BYTES:], info
                )
            except (InvalidTag, ValueError):
                raise SealError(
                    f"what client {sender} sent does not open: it is damaged, or of another sum"
                ) from None
            if len(parcel) != PARCEL_BYTES:
                raise SealError(f"client {sender}: expected {PARCEL_BYTES} bytes of shares")
            self._mask_keys[sender] = plain[:KEY_BYTES]
            start = KEY_BYTES + SECRET_BYTES
            self.shares[sender] = (plain[KEY_BYTES:start], plain[start:])

    def masked(self, words: Words, about: bytes = b"") -> Words:
        """Return the client's words with its masks, modulo 2^32 or 2^64.

        Parameters
        ----------
        words : ndarray of uint32 or uint64, shape (m,)
            Whole numbers, negative ones modulo the same.
        about : bytes
            What the words are of. Masks of two clients who were asked about different things do
            not cancel.
        """
        result = words.copy()
        self.roster.add_own_mask(result, self.own, 1)
        key = self.roster.mask_key(self.seed)
        for other, public in self._mask_keys.items():
            self.roster.add_pair_mask(result, self.client, key, other, public, about)
        return result

    def confirm(self, private_key: X25519PrivateKey, arrived: Iterable[int]) -> dict[int, bytes]:
        """Return tags, 16 bytes, that tell each other client of `arrived` who is in the sum.

        Parameters
        ----------
        private_key : X25519PrivateKey
            This client's.
        arrived : iterable of int
            Clients whose words are in the sum.

        Raises
        ------
        SealError
            If this client is not among them, or one whose mask this client does not have, or they
            are fewer than the threshold; or if it has confirmed others before.
        """
        survivors = set(arrived)
        if self.client not in survivors or survivors - self.shares.keys():
            raise SealError("expected clients of this sum, this one among them")
        if len(survivors) < self.roster.threshold:
            raise SealError(
                f"{len(survivors)} clients' words arrived, fewer than the "
                f"{self.roster.threshold} who were agreed on: the sum stays closed"
            )
        if self.arrived and survivors != set(self.arrived):
            raise SealError("this client has confirmed others as those of the sum before")
        self.arrived = tuple(sorted(survivors))
        return {v: self._tag(private_key, v, sends=True) for v in self.arrived if v != self.client}

    def reveal(self, private_key: X25519PrivateKey, tags: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return shares of b_v of the clients whose words arrived, of the others' mask keys' seeds.

        As more than half of the clients confirm the same to each client that gives shares, and each
        confirms once, all that is given is for one set of clients.

        Parameters
        ----------
        private_key : X25519PrivateKey
            This client's.
        tags : mapping of int to bytes
            Client -> what it confirmed to this one.

        Raises
        ------
        SealError
            If fewer clients than the threshold, this one counted, confirmed what this one did.
        """
        agreeing = [
            v
            for v, tag in tags.items()
            if v in self.arrived
            and v != self.client
            and hmac.compare_digest(tag, self._tag(private_key, v, sends=False))
        ]
        if not self.arrived or len(agreeing) + 1 < self.roster.threshold:
            raise SealError(
                f"{len(agreeing) + bool(self.arrived)} clients were told the same of who is in the "
                f"sum, fewer than the {self.roster.threshold} who were agreed on: it stays closed"
            )
        return {v: both[v in self.arrived] for v, both in sorted(self.shares.items())}

    def _tag(self, private_key: X25519PrivateKey, other: int, *, sends: bool) -> bytes:
        """Return what one client says to another of who is in the sum."""
        key, _ = self._channel(private_key, other, sends=sends, what="tag")
        text = np.array(self.arrived, np.int64).tobytes()
        return hashlib.blake2b(text, digest_size=TAG_BYTES, key=key).digest()

    def _channel(
        self, private_key: X25519PrivateKey, other: int, *, sends: bool, what: str = "parcel"
    ) -> tuple[bytes, bytes]:
        """Return the key for what one client sends another in this sum, and what it is bound to."""
        pair = (self.client, other) if sends else (other, self.client)
        secret = _agreed(private_key, self.roster.keys[self.roster.position(other)])
        purpose = f"{what} from {pair[0]} to {pair[1]}"
        return self.roster.derived(secret, purpose), purpose.encode()

    # -------------------------------------------------- between two exchanges

    def to_bytes(self) -> bytes:
        """Return all of it, the secrets among it, to be kept where only the client reads it."""
        roster = self.roster
        numbers = [roster.threshold, self.client, len(roster.clients), *roster.clients]
        numbers += [len(self._mask_keys), *self._mask_keys, len(self.shares), *self.shares]
        numbers += [len(self.arrived), *self.arrived]
        return frame(
            [
                np.array(numbers, np.int64).tobytes(),
                roster.exchange,
                self.seed,
                self.own,
                *roster.keys,
                *self._mask_keys.values(),
                *(share for both in self.shares.values() for share in both),
            ]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what :meth:`to_bytes` returned."""
        numbers, exchange, seed, own, *rest = unframe(data)
        threshold, client, *more = np.frombuffer(numbers, np.int64).tolist()
        lists: list[list[int]] = []
        while more:
            count = 1 + more[0]
            lists.append(more[1:count])
            more = more[count:]
        clients, senders, sharers, arrived = lists
        keys, rest = rest[: len(clients)], rest[len(clients) :]
        mask_keys, rest = rest[: len(senders)], rest[len(senders) :]
        shares = dict(zip(sharers, zip(rest[::2], rest[1::2], strict=True), strict=True))
        roster = Roster(exchange, tuple(clients), tuple(keys), threshold)
        received = dict(zip(senders, mask_keys, strict=True))
        return cls(roster, client, seed, own, shares, received, tuple(arrived))


@dataclass(frozen=True)
class MaskedSum:
    """The server's part: it opens the sum of words, and no words of one client.

    Parameters
    ----------
    roster : Roster
        Who takes part.
    promises : mapping of int to Promise
        Of the clients whose parcels were handed on: their masks are in the others' words.
    about : bytes
        What the words are of, as :meth:`Masker.masked` was told.
    """

    roster: Roster
    promises: Mapping[int, Promise]
    about: bytes = b""

    def opened(
        self, total: Words, arrived: Iterable[int], revealed: Mapping[int, Mapping[int, bytes]]
    ) -> Words:
        """Return the sum of the clients' words without masks.

        Parameters
        ----------
        total : ndarray of uint32 or uint64, shape (m,)
            Sum of the masked words that arrived.
        arrived : iterable of int
            Whose these are.
        revealed : mapping of int to mapping of int to bytes
            Client -> its shares, by whose secret they are of: see :meth:`Masker.reveal`.

        Raises
        ------
        SealError
            If fewer clients gave shares than the threshold, or the shares are not of the secrets.
        """
        survivors = sorted(arrived)
        result = total.copy()
        good: list[int] = []
        for client, promise in self.promises.items():
            given = {
                self.roster.position(k) + 1: shares[client]
                for k, shares in revealed.items()
                if client in shares
            }
            if client in survivors:
                own = self._secret(given, client, self._commits_to(promise), good)
                self.roster.add_own_mask(result, own, -1)
                continue
            key = self.roster.mask_key(self._secret(given, client, self._makes(promise), good))
            for other in survivors:  # whose words have the mask with the client that is missing
                public = self.promises[other].mask_key
                self.roster.add_pair_mask(result, client, key, other, public, self.about)
        return result

    def _commits_to(self, promise: Promise) -> Callable[[bytes], bool]:
        return lambda own: self.roster.commitment(own) == promise.commitment

    def _makes(self, promise: Promise) -> Callable[[bytes], bool]:
        return lambda seed: public_bytes(self.roster.mask_key(seed)) == promise.mask_key

    def _secret(
        self,
        given: Mapping[int, bytes],
        client: int,
        is_right: Callable[[bytes], bool],
        good: list[int],
    ) -> bytes:
        """Return a client's secret from shares, some of which may be wrong.

        Those who gave right ones before, `good`, are tried first, and noted.
        """
        shares = sorted(given.items(), key=lambda own: (own[0] not in good, own[0]))
        threshold = self.roster.threshold
        if len(shares) < threshold:
            raise SealError(
                f"{len(shares)} clients gave shares, {threshold} are needed to open the sum"
            )
        for start in range(len(shares) if len(shares) > threshold else 1):
            some = [shares[(start + i) % len(shares)] for i in range(threshold)]
            secret: bytes = Shamir.combine(some, ssss=False)
            if is_right(secret):
                good[:] = [i for i, _ in some]
                return secret
        raise SealError(
            f"shares of client {client}'s secret are not of what it promised: it, or one of "
            f"{[self.roster.clients[i - 1] for i in given]}, does not follow the protocol"
        )


def _agreed(private_key: X25519PrivateKey, public_key: bytes) -> bytes:
    """Return what the owners of two keys can both compute, and nobody else."""
    try:
        return private_key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        raise SealError("expected an X25519 public key of full order") from None


def _add_stream(words: Words, key: bytes, sign: int) -> None:
    """Add pseudo-random words, or take them away, in place."""
    stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        mask = np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype)
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)
