"""How a client seals what it sends its neighbours, and opens what they sealed for it."""

from collections.abc import Mapping
from logging import getLogger
from typing import Any

from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.gossip_options import ALL, TO
from fedntk.ntk.support.arrays import ArrayDict, Arrays
from fedntk.trust import ParcelKeys, SealError, open_parcel, seal_parcel

logger = getLogger("flwr")


class SealedParcels:
    """Opens the parcels of one message, and seals those of the reply to it.

    A parcel is bound to run, round, exchange and sender. Raises ValueError if the relay, by the
    message's configuration, knows this client by another key: the client's was lost.
    """

    def __init__(self, keys: ParcelKeys, config: Mapping[str, Any]) -> None:
        self._keys, self._config = keys, config
        if config[wire.PARCEL_OWN_KEY] != keys.public_key:
            raise ValueError(
                "the relay has another public key of this client, which lost or replaced its own; "
                "it is asked again before the next round"
            )

    def open(self, sender: int, parcel: Arrays) -> ArrayDict:
        """Open a parcel of the exchange before; SealError if it is something else."""
        info = self._binding(sender, int(self._config[wire.PARCEL_EXCHANGE]) - 1)
        return open_parcel(parcel, self._keys.private_key, info)

    def seal(self, outgoing: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """Seal the records of a reply, each for its receivers; omit those without any."""
        sender = int(self._config[wire.PARCEL_SENDER])
        info = self._binding(sender, int(self._config[wire.PARCEL_EXCHANGE]))
        receivers = self._receivers()
        sealed: dict[str, Arrays] = {}
        for name, arrays in outgoing.items():
            if keys := [key for j, key in receivers.items() if name in (ALL, f"{TO}{j}")]:
                sealed[name] = seal_parcel(arrays, keys, info)
        return sealed

    def _receivers(self) -> dict[int, bytes]:
        """Return the receivers' public keys, without those that nobody vouches for."""
        trusted = {}
        columns = wire.PARCEL_RECEIVERS, wire.PARCEL_KEYS, wire.PARCEL_VOUCHERS
        rows = zip(*(self._config[name] for name in columns), strict=True)
        for neighbour, key, voucher in rows:
            try:
                self._keys.require_vouched(key, voucher)
                trusted[int(neighbour)] = key
            except SealError as error:
                logger.warning("nothing is sent to neighbour %d: %s", neighbour, error)
        return trusted

    def _binding(self, sender: int, exchange: int) -> bytes:
        number = int(self._config.get("server-round", 0))
        run = self._config[wire.PARCEL_RUN]
        return f"fedntk parcel 1\0{run}\0{number}\0{exchange}\0{sender}".encode()
