"""The trusted third parties of a simulation, and its clients' keys.

The cryptography is real. The keys are derived from the run's seed: any process of the simulation
can make its own part, and a run is repeatable. So they are no secrets; a simulation has one owner.
In a deployment keys are drawn, and the third parties are processes (``python -m fedntk.trust``).
"""

from collections.abc import MutableMapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedntk.clients import SealedProjection, project
from fedntk.trust import ClientKeys, KeyServer, ShufflingServer, public_bytes

from .config.config import BaseConfig


def run_name(config: BaseConfig) -> str:
    """Return the run's name: runs of one seed share the projection, and can be compared."""
    return f"simulation of seed {config.seed}"


def key_server(config: BaseConfig) -> KeyServer:
    """Make the key server, with all clients enrolled."""
    return KeyServer(_derive(config, "master"), _enrolled(config), _signing_key(config))


def shuffling_server(config: BaseConfig) -> ShufflingServer:
    """Make the shuffling server, with all clients enrolled."""
    key = X25519PrivateKey.from_private_bytes(_derive(config, "shuffling"))
    return ShufflingServer(_enrolled(config), key)


def client_key(config: BaseConfig, partition: int) -> X25519PrivateKey:
    """Make a client's enrolled key."""
    return X25519PrivateKey.from_private_bytes(_derive(config, f"client {partition}"))


def sealed_projection(
    config: BaseConfig, partition: int, state: MutableMapping[str, Any]
) -> SealedProjection:
    """Make a client's projection, with a sealed seed; `state` is kept between messages."""
    keys = ClientKeys(
        client_key(config, partition),
        run=run_name(config),
        verify_key=_signing_key(config).public_key().public_bytes_raw(),
        state=state,
    )
    return SealedProjection(config.projection, keys, config.projection_kind)


def projected(config: BaseConfig, x: Tensor) -> Tensor:
    """Project examples (n, ...) as clients do, with the seed that the strategy lacks."""
    if not config.projection:
        return x
    seed = key_server(config).projection_seed(run_name(config))
    return project(x, config.projection, seed, config.projection_kind)


def _enrolled(config: BaseConfig) -> list[bytes]:
    return [public_bytes(client_key(config, p)) for p in range(config.num_clients)]


def _signing_key(config: BaseConfig) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_derive(config, "signing"))


def _derive(config: BaseConfig, purpose: str) -> bytes:
    info = f"fedntk simulation {purpose}".encode()
    return HKDF(SHA256(), 32, salt=None, info=info).derive(str(config.seed).encode())
