"""Parcels that clients send each other through a relay, which cannot open them; without Flower.

A parcel's arrays are encrypted once, with a key drawn for this parcel (ChaCha20-Poly1305, RFC
8439), which is sealed for each receiver (HPKE, see :mod:`fedntk.trust.sealing`), in 80 bytes. It
does not say who sent it: anyone who knows a receiver's public key can seal for it.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from fedntk.ntk.support.arrays import ArrayDict, Arrays

from .key_server import check_voucher
from .sealing import TOO_LARGE, SealError, public_bytes, seal, unseal
from .wire import frame_arrays, unframe_arrays

CONTENT, KEY = "content", "key-"  # names of arrays: the ciphertext, and its key for one receiver
NONCE = bytes(12)  # a key encrypts only one parcel


@dataclass(frozen=True)
class ParcelKeys:
    """What a client needs to seal for others, and to open what was sealed for it.

    With the key server's `verify_key`, 32 raw bytes, not from the relay, the client seals only for
    keys that the key server vouches for; without it, for all that the relay names.
    """

    private_key: X25519PrivateKey
    run: str = ""  # its name, as the key server knows it; needed with verify_key
    verify_key: bytes | None = None

    @property
    def public_key(self) -> bytes:
        """Public half of the client's own key, 32 raw bytes."""
        return public_bytes(self.private_key)

    def require_vouched(self, public_key: bytes, voucher: bytes) -> None:
        """Raise SealError if there is a `verify_key` and its key server did not vouch."""
        if self.verify_key is not None:
            check_voucher(voucher, public_key, self.run, self.verify_key)


def seal_parcel(
    arrays: Arrays, receivers: Iterable[bytes], info: bytes
) -> dict[str, NDArray[np.uint8]]:
    """Encrypt arrays, less than 2 GiB in all, for the owners of public keys of 32 raw bytes.

    `info` is the purpose: the parcel opens only with the same. It has ``"content"``, 16 bytes
    longer than the framed arrays, and ``"key-<public key>"`` for each receiver, 80 bytes.

    Examples
    --------
    >>> from fedntk.trust import new_key, public_bytes
    >>> key = new_key()
    >>> sealed = seal_parcel({"weight": np.ones(2)}, [public_bytes(key)], b"round 1")
    >>> open_parcel(sealed, key, b"round 1")
    {'weight': array([1., 1.])}
    """
    plain = frame_arrays(arrays)
    key = secrets.token_bytes(32)
    try:
        content = ChaCha20Poly1305(key).encrypt(NONCE, plain, info)
    except OverflowError:
        raise SealError(TOO_LARGE.format(len(plain))) from None
    sealed = {CONTENT: content}
    sealed |= {KEY + receiver.hex(): seal(key, receiver, info) for receiver in receivers}
    return {name: np.frombuffer(data, np.uint8) for name, data in sealed.items()}


def open_parcel(sealed: Arrays, private_key: X25519PrivateKey, info: bytes) -> ArrayDict:
    """Decrypt what :func:`seal_parcel` made for this key and the same `info`; else SealError."""
    name = KEY + public_bytes(private_key).hex()
    if missing := [part for part in (CONTENT, name) if part not in sealed]:
        raise SealError(
            f"expected a parcel sealed for this client, got none of {missing[0][:20]}...; have the "
            "sender seal it with this client's public key"
        )
    key = unseal(sealed[name].tobytes(), private_key, info)
    try:
        plain = ChaCha20Poly1305(key).decrypt(NONCE, sealed[CONTENT].tobytes(), info)
        return {k: array.copy() for k, array in unframe_arrays(plain).items()}
    except (InvalidTag, ValueError, OverflowError) as error:  # SealError is a ValueError
        raise SealError(
            f"the parcel's content does not open: damaged, or no arrays ({error!r:.80})"
        ) from None
