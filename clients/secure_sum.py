"""A client's part in a sum of which the server learns the sum alone: see fedntk.trust.secure_sum.

Three exchanges after the public keys are known: shares of the client's secrets for the others; its
words, masked; and its shares of the others' secrets, by which the sum is opened. Between them it
keeps its secrets in a file that its owner alone can read, which goes with the last one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.files import whole_path
from fedntk.trust import Masker, ParcelKeys, Roster, SealError
from fedntk.trust.sealing import write_secret
from fedntk.trust.secure_sum import PARCEL_BYTES

__all__ = ["SecureSum"]

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

    def public_key(self) -> NDArray[np.uint8]:
        """Return the public key, shape (32,)."""
        return np.frombuffer(self._keys.public_key, np.uint8)

    def shares(self, roster: Arrays) -> dict[str, NDArray[np.uint8]]:
        """Return the promise (2, 32) and the parcels for the roster's clients (K, 92).

        Raises
        ------
        SealError
            If it is no roster of a secure sum with this client, or a key is not vouched for.
        """
        keys = tuple(row.tobytes() for row in roster["keys"])
        for key, voucher in zip(keys, roster["vouchers"], strict=True):
            self._keys.require_vouched(key, voucher.tobytes())
        clients = tuple(roster["clients"].tolist())
        own = Roster(roster["exchange"].tobytes(), clients, keys, int(roster["threshold"]))
        if self._keys.public_key not in keys:
            raise SealError("the server has another public key of this client")
        masker = Masker(own, clients[keys.index(self._keys.public_key)])
        parcels = masker.parcels(self._keys.private_key)
        rows = np.zeros((len(clients), PARCEL_BYTES), np.uint8)
        for position, client in enumerate(clients):
            if client in parcels:
                rows[position] = np.frombuffer(parcels[client], np.uint8)
        for left in self._folder.glob("sum-*"):
            left.unlink(missing_ok=True)
        self._keep(masker)
        promise = np.frombuffer(masker.promise.mask_key + masker.promise.commitment, np.uint8)
        return {"promise": promise.reshape(2, -1), "parcels": rows}

    def masked(self, parcels: Arrays, words: NDArray[Any]) -> NDArray[Any]:
        """Return words (m,), uint32 or uint64, with masks against the clients whose parcels came.

        Raises
        ------
        SealError
            If this client does not know of the sum, or a parcel does not open, or too few came.
        """
        masker = self._kept(parcels)
        if len(masker.shares) > 1:
            raise SealError("this client has masked its numbers for this sum already")
        senders = parcels["clients"].tolist()
        came = {k: row.tobytes() for k, row in zip(senders, parcels["parcels"], strict=True)}
        came.pop(masker.client, None)
        masker.receive(self._keys.private_key, came)
        self._keep(masker)
        return masker.masked(words)

    def revealed(self, arrived: Arrays) -> dict[str, NDArray[Any]]:
        """Return this client's shares (m, 16), and of whose secrets they are (m,); only once.

        Raises
        ------
        SealError
            If this client does not know of the sum, or was asked before, or too few words arrived.
        """
        masker = self._kept(arrived)
        shares = masker.reveal(arrived["clients"].tolist())
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
