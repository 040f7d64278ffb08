"""A client's part in a sum of which the server learns the sum alone: see fedntk.trust.secure_sum.

Four exchanges after the public keys are known: shares of the client's secrets for the others; its
words, masked; whose words it was told to have arrived; and its shares of the others' secrets, by
which the sum is opened. Between them it keeps its secrets in a file that its owner alone can read,
which goes with the last one. It answers one message of a sum at a time.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.support.files import claimed, whole_path
from fedntk.trust import Masker, ParcelKeys, Roster, SealError
from fedntk.trust.sealing import write_secret
from fedntk.trust.secure_sum import EXCHANGE_BYTES, PARCEL_BYTES, TAG_BYTES, exchange_of

__all__ = ["SecureSum"]

NONCE = "sum-nonce"  # file of what is drawn for the next sum
Arrays = Mapping[str, NDArray[Any]]


class SecureSum:
    """What a client answers in the exchanges of a secure sum.

    Parameters
    ----------
    folder : Path
        Where it keeps its secrets from one exchange to the next; there already.
    keys : ParcelKeys
        Its key pair, and who is to vouch for the others' public keys.
    """

    def __init__(self, folder: Path, keys: ParcelKeys) -> None:
        self._folder, self._keys = folder, keys

    def public_key(self) -> dict[str, NDArray[np.uint8]]:
        """Return the public key (32,) and a nonce (16,), with which it takes part in one sum.

        A nonce that was drawn before, and not used, serves no more.
        """
        nonce = secrets.token_bytes(EXCHANGE_BYTES)
        with whole_path(self._folder / NONCE) as partial:
            write_secret(partial, nonce)
        own = {"public-key": self._keys.public_key, "nonce": nonce}
        return {name: np.frombuffer(part, np.uint8) for name, part in own.items()}

    def shares(self, roster: Arrays) -> dict[str, NDArray[np.uint8]]:
        """Return the promise (2, 32) and the parcels for the roster's clients (K, 92).

        Raises
        ------
        SealError
            If it is no roster of a secure sum with this client, or a key is not vouched for; or if
            it is not with the nonce that this client drew last, or that was for another sum.
        BlockingIOError
            As the others: if the client is at work on another message of a sum.
        """
        with claimed(self._folder, "sum"):
            keys = tuple(row.tobytes() for row in roster["keys"])
            for key, voucher in zip(keys, roster["vouchers"], strict=True):
                self._keys.require_vouched(key, voucher.tobytes())
            clients = tuple(roster["clients"].tolist())
            nonces = tuple(row.tobytes() for row in roster["nonces"])
            own = Roster(exchange_of(nonces), clients, keys, int(roster["threshold"]))
            if self._keys.public_key not in keys:
                raise SealError("the server has another public key of this client")
            place, path = keys.index(self._keys.public_key), self._folder / NONCE
            if not path.exists() or path.read_bytes() != nonces[place]:
                raise SealError("this client drew another nonce; ask for its public key once more")
            masker = Masker(own, clients[place])
            parcels = masker.parcels(self._keys.private_key)
            rows = np.zeros((len(clients), PARCEL_BYTES), np.uint8)
            for position, client in enumerate(clients):
                if client in parcels:
                    rows[position] = np.frombuffer(parcels[client], np.uint8)
            path.unlink()  # so that it takes part once with it
            for left in self._folder.glob("sum-*"):
                left.unlink(missing_ok=True)
            self._keep(masker)
            told = masker.promise
            promise = np.frombuffer(told.mask_key + told.commitment, np.uint8)
            return {"promise": promise.reshape(2, -1), "parcels": rows}

    def masked(self, parcels: Arrays, words: NDArray[Any], about: bytes) -> NDArray[Any]:
        """Return words (m,), uint32 or uint64, with masks against the clients whose parcels came.

        `about` says what the words are of: the sum opens if all clients were asked the same alone.

        Raises
        ------
        SealError
            If this client does not know of the sum, or a parcel does not open, or too few came.
        """
        with claimed(self._folder, "sum"):
            masker = self._kept(parcels)
            if len(masker.received) > 1:
                raise SealError("this client has masked its numbers for this sum already")
            senders = parcels["clients"].tolist()
            came = {k: row.tobytes() for k, row in zip(senders, parcels["parcels"], strict=True)}
            came.pop(masker.client, None)
            masker.receive(self._keys.private_key, came)
            self._keep(masker)
            return masker.masked(words, about)

    def confirmed(self, arrived: Arrays) -> dict[str, NDArray[np.uint8]]:
        """Return tags for the roster's clients (K, 16), by which they see what this one was told.

        Raises
        ------
        SealError
            If this client does not know of the sum, or too few words arrived, or it has confirmed
            others before.
        """
        with claimed(self._folder, "sum"):
            masker = self._kept(arrived)
            tags = masker.confirm(self._keys.private_key, arrived["clients"].tolist())
            self._keep(masker)
        rows = [tags.get(client, bytes(TAG_BYTES)) for client in masker.roster.clients]
        return {"tags": np.frombuffer(b"".join(rows), np.uint8).reshape(-1, TAG_BYTES)}

    def revealed(self, confirmed: Arrays) -> dict[str, NDArray[Any]]:
        """Return this client's shares (m, 16), and of whose secrets they are (m,); only once.

        Raises
        ------
        SealError
            If this client does not know of the sum, or was asked before, or too few clients were
            told the same as this one.
        """
        with claimed(self._folder, "sum"):
            masker, senders = self._kept(confirmed), confirmed["clients"].tolist()
            tags = {k: row.tobytes() for k, row in zip(senders, confirmed["tags"], strict=True)}
            shares = masker.reveal(self._keys.private_key, tags)
            self._path(masker.roster.exchange).unlink()  # with other clients it gives none
            rows = np.frombuffer(b"".join(shares.values()), np.uint8)
            return {"clients": np.array(list(shares), np.int64), "shares": rows.reshape(-1, 16)}

    def _path(self, exchange: bytes) -> Path:
        return self._folder / f"sum-{exchange.hex()}"

    def _keep(self, masker: Masker) -> None:
        with whole_path(self._path(masker.roster.exchange)) as partial:
            write_secret(partial, masker.to_bytes())

    def _kept(self, message: Arrays) -> Masker:
        path = self._path(message["exchange"].tobytes())
        if not path.exists():
            raise SealError("this client does not know of the sum, or has given its shares before")
        return Masker.from_bytes(path.read_bytes())
