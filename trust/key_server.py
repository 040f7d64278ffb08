"""The key server: clients share a seed that the aggregation server never learns.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2: a trusted key server sends each client m the seed rho of the random projection, encrypted
with the client's public key, E(k_m^+, rho). Beyond the paper: the seed travels through the
aggregation server, so the key server signs it (Ed25519); a client accepts only the answer to its
newest challenge; and the key server seals only for enrolled keys.
"""

import json
import secrets
from collections.abc import Iterable, MutableMapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .sealing import (
    KEY_BYTES,
    SealError,
    check_run,
    fingerprint,
    public_bytes,
    require_bytes,
    seal,
    unseal,
    write_secret,
)

SEALED_SEED = "sealed-seed"  # its name in a message
SEED_BYTES, CHALLENGE_BYTES, SIGNATURE_BYTES = 32, 16, 64
_SEED, _VOUCHED = b"ntkseed1", b"ntkpeer1"  # start what is signed: a sealed seed, a voucher
_CHALLENGE = "seed-challenge"


class NotEnrolled(SealError):  # noqa: N818 - it names the thing refused, as BadReply does
    """A public key that is no enrolled client's."""


class Enrolment:
    """The enrolled clients, as both servers know them."""

    def enrol(self, enrolled: Iterable[bytes]) -> None:
        """Replace the enrolled public keys; if one lacks 32 bytes, the former keys stay."""
        keys = frozenset(enrolled)
        for key in keys:
            require_bytes("enrolled keys", key, KEY_BYTES)
        self._enrolled = keys

    def require_enrolled(self, public_key: bytes) -> None:
        """Raise NotEnrolled for another key than a client's."""
        if public_key not in self._enrolled:
            raise NotEnrolled(
                f"the client with key {fingerprint(public_key)}... is not enrolled; make sure that "
                "the key belongs to one of your clients, and add it to the enrolled keys"
            )


class KeyServer(Enrolment):
    """The trusted third party that knows the seeds.

    Seeds are derived from the `master`, 32 secret bytes, the same ones after a restart. `enrolled`
    are the clients' public keys, 32 raw bytes each. `signing_key` signs sealed seeds; `verify_key`
    is its public half, 32 raw bytes.

    Examples
    --------
    >>> from fedntk.trust import new_key
    >>> key = new_key()
    >>> server = KeyServer(bytes(32), [public_bytes(key)], Ed25519PrivateKey.generate())
    >>> client = ClientKeys(key, run="7", verify_key=server.verify_key, state={})
    >>> request = client.request()
    >>> sealed = server.sealed_seed(request["public-key"], request["challenge"], "7")
    >>> client.open(sealed) == server.projection_seed("7")
    True
    """

    def __init__(
        self, master: bytes, enrolled: Iterable[bytes], signing_key: Ed25519PrivateKey
    ) -> None:
        require_bytes("master", master, SEED_BYTES)
        self._master, self._signing_key = master, signing_key
        self.verify_key = signing_key.public_key().public_bytes_raw()
        self.enrol(enrolled)

    def projection_seed(self, run: str) -> bytes:
        """Return the seed rho of a run, 32 bytes: HKDF-SHA256 of the master and the run's name."""
        info = b"fedntk projection seed 1\0" + check_run(run)
        return HKDF(SHA256(), SEED_BYTES, salt=None, info=info).derive(self._master)

    def sealed_seed(self, public_key: bytes, challenge: bytes, run: str) -> bytes:
        """Return the run's seed sealed for one client, E(k_m^+, rho), and signed; or NotEnrolled.

        `public_key` and `challenge` are from :meth:`ClientKeys.request`. They and the run are in
        clear, then come the sealed seed and a signature of it all.
        """
        self.require_enrolled(public_key)
        require_bytes("challenge", challenge, CHALLENGE_BYTES)
        head = _head(public_key, challenge, run)
        signed = head + seal(self.projection_seed(run), public_key, info=head)
        return signed + self._signing_key.sign(signed)

    def voucher(self, public_key: bytes, run: str) -> bytes:
        """Return a signature, 64 bytes, that the key is a client's in this run; or NotEnrolled."""
        self.require_enrolled(public_key)
        return self._signing_key.sign(_VOUCHED + public_key + check_run(run))


def check_voucher(voucher: bytes, public_key: bytes, run: str, verify_key: bytes) -> None:
    """Raise SealError unless this is the key server's :meth:`~KeyServer.voucher` for key and run.

    The key server's `verify_key`, 32 raw bytes, must not be from the source of the voucher.
    """
    signed = _VOUCHED + public_key + check_run(run)
    try:
        Ed25519PublicKey.from_public_bytes(verify_key).verify(voucher, signed)
    except (InvalidSignature, ValueError):
        raise SealError(
            f"the key server does not vouch for key {fingerprint(public_key)}... in run {run!r}: "
            "enrol it with the key server that this client trusts, and use one name for the run"
        ) from None


@dataclass(repr=False, eq=False)
class ClientKeys:
    """The client's half: it requests a run's seed, and opens the answer."""

    private_key: X25519PrivateKey  # its public half is enrolled with the key server
    _: KW_ONLY
    run: str  # its name, 1 to 255 bytes
    verify_key: bytes  # the key server's, 32 raw bytes, not from the aggregation server
    state: MutableMapping[str, Any]  # kept between messages, such as in Flower's context.state

    def __post_init__(self) -> None:
        check_run(self.run)
        self._public_key = public_bytes(self.private_key)
        try:
            self._trusted = Ed25519PublicKey.from_public_bytes(self.verify_key)
        except ValueError:
            raise SealError(
                f"verify_key: expected the key server's Ed25519 key of {KEY_BYTES} raw bytes, got "
                f"{len(self.verify_key)} bytes; the key server prints it when it starts"
            ) from None

    def request(self) -> dict[str, bytes]:
        """Return ``"public-key"`` (32 bytes) and ``"challenge"`` (16 bytes), the only valid one."""
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.state[_CHALLENGE] = challenge
        return {"public-key": self._public_key, "challenge": challenge}

    def open(self, sealed: bytes) -> bytes:
        """Return the seed rho, 32 bytes, from the answer to the newest request; else SealError."""
        if _CHALLENGE not in self.state:
            raise SealError(
                "a sealed seed came, but none was asked for; call request first, and keep its "
                "state between messages"
            )
        signed = sealed[:-SIGNATURE_BYTES]
        try:
            self._trusted.verify(sealed[-SIGNATURE_BYTES:], signed)
        except InvalidSignature:
            raise SealError(
                f"the sealed seed's signature is wrong: its {len(sealed)} bytes were changed or "
                "cut off on their way, or are not from the key server that this client trusts; "
                "check verify_key against what the key server printed when it started"
            ) from None
        head = _head(self._public_key, self.state[_CHALLENGE], self.run)
        if not signed.startswith(head):
            raise SealError(
                f"the seed was sealed for {_describe(signed)}, expected {_describe(head)}: the "
                "answer to this client's newest request; request it again, and give clients and "
                "servers the same name of the run"
            )
        return unseal(signed[len(head) :], self.private_key, info=head)


def _head(public_key: bytes, challenge: bytes, run: str) -> bytes:
    """Return what precedes a sealed seed, and what that is bound to."""
    name = check_run(run)
    return _SEED + public_key + challenge + bytes([len(name)]) + name


def _describe(signed: bytes) -> str:
    key, challenge, length = signed[8:40], signed[40:56], int.from_bytes(signed[56:57])
    run = signed[57 : 57 + length].decode(errors="replace")
    return f"run {run!r}, key {fingerprint(key)}..., challenge {challenge.hex()[:8]}..."


def new_secret(path: str | Path) -> bytes:
    """Write a new key server's master and signing key; return its verification key."""
    key = Ed25519PrivateKey.generate()
    secret = {"master": secrets.token_hex(SEED_BYTES), "signing-key": key.private_bytes_raw().hex()}
    write_secret(path, json.dumps(secret).encode())
    return key.public_key().public_bytes_raw()


def load_secret(path: str | Path) -> tuple[bytes, Ed25519PrivateKey]:
    """Read the master and the signing key that :func:`new_secret` wrote."""
    data = Path(path).read_bytes()
    try:
        secret = json.loads(data)
        signing_key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret["signing-key"]))
        return bytes.fromhex(secret["master"]), signing_key
    except (ValueError, TypeError, KeyError):
        raise SealError(f"{path} holds no key server's secret; new-key-server makes one") from None
