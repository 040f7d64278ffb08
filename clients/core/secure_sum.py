"""A client's part in a sum with only the total in the clear: see fedntk.trust.secure_sum.

Four exchanges follow that of the public keys: shares of the client's secrets for the others; its
masked words; which clients' words it was told have arrived; and its shares of the others' secrets,
which open the sum. Between them its secrets are in a file that only the client's user can read; it
goes with the last exchange. Two others give a sum up. It works on one message of a sum at a time.
"""

import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedntk.ntk.payloads import wire
from fedntk.ntk.support.files import claimed, whole_path
from fedntk.trust import Masker, ParcelKeys, Roster, SealError, load_key, new_key, save_key
from fedntk.trust.sealing import write_secret
from fedntk.trust.secure_sum import EXCHANGE_BYTES, FEWEST, PARCEL_BYTES, TAG_BYTES, exchange_of

from .disk_store import make_folder

NONCE = "sum-nonce"  # file of the nonce for the next sum
Arrays = Mapping[str, NDArray[Any]]


class SecureSum:
    """What a client answers in the exchanges of a secure sum; SealError if it refuses.

    The `folder`, which exists, keeps its secrets between exchanges. It takes part only in sums that
    open with `fewest` clients or more. Of those who give one up, so many may be `malicious`.
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
        """Return the promise (2, 32) and the parcels for the roster's clients (K, 92).

        The roster has to hold vouched keys, and this client's newest nonce, unused.
        """
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
            masker = Masker(agreed, clients[place])
            parcels = masker.parcels(self._keys.private_key)
            path.unlink()  # so that it takes part once with it
            for stale in self._folder.glob("sum-*"):
                stale.unlink(missing_ok=True)
            self._save(masker)
            promise = masker.promise
            return {
                wire.PROMISE: _as_rows([promise.mask_key, promise.commitment]),
                wire.PARCELS: _as_rows([parcels.get(k, bytes(PARCEL_BYTES)) for k in clients]),
            }

    def mask(self, parcels: Arrays, words: NDArray[Any], about: bytes) -> NDArray[Any]:
        """Return words (m,), uint32 or uint64, with masks shared with the senders of `parcels`.

        `about` is the subject of the words; the sum opens only if all clients have the same.
        """
        with claimed(self._folder, "sum"):
            masker = self._load(parcels)
            if len(masker.received) > 1:
                raise SealError("this client has masked its numbers for this sum already")
            sealed = _by_client(parcels, wire.PARCELS)
            sealed.pop(masker.client, None)
            masker.receive(self._keys.private_key, sealed)
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
            masker = self._load(arrived)
            key, clients = self._keys.private_key, arrived[wire.CLIENTS].tolist()
            tags = masker.confirm(key, clients) if clients else masker.void(key)
            self._save(masker)
        none = bytes(TAG_BYTES)
        return {wire.TAGS: _as_rows([tags.get(client, none) for client in masker.roster.clients])}

    def reveal(self, confirmed: Arrays) -> dict[str, NDArray[Any]]:
        """Return this client's shares (m, 16), and which clients' secrets they share (m,); once."""
        with claimed(self._folder, "sum"):
            masker = self._load(confirmed)
            shares = masker.reveal(self._keys.private_key, _by_client(confirmed, wire.TAGS))
            self._path(masker.roster.exchange).unlink()  # with other clients it gives none
            return {
                wire.CLIENTS: np.array(list(shares), np.int64),
                wire.SHARES: _as_rows(shares.values()),
            }

    def free(self, given_up: Arrays) -> dict[str, NDArray[Any]]:
        """Refuse unless the tags show that the sum never opens: see Masker.require_void."""
        masker, tags = self._load(given_up), _by_client(given_up, wire.TAGS)
        masker.require_void(self._keys.private_key, tags, self._malicious)
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
        return Masker.from_bytes(path.read_bytes())


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


def _as_rows(parts: Collection[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)
