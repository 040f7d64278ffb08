"""How a client seals what it sends its neighbours, and opens what they sealed for it."""

from collections.abc import Mapping
from logging import getLogger
from typing import Any

from fedntk.ntk.payloads.gossip_options import ALL, TO
from fedntk.ntk.support.arrays import ArrayDict, Arrays
from fedntk.trust import ParcelKeys, SealError, open_parcel, seal_parcel

# in a message's configuration: all of them if parcels are sealed, else none
OF_SEALING = frozenset(
    f"parcel-{name}"
    for name in ("run", "exchange", "sender", "own-key", "receivers", "keys", "vouchers")
)
logger = getLogger("flwr")


class SealedParcels:
    """Opens the parcels of one message, and seals those of the reply to it.

    A parcel is bound to run, round, exchange and sender. Raises ValueError if the relay, by the
    message's configuration, knows this client by another key: the client's was lost.
    """

    def __init__(self, keys: ParcelKeys, config: Mapping[str, Any]) -> None:
        self._keys, self._config = keys, config
        if config["parcel-own-key"] != keys.public_key:
            raise ValueError(
                "the relay has another public key of this client, which lost or replaced its own; "
                "it is asked again before the next round"
            )

    def open(self, sender: int, parcel: Arrays) -> ArrayDict:
        """Open a parcel of the exchange before; SealError if it is something else."""
        info = self._binding(sender, int(self._config["parcel-exchange"]) - 1)
        return open_parcel(parcel, self._keys.private_key, info)

    def seal(self, outgoing: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """Seal the records of a reply, each for its receivers; omit those without any."""
        sender, exchange = (int(self._config[f"parcel-{name}"]) for name in ("sender", "exchange"))
        info, receivers = self._binding(sender, exchange), self._receivers()
        sealed: dict[str, Arrays] = {}
        for name, arrays in outgoing.items():
            if own := [key for j, key in receivers.items() if name in (ALL, f"{TO}{j}")]:
                sealed[name] = seal_parcel(arrays, own, info)
        return sealed

    def _receivers(self) -> dict[int, bytes]:
        """Return the receivers' public keys, without those that nobody vouches for."""
        trusted = {}
        given = (self._config[f"parcel-{name}"] for name in ("receivers", "keys", "vouchers"))
        for neighbour, key, voucher in zip(*given, strict=True):
            try:
                self._keys.require_vouched(key, voucher)
                trusted[int(neighbour)] = key
            except SealError as error:
                logger.warning("nothing is sent to neighbour %d: %s", neighbour, error)
        return trusted

    def _binding(self, sender: int, exchange: int) -> bytes:
        number = int(self._config.get("server-round", 0))
        run = self._config["parcel-run"]
        return f"fedntk parcel 1\0{run}\0{number}\0{exchange}\0{sender}".encode()
