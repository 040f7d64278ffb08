"""A client's part in a sum with only the total in the clear: see fedntk.trust.secure_sum.

Four exchanges follow that of the public keys: shares of the client's secrets for the others; its
masked words; which clients' words it was told have arrived; and its shares of the others' secrets,
which open the sum. Between them its secrets are in a file that only the client's user can read; it
goes with the last exchange. Two others give a sum up. It works on one message of a sum at a time.

The difference of two sums over different clients is what one client sent, whatever the masks. So a
client remembers, in its owner's ledger, what it has given sums of, and gives a second one only if
the owner allows it.
"""

import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedntk.ntk.options import Declared, argument
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.feature_statistics import SECURE_STEPS
from fedntk.ntk.support.arrays import byte_rows
from fedntk.ntk.support.files import claimed, whole_path
from fedntk.trust import Masker, ParcelKeys, Roster, SealError, load_key, new_key, save_key
from fedntk.trust.sealing import write_secret
from fedntk.trust.secure_sum import EXCHANGE_BYTES, FEWEST, PARCEL_BYTES, TAG_BYTES, exchange_of

from .disk_store import client_folder, make_folder
from .privacy_ledger import NEW, PrivacyLimits, Release

NONCE = "sum-nonce"  # file of the nonce for the next sum
Arrays = Mapping[str, NDArray[Any]]


class SecureSum:
    """A client's answers in a secure sum, with secrets in a folder; SealError if it refuses.

    It takes part only in sums that open with `fewest` clients or more. Of those who give one up, so
    many may be `malicious`.
    """

    def __init__(self, folder: Path, keys: ParcelKeys, fewest: int = FEWEST, malicious: int = 1):
        self._folder, self._keys, self._fewest, self._malicious = folder, keys, fewest, malicious

    def public_key(self) -> dict[str, NDArray[np.uint8]]:
        """Return the public key (32,) and a nonce (16,) for one sum; earlier nonces are void."""
        nonce = secrets.token_bytes(EXCHANGE_BYTES)
        with whole_path(self._folder / NONCE) as partial:
            write_secret(partial, nonce)
        parts = {wire.PUBLIC_KEY: self._keys.public_key, wire.NONCE: nonce}
        return {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}

    def shares(self, roster: Arrays) -> dict[str, NDArray[np.uint8]]:
        """Return promise (2, 32) and parcels (K, 92) for vouched keys and an unused nonce."""
        with claimed(self._folder, "sum"):
            keys = tuple(row.tobytes() for row in roster[wire.KEYS])
            for key, voucher in zip(keys, roster[wire.VOUCHERS], strict=True):
                self._keys.require_vouched(key, voucher.tobytes())
            clients = tuple(roster[wire.CLIENTS].tolist())
            nonces = tuple(row.tobytes() for row in roster[wire.NONCES])
            agreed = Roster(exchange_of(nonces), clients, keys, int(roster[wire.THRESHOLD]))
            if agreed.threshold < self._fewest:
                raise SealError(
                    f"fewest_clients: expected a sum that opens only with {self._fewest} clients "
                    f"or more, got one that opens with {agreed.threshold} of {len(clients)}; ask "
                    "more clients, or raise secure.threshold"
                )
            if self._keys.public_key not in keys:
                raise SealError("the server has another public key of this client")
            place, path = keys.index(self._keys.public_key), self._folder / NONCE
            if not path.exists() or path.read_bytes() != nonces[place]:
                raise SealError("this client drew another nonce; ask for its public key once more")
            masker = Masker(agreed, clients[place], self._keys.private_key)
            parcels = masker.parcels()
            path.unlink()  # so that it takes part once with it
            for stale in self._folder.glob("sum-*"):
                stale.unlink(missing_ok=True)
            self._save(masker)
            promise = masker.promise
            return {
                wire.PROMISE: byte_rows([promise.mask_key, promise.commitment]),
                wire.PARCELS: byte_rows([parcels.get(k, bytes(PARCEL_BYTES)) for k in clients]),
            }

    def mask(self, parcels: Arrays, words: NDArray[Any], about: bytes) -> NDArray[Any]:
        """Return words (m,), uint32 or uint64, under masks; `about` is their subject."""
        with claimed(self._folder, "sum"):
            masker = self._load(parcels)
            if len(masker.received) > 1:
                raise SealError("this client has masked its numbers for this sum already")
            sealed = _by_client(parcels, wire.PARCELS)
            sealed.pop(masker.client, None)
            masker.receive(sealed)
            self._save(masker)
            return masker.mask(words, about)

    def quorum(self, parcels: Arrays) -> int:
        """Return the fewest clients with whom the sum opens, as agreed on with the shares."""
        return self._load(parcels).roster.threshold

    def name(self, message: Arrays) -> str:
        """Name this client's part in a sum: by all that was agreed on, and its place in that."""
        masker = self._load(message)
        return f"{masker.roster.digest.hex()}-{masker.client}"

    def confirm(self, arrived: Arrays) -> dict[str, NDArray[np.uint8]]:
        """Return tags for the roster's clients (K, 16) that show who arrived; none: it gives up."""
        with claimed(self._folder, "sum"):
            masker, clients = self._load(arrived), arrived[wire.CLIENTS].tolist()
            tags = masker.confirm(clients) if clients else masker.void()
            self._save(masker)
        none = bytes(TAG_BYTES)
        return {wire.TAGS: byte_rows([tags.get(client, none) for client in masker.roster.clients])}

    def reveal(self, confirmed: Arrays) -> dict[str, NDArray[Any]]:
        """Return this client's shares (m, 16), and which clients' secrets they share (m,); once."""
        with claimed(self._folder, "sum"):
            masker = self._load(confirmed)
            shares = masker.reveal(_by_client(confirmed, wire.TAGS))
            self._path(masker.roster.exchange).unlink()  # with other clients it gives none
            return {
                wire.CLIENTS: np.array(list(shares), np.int64),
                wire.SHARES: byte_rows(shares.values()),
            }

    def free(self, given_up: Arrays) -> dict[str, NDArray[Any]]:
        """Refuse unless the tags show that the sum never opens: see Masker.require_void."""
        self._load(given_up).require_void(_by_client(given_up, wire.TAGS), self._malicious)
        return {}

    def _path(self, exchange: bytes) -> Path:
        return self._folder / f"sum-{exchange.hex()}"

    def _save(self, masker: Masker) -> None:
        with whole_path(self._path(masker.roster.exchange)) as partial:
            write_secret(partial, masker.to_bytes())

    def _load(self, message: Arrays) -> Masker:
        path = self._path(message[wire.EXCHANGE].tobytes())
        if not path.exists():
            raise SealError("this client does not know of the sum, or has given its shares before")
        return Masker.from_bytes(path.read_bytes(), self._keys.private_key)


def load_or_draw_key(folder: Path) -> X25519PrivateKey:
    """Return the private key in a client's folder; the first call draws it."""
    path = folder / "key.pem"
    if not path.exists():
        make_folder(folder)
        with whole_path(path) as partial:
            save_key(new_key(), partial)
    os.utime(folder)  # the time of its last use
    return load_key(path)


def _by_client(message: Arrays, name: str) -> dict[int, bytes]:
    rows = zip(message[wire.CLIENTS].tolist(), message[name], strict=True)
    return {client: row.tobytes() for client, row in rows}


class SumRequest(NamedTuple):
    """What a message asks of one client of a sum."""

    task: Any  # what the server asks for; its `run_key` names the run
    client: str  # names the client's folder
    release: Release  # what the sum would give away
    examples: Any = None  # (n, ...), whose sum it is; None: all of the owner's


class MaskedSums(Declared, frozen=True):
    """A client's part in secure sums: see :mod:`fedntk.clients.core.secure_sum`."""

    cache: Path | str | None = argument(
        "folder for secrets; by default fedntk/sums in $XDG_CACHE_HOME or ~/.cache", default=None
    )
    parcel_keys: ParcelKeys | None = argument(
        "key pair, and who vouches for others' keys; by default it draws one for the run",
        default=None,
    )
    only_masked: bool = argument(
        "whether the client sends nothing about its features except masked sums: no other sums, "
        "moments, counts or features, and no model from which they could be computed. Nor does it "
        "evaluate such models on its training examples, or give a second sum: see allow_repeats",
        default=False,
    )
    allow_repeats: bool | None = argument(
        "whether the client gives a second exact sum over its examples, in whatever run, or of its "
        "weights in one round: the difference of two sums over different clients is what one sent. "
        "None: unless it has only_masked or privacy. False: not even a first one without privacy",
        default=None,
    )
    privacy: PrivacyLimits | None = argument(
        "what the owner of its data allows, and the ledger of what they gave; None: the client "
        "remembers nothing, so it refuses sums unless it may repeat them",
        default=None,
    )

    @property
    def is_private(self) -> bool:
        """Whether the client promises to send only masked sums, or sums with noise."""
        return self.only_masked or self.privacy is not None

    def require_masked(
        self, step: str, permitted: Collection[str] = SECURE_STEPS, *, noisy: bool = False
    ) -> None:
        """Refuse a step that is none of a secure sum, nor noisy, if the client promises that."""
        if step not in permitted and (self.only_masked or (self.privacy is not None and not noisy)):
            raise ValueError(
                f"this client sends only masked sums, and was asked for {step}; give the strategy "
                "secure, or make the client without only_masked, and privacy if there is no noise"
            )

    def reserve(self, request: SumRequest, exchange: str = "") -> None:
        """Put a sum into the ledger, or, without an exchange, ask for it; ValueError if refused."""
        repeats = not self.is_private if self.allow_repeats is None else self.allow_repeats
        release = request.release._replace(exchange=exchange)
        if self.privacy is not None:
            self.privacy.reserve(release, request.task, request.examples, repeats=repeats)
        elif not repeats:
            raise ValueError(
                "privacy: a ledger of the data's owner remembers sums, and this client has none; "
                f"make one with {NEW}, if the data gave nothing before, and set privacy-ledger in "
                "the node config, or PrivacyLimits(ledger=PATH); simulations set allow_repeats"
            )

    def answers(self, step: str) -> bool:
        """Whether the step is one before or after the numbers themselves."""
        return step in SECURE_STEPS and step != "masked"

    def answer(self, step: str, request: SumRequest, message: Arrays) -> Arrays:
        """Answer such a step of a sum; `message` is its record ``secure-sum``."""
        if step in ("public-key", "shares"):
            self.reserve(request)
        secure_sum = self.secure_sum(request)
        if step == "public-key":
            return secure_sum.public_key()
        if step == "shares":
            return secure_sum.shares(message)
        if step in ("confirm", "void"):
            return secure_sum.confirm(message)
        name, opened = secure_sum.name(message), step == "reveal"
        reply = secure_sum.reveal(message) if opened else secure_sum.free(message)
        if self.privacy is not None:
            self.privacy.settle(name, opened=opened)
        return reply

    def mask(
        self, words: NDArray[Any], about: bytes, request: SumRequest, message: Arrays
    ) -> Arrays:
        """Return masked words, once the ledger says that the client gives a sum of them."""
        secure_sum = self.secure_sum(request)
        masked = secure_sum.mask(message, words, about)
        self.reserve(request, secure_sum.name(message))
        return {wire.MASKED: masked}

    def secure_sum(self, request: SumRequest) -> SecureSum:
        """Return the client's part in the sums of a run."""
        client = f"{request.client}-secure"
        folder = make_folder(client_folder(self.cache, "sums", request.task.run_key, client))
        keys = self.parcel_keys or ParcelKeys(load_or_draw_key(folder))
        if self.privacy is None:
            return SecureSum(folder, keys)
        return SecureSum(folder, keys, self.privacy.fewest_clients, self.privacy.malicious)
