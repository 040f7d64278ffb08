"""What the clients of decentralised methods share: weights of their own, and parcels.

Weights live with the client, on its disk; the strategy says from which round they count. Parcels
from neighbours are checked here, as nobody else reads them: one that cannot be used is dropped,
logged and counted.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from torch import nn

from fedntk.ntk import BadReply, Predictor
from fedntk.ntk.averages import all_alike
from fedntk.ntk.first_weights import draw_weights
from fedntk.ntk.options import argument, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.gossip_options import ALL, FROM, REFUSED, TO, GossipOptions
from fedntk.ntk.payloads.screening import OUTLIER_FACTOR, screen_changes
from fedntk.ntk.support.arrays import ArrayDict, Arrays, require_array, take_arrays
from fedntk.ntk.support.shared_arrays import unify
from fedntk.trust import ParcelKeys, SealError, open_parcel, seal_parcel

from ..core.base import ModelClient, step_method
from ..core.disk_store import PersonalStore
from ..core.secure_sum import load_or_draw_key
from ..core.weights import Config, Evaluation, Fit, NamedArrays, Parameters, set_weights

COUNT = "num-examples"  # name of an array beside weights
RESTARTED, HEARD = "restarted", "neighbours-heard"  # metrics
LARGEST = 1e12  # of a neighbour's weight
logger = getLogger("flwr")
Answer = tuple[Mapping[str, Arrays], Mapping[str, Any]]  # what goes to whom, and metrics
T = TypeVar("T")


class WeightsParcel(NamedTuple):
    """A neighbour's weights, and how many examples it has."""

    weights: ArrayDict
    num_examples: int

    def to_arrays(self) -> ArrayDict:
        """Wire format: the weights by their names, and ``num-examples``."""
        return {**self.weights, COUNT: np.array(self.num_examples, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Arrays, expected: ArrayDict, max_examples: int) -> "WeightsParcel":
        """Check what :meth:`to_arrays` made against a network's arrays; raise BadReply."""
        *values, count = take_arrays(arrays, *expected, COUNT)
        weights = dict(zip(expected, values, strict=True))
        for name, array in expected.items():
            weight, low = weights[name], 0.0 if name.endswith("running_var") else None
            same_kind = (weight.dtype, weight.shape) == (array.dtype, array.shape)
            if same_kind and all_alike([weight, array]).all():
                continue  # frozen arrays may hold anything
            require_array(
                name, weight, shape=array.shape, dtype=array.dtype, limit=LARGEST, low=low
            )
        require_array(COUNT, count, shape=(), dtype=np.int64, low=1, high=max_examples)
        return cls(weights, int(count))


class SealedParcels:
    """Opens the parcels of one message, and seals those of the reply, for run, round and exchange.

    ValueError if the relay knows this client by another key: the client's was lost.
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
        return open_parcel(parcel, self._keys.private_key, self._binding(sender, before=1))

    def seal(self, outgoing: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """Seal a reply's records, each for its receivers with vouched keys, if there are some."""
        info = self._binding(int(self._config[wire.PARCEL_SENDER]))
        trusted = dict[int, bytes]()
        columns = wire.PARCEL_RECEIVERS, wire.PARCEL_KEYS, wire.PARCEL_VOUCHERS
        for neighbour, key, voucher in zip(*map(self._config.get, columns), strict=True):
            try:
                self._keys.require_vouched(key, voucher)
                trusted[int(neighbour)] = key
            except SealError as error:
                logger.warning("nothing is sent to neighbour %d: %s", neighbour, error)
        sealed: dict[str, Arrays] = {}
        for name, arrays in outgoing.items():
            if keys := [key for j, key in trusted.items() if name in (ALL, f"{TO}{j}")]:
                sealed[name] = seal_parcel(arrays, keys, info)
        return sealed

    def _binding(self, sender: int, before: int = 0) -> bytes:
        number = int(self._config.get("server-round", 0))
        exchange = int(self._config[wire.PARCEL_EXCHANGE]) - before
        run = self._config[wire.PARCEL_RUN]
        return f"fedntk parcel 1\0{run}\0{number}\0{exchange}\0{sender}".encode()


class RelayMemory:
    """What a client keeps of a run; `seed` draws first weights unless all begin with the same."""

    def __init__(
        self,
        cache: str | os.PathLike[str] | None,
        model: nn.Module,
        seed: Sequence[int],
        config: Mapping[str, Any],
        *,
        same_weights: bool,
    ) -> None:
        self.cache, self.model, self.seed, self.config = cache, model, seed, config
        self.same_weights = same_weights
        self.round = int(config.get("server-round", 0))
        self.counted = int(config.get(wire.ROUND, 0))

    def store(self, what: str = "") -> PersonalStore:
        """Return the folder of the client's weights, or of something else that it keeps."""
        return PersonalStore(self.cache, self.config, self.seed, what)

    def keep_first(self, parameters: Sequence[Any]) -> None:
        """Keep first weights, which come once; after round 1 they are the newest mean model."""
        first = dict(getattr(parameters, "records", {}).get("arrays", {}))
        if not first or self.counted:
            return
        if not self._of_network(first):
            raise ValueError(f"arrays: expected those of the network, got {sorted(first)[:5]}")
        self.store().save(0, first if self.round > 1 else self._draw_first(first))

    def current(self) -> tuple[ArrayDict, bool]:
        """Return the weights, and whether they are lost: then the first ones, or the model's."""
        if weights := self._of_network(self.store().load(self.counted)):
            return weights, False
        if not self.counted:
            raise ValueError(
                f"{self.store().folder}: the first weights of this run are lost; the strategy "
                "sends them again"
            )
        logger.warning("a client lost its weights, and begins with the first ones again")
        if first := self._of_network(self.store().load(0)):
            return first, True
        held = {n: tensor.cpu().numpy().copy() for n, tensor in self.model.state_dict().items()}
        return self._draw_first(held), True

    def _draw_first(self, weights: ArrayDict) -> ArrayDict:
        if self.same_weights:
            return weights
        generator = np.random.default_rng([*self.seed, *b"first-weights"])
        return unify(self.model, draw_weights(weights, "he", generator))

    def _of_network(self, arrays: ArrayDict | None) -> ArrayDict:
        """Return the network's arrays among others, in its order; empty if some are missing."""
        names = list(self.model.state_dict())
        return {n: arrays[n] for n in names} if arrays and arrays.keys() >= set(names) else {}

    def keep(self, weights: Arrays) -> None:
        """Keep the current round's weights, and those that count until that round does."""
        self.store().save(self.round, weights, needed=self.counted)

    def keep_within(self, part: str, arrays: Mapping[str, Any]) -> None:
        """Keep a part of the round's work: ``weights``, ``metrics``, or the weights ``before``."""
        self._within(part).save(self.round, arrays)

    def keep_before(self, weights: Arrays) -> None:
        """Keep weights from before the last thing done in a round, for evaluation."""
        if self.config.get(wire.KEEP_BOTH):
            self.keep_within(wire.BEFORE, weights)

    def before(self) -> ArrayDict:
        """Return those weights; empty if the client took no part in the round that counts."""
        if not self.config.get(wire.KEEP_BOTH) or self.counted != self.round:
            return {}
        return self._of_network(self._within(wire.BEFORE).load(self.round))

    def metrics_within(self) -> dict[str, Any]:
        """Return the metrics that were kept in earlier steps of the round, if any."""
        metrics = self._within("metrics").load(self.round) or {}
        return {name: array.item() for name, array in metrics.items()}

    def weights_within(self) -> ArrayDict:
        """Return the weights that were kept in earlier steps of the round."""
        weights = self._of_network(self._within("weights").load(self.round))
        if not weights:
            raise ValueError(
                f"{self.store().folder}: the weights of this round are lost; the client goes on "
                "with the next round"
            )
        return weights

    def _within(self, part: str) -> PersonalStore:
        return self.store(f"-{part}-within-round")


class Message(NamedTuple):
    """What a client is to do now."""

    config: Mapping[str, Any]
    parcels: dict[int, ArrayDict]  # neighbour -> what it sent in the exchange before
    options: Any  # the strategy's, of the class `options_kind`
    memory: RelayMemory
    batch: int = 0  # part of its examples that the client is to use
    neighbours: tuple[int, ...] = ()  # ids of those to whom parcels may go
    max_examples: int = 10_000_000  # that a neighbour may claim
    outlier_factor: float = OUTLIER_FACTOR  # of a neighbour's size over the median


class RelayClient(ModelClient):
    """A client that has weights of its own, and neighbours.

    Its methods ``step_<name>`` answer the steps of its strategy. They return receivers
    (``"to-<j>"``, or ``"to-neighbours"``) with arrays, and metrics. A client that finds its weights
    missing begins with the first ones again, and reports ``"restarted"``.
    """

    replies = "parcels"
    config_keys = wire.OF_NEIGHBOURS
    usual_step = ""  # a message names its step
    takes_real_targets = True
    options_kind: ClassVar[type[Any]] = GossipOptions  # what messages bring

    cache: str | os.PathLike[str] | None = argument(
        "folder for its weights, as that of fedntk.clients.PersonalisedClient", default=None
    )
    parcel_keys: ParcelKeys | None = argument(
        "keys that seal and open parcels; then runs with parcels in the clear are refused. By "
        "default the client draws a key for a run with sealed parcels",
        default=None,
    )
    _rejected: int = state(int)  # parcels of the message that could not be used

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Take the step that the message names; see the method's client for what it sends."""
        records: Mapping[str, Arrays] = getattr(parameters, "records", {})
        names = [name for name in records if name.startswith(FROM)]
        parcels = {int(name.removeprefix(FROM)): dict(records[name]) for name in names}
        unreadable: Mapping[str, str] = getattr(parameters, "unreadable", {})
        for name, reason in unreadable.items():
            logger.warning("dropped what came %s: it cannot be read: %s", name, reason)
        self._rejected = len(unreadable)
        if wire.PARCEL_RUN not in config and self.parcel_keys is not None:
            raise ValueError(
                "parcel_keys: the strategy does not have parcels sealed; give it seal=True, or "
                "leave parcel_keys out"
            )
        sealing = None
        if wire.PARCEL_RUN in config:
            sealing = SealedParcels(self._keys(config), config)
            parcels = dict(self.open(parcels, sealing.open))
        answer = step_method(self, self.step_in(config))
        keys = {name: name.replace("_", "-") for name in Message._field_defaults}
        fields: Any = {name: config[key] for name, key in keys.items() if key in config}
        options, memory = self.options_kind.from_config(config), self._memory(parameters, config)
        outgoing, metrics = answer(Message(config, parcels, options, memory, **fields))
        if sealing is not None:
            outgoing = sealing.seal(outgoing)
        metrics = {**metrics, REFUSED: self._rejected}  # always, as means need all
        return NamedArrays(outgoing), self.num_examples, metrics

    def report(self, parameters: Parameters, config: Config) -> Fit:
        """Return the client's weights, for the mean model; with ``keep-both`` also those before."""
        memory = self._memory(parameters, config)
        records = {"arrays": memory.current()[0]}
        if before := memory.before():
            records[wire.BEFORE] = before
        return NamedArrays(records), self.num_examples, {}

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Loss and accuracy of the client's own weights on its examples for evaluation."""
        self.load_weights(self._memory(parameters, config).current()[0])
        return self.evaluate_model(config)

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the client's own weights."""
        weights, _ = self._memory(parameters, config).current()
        return self.network_predictor(list(weights.values()))

    def public_key(self, config: Mapping[str, Any]) -> bytes:
        """Return the public key with which others seal for this client, 32 raw bytes."""
        return self._keys(config).public_key

    def _keys(self, config: Mapping[str, Any]) -> ParcelKeys:
        folder = PersonalStore(self.cache, config, self.seed, "-keys").folder
        return self.parcel_keys or ParcelKeys(load_or_draw_key(folder))

    def _memory(self, parameters: Parameters, config: Mapping[str, Any]) -> RelayMemory:
        same_weights = self.options_kind.from_config(config).same_weights
        memory = RelayMemory(self.cache, self.model, self.seed, config, same_weights=same_weights)
        memory.keep_first(parameters)
        return memory

    def load_weights(self, weights: Arrays) -> None:
        """Put weights into the model."""
        set_weights(self.model, [weights[name] for name in self.model.state_dict()])

    def parcel(self, weights: ArrayDict) -> Arrays:
        """Return weights as they go to neighbours."""
        return WeightsParcel(weights, self.num_examples).to_arrays()

    def step_weights(self, message: Message) -> Answer:
        """Send the client's weights to all neighbours; one that lost them has nothing to say."""
        weights, lost = message.memory.current()
        silent = lost and message.neighbours
        return {} if silent else {ALL: self.parcel(weights)}, {RESTARTED: int(lost)}

    def open(
        self, parcels: Mapping[int, ArrayDict], read: Callable[[int, ArrayDict], T]
    ) -> list[tuple[int, T]]:
        """Read parcels by their senders, in the order of these; those that are bad are dropped."""
        good = []
        for sender, arrays in sorted(parcels.items()):
            try:
                good.append((sender, read(sender, arrays)))
            except Exception as error:  # a neighbour may send anything
                self.refuse(sender, error)
        return good

    def read_weights(
        self,
        message: Message,
        weights: ArrayDict,
        parse: Callable[..., Any] = WeightsParcel.from_arrays,
    ) -> list[tuple[int, Any]]:
        """Return the neighbours' weights, without those of a norm out of all proportion."""
        most = message.max_examples
        heard = self.open(message.parcels, lambda _, arrays: parse(arrays, weights, most))
        zero = {name: np.zeros_like(array) for name, array in weights.items()}
        models = [weights, *(parcel.weights for _, parcel in heard)]
        return self.screen(heard, screen_changes(zero, models, message.outlier_factor))

    def screen(
        self, heard: Sequence[tuple[int, T]], verdicts: Sequence[BadReply | None]
    ) -> list[tuple[int, T]]:
        """Drop the neighbours that are refused; the first verdict is the client's own."""
        for (sender, _), bad in zip(heard, verdicts[1:], strict=True):
            if bad is not None:
                self.refuse(sender, bad)
        return [parcel for parcel, bad in zip(heard, verdicts[1:], strict=True) if bad is None]

    def refuse(self, sender: int, reason: Exception) -> None:
        """Count what a neighbour sent as refused, and log why."""
        self._rejected += 1
        logger.warning("dropped what neighbour %d sent: %s", sender, reason)
