"""Key servers and shuffling servers as strategies see them, and what is known of clients' keys.

Source of sealed seeds and of shuffling: Yue et al., *Neural Tangent Kernel Empowered Federated
Learning*, ICML 2022, section 4.2 and figure 2. :mod:`fedntk.trust` has both servers, in this
process and over HTTP.
"""

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger

from flwr.app import Message

from fedntk.ntk.payloads import wire
from fedntk.trust import (
    KeyServer,
    RemoteKeyServer,
    RemoteShufflingServer,
    ShufflingServer,
    check_public_key,
)

LONGEST = 1000  # bytes of a value that is relayed to the key server
SealsSeeds = KeyServer | RemoteKeyServer
VouchesForKeys = KeyServer | RemoteKeyServer
Shuffles = ShufflingServer | RemoteShufflingServer
logger = getLogger("flwr")


class SealedSeeds:
    """Each node's sealed seed of a run, fetched once from the key server."""

    def __init__(self, key_server: SealsSeeds, run: str) -> None:
        self._key_server, self._run = key_server, run
        self._sealed: dict[int, bytes] = {}
        self._doubtful: set[int] = set()

    def forget(self, node: int) -> None:
        """Fetch a node's seed anew, as a restarted client lost it; until then the old one stays."""
        self._doubtful.add(node)

    def fetch(
        self, nodes: Iterable[int], ask: Callable[[list[int]], Iterable[Message]]
    ) -> Mapping[int, bytes]:
        """Fetch the seeds of nodes that have none yet, log those that get none, and return all.

        Raises ConnectionError if the key server does not answer and no node ever had a seed.
        """
        new = [node for node in nodes if node not in self._sealed or node in self._doubtful]
        failure: Exception | None = None
        for reply in ask(new) if new else ():
            node = reply.metadata.src_node_id
            try:
                self._sealed[node] = self._fetch(reply)
                self._doubtful.discard(node)
            except Exception as error:  # a reply may hold anything; none may end the run
                logger.warning("node %d gets no projection seed: %s", node, error)
                failure = error if isinstance(error, ConnectionError) else failure
        if failure is not None and not self._sealed:
            raise failure
        return self._sealed

    def _fetch(self, reply: Message) -> bytes:
        if reply.has_error():
            raise ValueError(reply.error.reason)
        properties = [dict(r) for r in reply.content.config_records.values()]
        if len(properties) != 1:
            raise ValueError(
                "expected its public key; does its client have projection=SealedProjection(...)?"
            )
        public_key, challenge = (properties[0].get(k) for k in (wire.PUBLIC_KEY, "challenge"))
        if not isinstance(public_key, bytes) or not isinstance(challenge, bytes):
            raise ValueError("expected a public key and a challenge, as bytes")
        if max(len(public_key), len(challenge)) > LONGEST:
            raise ValueError(f"expected at most {LONGEST} bytes each of public key and challenge")
        return self._key_server.sealed_seed(public_key, challenge, self._run)


def public_key_in(reply: Message, key_server: VouchesForKeys | None, run: str) -> tuple[str, str]:
    """Return a client's public key and, with a key server, its voucher, in hexadecimal.

    ValueError if the reply lacks a key or it is refused; ConnectionError without an answer.
    """
    if reply.has_error():
        raise ValueError(reply.error.reason)
    records = reply.content.config_records.values()
    keys = [record[wire.PUBLIC_KEY] for record in records if wire.PUBLIC_KEY in record]
    if len(keys) != 1 or not isinstance(keys[0], bytes) or len(keys[0]) > LONGEST:
        raise ValueError("expected its public key, as bytes")
    key = check_public_key(keys[0])
    return key.hex(), "" if key_server is None else key_server.voucher(key, run).hex()
