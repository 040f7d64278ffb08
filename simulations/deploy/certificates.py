"""Certificates and keys of a federation: TLS for its servers, and a key pair for each node.

They are drawn anew in each folder, and are meant for tests, for one machine and for trials over
several. An organisation that has a certificate authority uses that one instead.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedntk.trust.sealing import write_secret

DAYS = 365
AUTHORITY = "fedntk federation"


@dataclass(frozen=True)
class Certificates:
    """Files of TLS, all PEM: certificates of the authority and the server, the server's key."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(
    folder: Path, hosts: Sequence[str] = ("localhost", "127.0.0.1")
) -> Certificates:
    """Make ``ca.pem``, ``server.pem``, ``server.key`` for a year; no key of the CA is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    own_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signs = x509.BasicConstraints(ca=True, path_length=0)
    own_uses = [signs, _usage(key_cert_sign=True, crl_sign=True)]
    made.authority.write_bytes(_certificate(AUTHORITY, own_key, own_key, own_uses))
    serves = x509.BasicConstraints(ca=False, path_length=None)
    details = [
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([*map(_host, hosts)]),
    ]
    uses = [serves, _usage(digital_signature=True)]
    made.certificate.write_bytes(_certificate(hosts[0], server_key, own_key, uses, details))
    _write_key(made.key, server_key, serialization.PrivateFormat.PKCS8)
    return made


def make_node_key(file: Path) -> Path:
    """Make the key pair by which the SuperLink knows a node (ECDSA, P-384, OpenSSH format).

    `file` gets the private key. The file of the public key, which is registered with the SuperLink,
    is returned: `file` with ``.pub`` added.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(file, key, serialization.PrivateFormat.OpenSSH)
    public = file.with_name(f"{file.name}.pub")
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*openssh))
    return public


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    critical: Sequence[x509.ExtensionType],
    others: Sequence[x509.ExtensionType] = (),
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )
    subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    for extension in (*critical, subject, issuer, *others):
        builder = builder.add_extension(extension, critical=extension in critical)
    return builder.sign(issuer_key, SHA256()).public_bytes(serialization.Encoding.PEM)


def _write_key(
    file: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    file.unlink(missing_ok=True)
    write_secret(file, key.private_bytes(pem, form, no_password))
