"""A file of signed records, each with the digest of the one before: an edit or a gap shows.

A record is a line of JSON, signed by Ed25519 (RFC 8032) over all of the line but the signature. It
holds the digest (SHA-256) of the line before. Records cut off at the end do not show; the newest
one names what it led to.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedntk.ntk.support.files import whole, whole_path

from .sealing import SealError, write_secret

Record = dict[str, Any]
SIGNATURE, KEY, PREVIOUS, ROUND = "signature", "key", "previous", "round"
RUN, BEFORE, AFTER = "run", "before", "after"  # name; digests of what a record leads from and to


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in a file that only its owner reads; the first call draws it."""
    if not path.exists():
        key = Ed25519PrivateKey.generate().private_bytes_raw().hex().encode()
        with whole_path(path) as partial:
            write_secret(partial, key)
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text()))
    except ValueError:
        raise SealError(f"{path}: expected a signing key, 64 hexadecimal digits") from None


def append_record(path: Path, content: Mapping[str, Any], key: Ed25519PrivateKey) -> None:
    """Sign a round's record and add it to the file, in place of those that it does not follow.

    Such are of that round or later, or led on from the model that it starts from: a run that goes
    on from an older state makes these rounds again.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [record for record in map(json.loads, lines) if record[ROUND] < content[ROUND]]
    led_to = ["" if not records else records[0][BEFORE], *(record[AFTER] for record in records)]
    count = len(records)
    while count and led_to[count] != content[BEFORE]:
        count -= 1
    # a model that no record led to is no reason to lose them; the check then says so
    lines = lines[: count if led_to[count] == content[BEFORE] else len(records)]
    previous = hashlib.sha256(lines[-1]).hexdigest() if lines else ""
    public = key.public_key().public_bytes_raw().hex()
    record = {**content, PREVIOUS: previous, KEY: public}
    record[SIGNATURE] = key.sign(_signed(record)).hex()
    with whole(path) as file:
        file.write(b"\n".join([*lines, json.dumps(record).encode(), b""]))


def verify_records(path: str | Path, key: str = "") -> list[Record]:
    """Return the records of a file; SealError at the first that is not what its signer wrote.

    Each is signed by one key, is of one run, follows on the line before, is of a later round, and
    leads on from what that led to.

    Parameters
    ----------
    path : path
        A file of records.
    key : str
        The signer's public key, 64 hexadecimal digits, not from the source of the file; by default
        that of the first record, which shows edits only to who knows the key.
    """
    records = list[Record]()
    last: Record = {ROUND: 0}
    previous = ""
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            signature, signer = bytes.fromhex(record[SIGNATURE]), bytes.fromhex(record[KEY])
            Ed25519PublicKey.from_public_bytes(signer).verify(signature, _signed(record))
            follows = record[PREVIOUS] == previous and record[ROUND] > last[ROUND]
            leads_on = record[BEFORE] == last.get(AFTER, record[BEFORE])
            of_one_run = not records or record.get(RUN) == last.get(RUN)
            if line != json.dumps(record).encode():  # such as two entries of one name
                raise ValueError("another form than that of records")
        except (ValueError, TypeError, KeyError, AttributeError, InvalidSignature) as error:
            reason = "its signature is not that of its content"
            if not isinstance(error, InvalidSignature):
                reason = f"expected a signed record ({type(error).__name__}: {error})"
            raise SealError(f"{path}, line {number}: {reason}") from None
        key = key or record[KEY]
        if record[KEY] != key:
            raise SealError(f"{path}, line {number}: signed by {record[KEY]}, expected {key}")
        if not (follows and leads_on and of_one_run):
            raise SealError(f"{path}, line {number}: it does not follow on the record before it")
        records.append(record)
        last, previous = record, hashlib.sha256(line).hexdigest()
    if not records:
        raise SealError(f"{path}: expected signed records, got none")
    return records


def _signed(record: Record) -> bytes:
    unsigned = {name: value for name, value in record.items() if name != SIGNATURE}
    return json.dumps(unsigned, sort_keys=True).encode()
