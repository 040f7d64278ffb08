"""The key server, which lets clients share a seed that the aggregation server never learns.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2: a trusted key server sends each client m the seed rho of the random projection, encrypted
with the client's public key, E(k_m^+, rho). The paper leaves the rest open; this module's choices:

* The seed travels through the aggregation server, inside Flower's messages. That server knows all
  public keys and could seal a seed of its own choice, so the key server signs what it sends
  (Ed25519), and clients are given its verification key beforehand.
* A client asks with a challenge and accepts no answer to another: an old answer is of no use.
* The key server seals for enrolled keys alone. Otherwise the aggregation server would ask with a
  key of its own.
"""

import json
import secrets
import struct
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .sealing import (
    KEY_BYTES,
    OVERHEAD,
    SealError,
    check_run,
    fingerprint,
    public_bytes,
    seal,
    unseal,
    write_secret,
)

__all__ = [
    "SEALED_SEED",
    "ClientKeys",
    "KeyServer",
    "NotEnrolled",
    "check_voucher",
    "load_secret",
    "new_secret",
]

SEALED_SEED = "sealed-seed"  # under which it travels in a message
SEED_BYTES = 32
CHALLENGE_BYTES = 16
SIGNATURE_BYTES = 64
# version, recipient's public key, challenge, length of the run's name; then the name
_HEAD = struct.Struct(f"<8s{KEY_BYTES}s{CHALLENGE_BYTES}sB")
_VERSION = b"ntkseed1"
_AFTER_RUN = SEED_BYTES + OVERHEAD + SIGNATURE_BYTES
_CHALLENGE = "seed-challenge"
_VOUCHED = b"ntkpeer1"  # begins what is signed to vouch for a key


class NotEnrolled(SealError):  # noqa: N818 - it names the thing refused, as BadReply does
    """A public key for which the key server seals nothing."""


class KeyServer:
    """The trusted third party that knows the seeds.

    Parameters
    ----------
    master : bytes
        32 secret bytes from which all seeds are derived: a key server that is started again gives
        the same ones.
    enrolled : iterable of bytes
        Public keys of the clients, 32 raw bytes each.
    signing_key : Ed25519PrivateKey
        With which sealed seeds are signed.

    Attributes
    ----------
    verify_key : bytes
        Public half of the signing key, 32 raw bytes. Clients get it beforehand, not through the
        aggregation server.

    Raises
    ------
    SealError
        If the master or a public key has not 32 bytes.

    Examples
    --------
    >>> from fedntk.trust import new_key
    >>> key = new_key()
    >>> server = KeyServer(bytes(32), [public_bytes(key)], Ed25519PrivateKey.generate())
    >>> client = ClientKeys(key, run="7", verify_key=server.verify_key, state={})
    >>> asked = client.request()
    >>> sealed = server.sealed_seed(asked["public-key"], "7", asked["challenge"])
    >>> client.open(sealed) == server.projection_seed("7")
    True
    """

    def __init__(
        self, master: bytes, enrolled: Iterable[bytes], signing_key: Ed25519PrivateKey
    ) -> None:
        if len(master) != SEED_BYTES:
            raise SealError(f"master: expected {SEED_BYTES} bytes, got {len(master)}")
        self._master = master
        self._signing_key = signing_key
        self.verify_key = signing_key.public_key().public_bytes_raw()
        self.enrol(enrolled)

    def enrol(self, enrolled: Iterable[bytes]) -> None:
        """Replace the public keys for which seeds are sealed.

        Raises
        ------
        SealError
            If one has not 32 bytes; the former keys stay.
        """
        keys = frozenset(enrolled)
        for key in keys:
            if len(key) != KEY_BYTES:
                raise SealError(f"enrolled keys: expected {KEY_BYTES} bytes each, got {len(key)}")
        self._enrolled = keys

    def projection_seed(self, run: str) -> bytes:
        """Return the seed rho of a run, 32 bytes: HKDF-SHA256 of the master and the run's name."""
        info = b"fedntk projection seed 1\0" + check_run(run)
        return HKDF(SHA256(), SEED_BYTES, salt=None, info=info).derive(self._master)

    def sealed_seed(self, public_key: bytes, run: str, challenge: bytes) -> bytes:
        """Return the run's seed sealed for one client, E(k_m^+, rho), and signed.

        Parameters
        ----------
        public_key, challenge : bytes
            From the client's :meth:`ClientKeys.request`.
        run : str
            Name of the run, 1 to 255 bytes.

        Returns
        -------
        bytes
            Run, recipient and challenge in clear, the sealed seed, and a signature of it all.

        Raises
        ------
        NotEnrolled
            If this is no enrolled client's key.
        SealError
            If run or challenge are malformed.
        """
        self._require_enrolled(public_key)
        if len(challenge) != CHALLENGE_BYTES:
            raise SealError(f"challenge: expected {CHALLENGE_BYTES} bytes, got {len(challenge)}")
        name = check_run(run)
        head = _HEAD.pack(_VERSION, public_key, challenge, len(name)) + name
        signed = head + seal(self.projection_seed(run), public_key, info=head)
        return signed + self._signing_key.sign(signed)

    def voucher(self, public_key: bytes, run: str) -> bytes:
        """Return a signature that says that a key is an enrolled client's, for one run, 64 bytes.

        Clients that seal for each other check it with :func:`check_voucher`: a relay then cannot
        name keys of its own.

        Raises
        ------
        NotEnrolled
            If this is no enrolled client's key.
        SealError
            If the name of the run is malformed.
        """
        self._require_enrolled(public_key)
        return self._signing_key.sign(_VOUCHED + public_key + check_run(run))

    def _require_enrolled(self, public_key: bytes) -> None:
        if public_key not in self._enrolled:
            raise NotEnrolled(
                f"the client with key {fingerprint(public_key)}... is not enrolled with the key "
                "server; make sure that the key is a client's of yours, and add it to the "
                "enrolled keys"
            )


def check_voucher(voucher: bytes, public_key: bytes, run: str, verify_key: bytes) -> None:
    """Refuse a public key that a key server does not vouch for.

    Parameters
    ----------
    voucher : bytes
        Of :meth:`KeyServer.voucher`.
    public_key : bytes
        For which it is to be, 32 raw bytes.
    run : str
        Name of the run, 1 to 255 bytes.
    verify_key : bytes
        The key server's, 32 raw bytes, from a source other than who brought the voucher.

    Raises
    ------
    SealError
        If it is not this key server's voucher for this key and run.

    Examples
    --------
    >>> from fedntk.trust import new_key
    >>> key = public_bytes(new_key())
    >>> server = KeyServer(bytes(32), [key], Ed25519PrivateKey.generate())
    >>> check_voucher(server.voucher(key, "7"), key, "7", server.verify_key)
    """
    name = check_run(run)
    try:
        trusted = Ed25519PublicKey.from_public_bytes(verify_key)
        trusted.verify(voucher, _VOUCHED + public_key + name)
    except (InvalidSignature, ValueError):
        raise SealError(
            f"the key server does not vouch for key {fingerprint(public_key)}... in run {run!r}: "
            "enrol it with the key server that this client trusts, and name the run alike"
        ) from None


class ClientKeys:
    """The client's half: it asks for a run's seed, and opens the answer.

    Parameters
    ----------
    private_key : X25519PrivateKey
        The client's; its public half is enrolled with the key server.
    run : str
        Name of the run, 1 to 255 bytes.
    verify_key : bytes
        The key server's, 32 raw bytes, from a source other than the aggregation server.
    state : mutable mapping
        Kept from message to message, such as a ConfigRecord in Flower's ``context.state``.

    Raises
    ------
    SealError
        If the name of the run or the verification key is malformed.
    """

    def __init__(
        self,
        private_key: X25519PrivateKey,
        *,
        run: str,
        verify_key: bytes,
        state: MutableMapping[str, Any],
    ) -> None:
        check_run(run)
        self._private_key = private_key
        self._public_key = public_bytes(private_key)
        self._run = run
        self._state = state
        try:
            self._verify_key = Ed25519PublicKey.from_public_bytes(verify_key)
        except ValueError:
            raise SealError(
                f"verify_key: expected the key server's Ed25519 key of {KEY_BYTES} raw bytes, got "
                f"{len(verify_key)} bytes that are none; the key server prints it when it starts"
            ) from None

    def request(self) -> dict[str, bytes]:
        """Return this client's public key and a fresh challenge, which replaces the former.

        Returns
        -------
        dict of str to bytes
            ``"public-key"`` (32 bytes) and ``"challenge"`` (16 bytes), for
            :meth:`KeyServer.sealed_seed`.
        """
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._state[_CHALLENGE] = challenge
        return {"public-key": self._public_key, "challenge": challenge}

    def open(self, sealed: bytes) -> bytes:
        """Return the seed rho, 32 bytes, from the answer to the newest request.

        It may be opened again, until the next request.

        Raises
        ------
        SealError
            If nothing was asked for, or these bytes are not the key server's answer to this
            client, run and challenge.
        """
        if _CHALLENGE not in self._state:
            raise SealError(
                "a sealed seed came, but none was asked for; call request first, and keep its "
                "state from message to message"
            )
        head, encrypted, signature = _parse(sealed)
        try:
            self._verify_key.verify(signature, head + encrypted)
        except InvalidSignature:
            raise SealError(
                "the sealed seed's signature is wrong: it was changed on its way, or is not from "
                "the key server that this client trusts; check verify_key against what the key "
                "server printed when it started"
            ) from None
        _, recipient, challenge, _ = _HEAD.unpack_from(head)
        run = head[_HEAD.size :].decode()
        if recipient != self._public_key:
            raise SealError(
                f"the seed was sealed for another client: for key {fingerprint(recipient)}..., and "
                f"this client's is {fingerprint(self._public_key)}...; send each client its own"
            )
        if run != self._run:
            raise SealError(
                f"the seed is of another run: expected {self._run!r}, got {run!r}; ask the key "
                "server for this run's"
            )
        if not secrets.compare_digest(challenge, self._state[_CHALLENGE]):
            raise SealError(
                "the sealed seed does not answer the newest challenge: it answers an older one, "
                "or another client's with the same key; ask again"
            )
        try:
            return unseal(encrypted, self._private_key, info=head)
        except SealError as error:
            raise SealError(f"the sealed seed is signed, but damaged: {error}") from None


def new_secret(path: str | Path) -> bytes:
    """Write a new key server's master and signing key to a file; return its verification key.

    Raises
    ------
    SealError
        If there is such a file already.
    """
    signing_key = Ed25519PrivateKey.generate()
    secret = {
        "master": secrets.token_hex(SEED_BYTES),
        "signing-key": signing_key.private_bytes_raw().hex(),
    }
    write_secret(path, json.dumps(secret).encode())
    return signing_key.public_key().public_bytes_raw()


def load_secret(path: str | Path) -> tuple[bytes, Ed25519PrivateKey]:
    """Read the master and the signing key that :func:`new_secret` wrote.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    SealError
        If it holds something else.
    """
    data = Path(path).read_bytes()
    try:
        secret = json.loads(data)
        master = bytes.fromhex(secret["master"])
        signing_key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret["signing-key"]))
    except (ValueError, TypeError, KeyError):
        raise SealError(f"{path} holds no key server's secret; new-key-server makes one") from None
    return master, signing_key


def _parse(sealed: bytes) -> tuple[bytes, bytes, bytes]:
    """Head, ciphertext and signature; their lengths are checked, nothing else."""
    if len(sealed) < _HEAD.size + _AFTER_RUN or not sealed.startswith(_VERSION):
        raise SealError(
            f"expected a sealed seed of at least {_HEAD.size + _AFTER_RUN} bytes that begin with "
            f"{_VERSION!r}, got {len(sealed)} bytes; send what the key server's sealed_seed gave"
        )
    end = _HEAD.size + _HEAD.unpack_from(sealed)[-1]
    if len(sealed) != end + _AFTER_RUN:
        raise SealError(
            f"expected a sealed seed of {end + _AFTER_RUN} bytes, got {len(sealed)}: cut off or "
            "changed on its way; send it whole"
        )
    return sealed[:end], sealed[end:-SIGNATURE_BYTES], sealed[-SIGNATURE_BYTES:]
