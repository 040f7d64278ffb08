"""A client that is enrolled at a key server."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedntk.trust import ClientKeys, KeyServer, new_key, public_bytes


def enrolled() -> tuple[ClientKeys, bytes]:
    """The client's keys, and the projection's seed, sealed for it."""
    key = new_key()
    server = KeyServer(bytes(range(32)), [public_bytes(key)], Ed25519PrivateKey.generate())
    keys = ClientKeys(key, run="a run", verify_key=server.verify_key, state={})
    asked = keys.request()
    return keys, server.sealed_seed(asked["public-key"], "a run", asked["challenge"])
