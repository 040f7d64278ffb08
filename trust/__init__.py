"""The trusted third parties of CP-NTK-FL: a key server and a shuffling server; without Flower."""

from .key_server import SEALED_SEED, ClientKeys, KeyServer, NotEnrolled
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
from .shuffling_server import Shuffled, ShufflingServer, seal_upload

__all__ = [
    "SEALED_SEED",
    "ClientKeys",
    "KeyServer",
    "NotEnrolled",
    "RemoteKeyServer",
    "RemoteShufflingServer",
    "SealError",
    "Shuffled",
    "ShufflingServer",
    "check_public_key",
    "check_run",
    "fingerprint",
    "load_key",
    "new_key",
    "public_bytes",
    "save_key",
    "seal",
    "seal_upload",
    "unseal",
]
