"""Sealing, and trusted third parties: a key server and a shuffling server; without Flower."""

from .key_server import SEALED_SEED, ClientKeys, KeyServer, NotEnrolled, check_voucher
from .parcels import ParcelKeys, open_parcel, seal_parcel
from .remote import RemoteKeyServer, RemoteShufflingServer
from .sealing import (
    SealError,
    check_public_key,
    check_run,
    fingerprint,
    load_key,
    new_key,
    public_bytes,
    save_key,
    seal,
    unseal,
)
from .secure_sum import MaskedSum, Masker, Promise, Roster
from .shuffling_server import Shuffled, ShufflingServer, seal_upload
from .signed_records import verify_records

__all__ = [
    "SEALED_SEED",
    "ClientKeys",
    "KeyServer",
    "MaskedSum",
    "Masker",
    "NotEnrolled",
    "ParcelKeys",
    "Promise",
    "RemoteKeyServer",
    "RemoteShufflingServer",
    "Roster",
    "SealError",
    "Shuffled",
    "ShufflingServer",
    "check_public_key",
    "check_run",
    "check_voucher",
    "fingerprint",
    "load_key",
    "new_key",
    "open_parcel",
    "public_bytes",
    "save_key",
    "seal",
    "seal_parcel",
    "seal_upload",
    "unseal",
    "verify_records",
]
