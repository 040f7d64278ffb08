"""Bytes sealed to one public key, and the files that hold keys.

Sealing is E(k^+, ·) of Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022,
section 4.2 and figure 2; the paper names no cipher. Here it is HPKE (RFC 9180) in base mode:
X25519, HKDF-SHA256, ChaCha20-Poly1305.
"""

import os
import re
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

KEY_BYTES = 32
TOO_LARGE = "expected less than 2 GiB to seal, got {} bytes; send fewer examples"
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class SealError(ValueError):
    """Something sealed, or a key, that cannot be used; the message says why and what to do."""


def seal(plaintext: bytes, public_key: bytes, info: bytes) -> bytes:
    """Encrypt less than 2 GiB for the owner of a public key, 32 raw bytes.

    They open only with the same `info`, the purpose. They are 48 bytes longer than the plaintext,
    for an ephemeral public key and a tag, and different each time.

    Examples
    --------
    >>> key = new_key()
    >>> unseal(seal(b"rho", public_bytes(key), b"example"), key, b"example")
    b'rho'
    """
    try:
        recipient = X25519PublicKey.from_public_bytes(public_key)
        return _SUITE.encrypt(plaintext, recipient, info=info)
    except ValueError:
        raise SealError(
            f"public key: expected the {KEY_BYTES} raw bytes of an X25519 key, "
            f"got {len(public_key)} bytes that are none; new_key and public_bytes make one"
        ) from None
    except OverflowError:
        raise SealError(TOO_LARGE.format(len(plaintext))) from None


def unseal(sealed: bytes, private_key: X25519PrivateKey, info: bytes) -> bytes:
    """Decrypt what :func:`seal` made for this key and the same `info`; else raise SealError."""
    try:
        return _SUITE.decrypt(sealed, private_key, info=info)
    except (InvalidTag, ValueError, OverflowError):
        raise SealError(
            f"{len(sealed)} sealed bytes do not open: sealed for another key or another purpose, "
            "or damaged; seal them again with this recipient's public key"
        ) from None


def require_bytes(name: str, value: bytes, size: int) -> None:
    """Raise SealError for another number of bytes than `size`."""
    if len(value) != size:
        raise SealError(f"{name}: expected {size} bytes, got {len(value)}")


def check_public_key(public_key: bytes) -> bytes:
    """Return an X25519 public key of 32 raw bytes; raise SealError for anything else."""
    seal(b"", public_key, b"")
    return public_key


def agree(private_key: X25519PrivateKey, public_key: bytes) -> bytes:
    """Return the secret that only the owners of two keys can compute."""
    try:
        return private_key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        raise SealError("expected an X25519 public key of full order") from None


def new_key() -> X25519PrivateKey:
    """Make a private key from the operating system's entropy."""
    return X25519PrivateKey.generate()


def public_bytes(private_key: X25519PrivateKey) -> bytes:
    """Return the public half of a key, 32 raw bytes."""
    return private_key.public_key().public_bytes_raw()


def fingerprint(public_key: bytes) -> str:
    """Return the first 16 hexadecimal digits of a key; messages name the key by them."""
    return public_key[:8].hex()


def save_key(private_key: X25519PrivateKey, path: str | Path) -> None:
    """Write a private key as PEM (PKCS #8) to a new file that only its owner can read."""
    pem = serialization.Encoding.PEM
    pkcs8, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_secret(path, private_key.private_bytes(pem, pkcs8, no_password))


def load_key(path: str | Path) -> X25519PrivateKey:
    """Read what :func:`save_key` wrote; raise SealError if the file holds something else."""
    data = Path(path).read_bytes()
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:  # TypeError: protected by a password
        raise SealError(f"{path} holds no private key that can be read: {error}") from None
    if not isinstance(key, X25519PrivateKey):
        raise SealError(f"{path}: expected an X25519 key, got {type(key).__name__}")
    return key


def load_token(path: str | Path) -> str:
    """Read a token for requests, 64 digits; SealError if the file holds something else."""
    token = Path(path).read_bytes().decode(errors="replace").strip()
    if not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", token):
        raise SealError(f"{path} holds no token for requests; new-token makes one")
    return token


def write_secret(path: str | Path, data: bytes) -> None:
    """Write a new file of mode 0600; SealError if it exists, as a lost key cannot be made again."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SealError(
            f"{path} exists and is not replaced: it may hold a key that is in use; "
            "choose another name, or move it away"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def check_run(run: str) -> bytes:
    """Return the name of a run as 1 to 255 bytes of UTF-8; raise SealError if it has others."""
    try:
        name = run.encode()
    except UnicodeEncodeError:
        raise SealError(f"run: expected a name in Unicode, got {run!r}") from None
    if not 1 <= len(name) <= 255:
        raise SealError(
            f"run: expected a name of 1 ... 255 bytes, got {len(name)}; give clients and servers "
            "the same name"
        )
    return name
