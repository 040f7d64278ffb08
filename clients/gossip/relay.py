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

from fedntk.ntk import BadReply, Predictor
from fedntk.ntk.averages import all_alike
from fedntk.ntk.first_weights import draw_weights
from fedntk.ntk.options import argument, state
from fedntk.ntk.payloads.gossip_options import ALL, FROM, REFUSED, RelayOptions
from fedntk.ntk.payloads.screening import OUTLIER_FACTOR, screen_changes
from fedntk.ntk.support.arrays import ArrayDict, Arrays, require_array, take_arrays
from fedntk.ntk.support.shared_arrays import unify
from fedntk.trust import ParcelKeys

from ..core.base import ModelClient
from ..core.named_arrays import NamedArrays
from ..core.secure_sum import load_or_draw_key
from ..core.weights import Config, Evaluation, Fit, Parameters, Scalar, set_weights
from ..personal.personal_store import ROUND, RUN, PersonalStore
from .sealed_parcels import OF_SEALING, SealedParcels

STEP = "step_"  # begins the names of methods
OF_RELAYS = OF_SEALING | {
    RUN, ROUND, "step", "batch", "neighbours", "outlier-factor", "max-examples", "keep-both",
}  # fmt: skip
KEYS, WITHIN = "-keys", "-within-round"  # what else is kept beside the weights, in folders
COUNT = "num-examples"  # name of an array beside weights
RESTARTED, HEARD = "restarted", "neighbours-heard"  # metrics
LARGEST = 1e12  # of a neighbour's weight
logger = getLogger("flwr")
Outgoing = Mapping[str, Arrays]
Answer = tuple[Outgoing, Mapping[str, Scalar]]  # what goes to whom, and metrics
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
        *given, count = take_arrays(arrays, *expected, COUNT)
        weights = dict(zip(expected, given, strict=True))
        for name, own in expected.items():
            low = 0.0 if name.endswith("running_var") else None
            same_kind = (weights[name].dtype, weights[name].shape) == (own.dtype, own.shape)
            if same_kind and all_alike([weights[name], own]).all():
                continue  # frozen arrays may hold anything
            require_array(
                name, weights[name], shape=own.shape, dtype=own.dtype, limit=LARGEST, low=low
            )
        require_array(COUNT, count, shape=(), dtype=np.int64, low=1, high=max_examples)
        return cls(weights, int(count))


class Message(NamedTuple):
    """What a client is to do now."""

    config: Mapping[str, Any]
    parcels: dict[int, ArrayDict]  # neighbour -> what it sent in the exchange before
    options: Any  # the strategy's, of the class `options_kind`
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
    config_keys = OF_RELAYS
    options_kind: ClassVar[type[RelayOptions]] = RelayOptions  # what its strategy's messages bring

    cache: str | os.PathLike[str] | None = argument(
        "folder for its weights; fedntk/personal in $XDG_CACHE_HOME or ~/.cache by default, see "
        "fedntk.clients.PersonalisedClient",
        default=None,
    )
    parcel_keys: ParcelKeys | None = argument(
        "keys that seal and open parcels; a client that is given them takes part in no run with "
        "parcels in the clear. By default, if the strategy has parcels sealed, the client draws a "
        "key for the run, and keeps it in its folder",
        default=None,
    )
    _rejected: int = state(int)  # parcels of the message that could not be used

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Take the step that the message names; see the method's client for what it sends."""
        parcels = {
            int(name.removeprefix(FROM)): dict(arrays)
            for name, arrays in getattr(parameters, "records", {}).items()
            if name.startswith(FROM)
        }
        unreadable = getattr(parameters, "unreadable", {})
        for name, reason in unreadable.items():
            logger.warning("dropped what came %s: it cannot be read: %s", name, reason)
        self._rejected = len(unreadable)
        sealing = self._sealing(config)
        if sealing is not None:
            parcels = dict(self.open(parcels, sealing.open))
        told: Any = {name.replace("-", "_"): value for name, value in config.items()}
        own = {name: told[name] for name in Message._field_defaults if name in told}
        message = Message(config, parcels, self.options_kind.from_config(config), **own)
        known = [name.removeprefix(STEP) for name in dir(self) if name.startswith(STEP)]
        if (step := config.get("step")) not in known:
            raise ValueError(f"step: expected one of {', '.join(known)}, got {step!r}")
        self._take_first(parameters, config)
        outgoing, found = getattr(self, f"{STEP}{step}")(message)
        if sealing is not None:
            outgoing = sealing.seal(outgoing)
        metrics = {**found, REFUSED: self._rejected}  # always, as means need all
        return NamedArrays(outgoing), len(self._training), metrics

    def report(self, parameters: Parameters, config: Config) -> Fit:
        """Return the client's weights, for the mean model that is evaluated.

        With ``keep-both`` a record ``before`` has those of :meth:`keep_before`, if it took part.
        """
        records = {"arrays": self.own_weights(parameters, config)}
        if config.get("keep-both") and int(config.get(ROUND, 0)) == round_of(config):
            before = self._of_network(self.load_within(config, "before"))
            records |= {"before": before} if before else {}
        return NamedArrays(records), len(self._training), {}

    def evaluate(self, parameters: Parameters, config: Config) -> Evaluation:
        """Loss and accuracy of the client's own weights on its examples for evaluation."""
        return super().evaluate(list(self.own_weights(parameters, config).values()), config)

    def predictor(self, parameters: Parameters, config: Config) -> Predictor:
        """Make a module of the client's own weights."""
        return super().predictor(list(self.own_weights(parameters, config).values()), config)

    def public_key(self, config: Mapping[str, Any]) -> bytes:
        """Return the public key with which others seal for this client, 32 raw bytes."""
        return self._keys(config).public_key

    def _keys(self, config: Mapping[str, Any]) -> ParcelKeys:
        return self.parcel_keys or ParcelKeys(load_or_draw_key(self.store(config, KEYS).folder))

    def _sealing(self, config: Mapping[str, Any]) -> SealedParcels | None:
        """Return what opens and seals a message's parcels; None if they are in the clear."""
        if "parcel-run" in config:
            return SealedParcels(self._keys(config), config)
        if self.parcel_keys is not None:
            raise ValueError(
                "parcel_keys: the strategy does not have parcels sealed; give it seal=True, or "
                "leave parcel_keys out"
            )
        return None

    def own_weights(self, parameters: Parameters, config: Mapping[str, Any]) -> ArrayDict:
        """Return the weights that count as the client's own, in the network's order."""
        self._take_first(parameters, config)
        return self.current(config)[0]

    def _take_first(self, parameters: Parameters, config: Mapping[str, Any]) -> None:
        """Keep first weights, which come once; after round 1 they are the newest mean model."""
        first = dict(getattr(parameters, "records", {}).get("arrays", {}))
        if not first or int(config.get(ROUND, 0)):
            return
        if not self._of_network(first):
            raise ValueError(f"arrays: expected those of the network, got {sorted(first)[:5]}")
        late = round_of(config) > 1
        self.store(config).save(0, first if late else self._draw_first(first, config))

    def current(self, config: Mapping[str, Any]) -> tuple[ArrayDict, bool]:
        """Return the client's weights from the round that counts, and whether they were lost.

        Then they are the first ones; if these are lost as well, the model's.
        """
        counted = int(config.get(ROUND, 0))
        if kept := self._load_kept(counted, config):
            return kept, False
        if not counted:
            raise ValueError(
                f"{self.store(config).folder}: the first weights of this run are lost; the "
                "strategy sends them again"
            )
        logger.warning("a client lost its weights, and begins with the first ones again")
        first = self._load_kept(0, config) or self._draw_first(self.model_weights(), config)
        return first, True

    def _draw_first(self, weights: ArrayDict, config: Mapping[str, Any]) -> ArrayDict:
        """Return weights of the client's own if clients begin with different ones."""
        if self.options_kind.from_config(config).same_weights:
            return weights
        generator = np.random.default_rng([*self.seed, *b"first-weights"])
        return unify(self.model, draw_weights(weights, "he", generator))

    def _load_kept(self, server_round: int, config: Mapping[str, Any]) -> ArrayDict:
        return self._of_network(self.store(config).load(server_round) or {})

    def _of_network(self, kept: ArrayDict) -> ArrayDict:
        """Return the network's arrays among what was kept, in its order; empty if some lack."""
        names = list(self.model.state_dict())
        return {name: kept[name] for name in names} if kept.keys() >= set(names) else {}

    def keep(self, weights: Arrays, config: Mapping[str, Any]) -> None:
        """Keep the current round's weights, and those that count until that round does."""
        self.store(config).save(round_of(config), weights, needed=int(config.get(ROUND, 0)))

    def keep_within(self, config: Mapping[str, Any], part: str, arrays: Mapping[str, Any]) -> None:
        """Keep a part of the round's work: ``weights``, ``metrics``, or the weights ``before``."""
        self.store(config, f"-{part}{WITHIN}").save(round_of(config), arrays)

    def load_within(self, config: Mapping[str, Any], part: str) -> ArrayDict:
        """Return what was kept of a part in earlier steps of the round; empty if it was not."""
        return self.store(config, f"-{part}{WITHIN}").load(round_of(config)) or {}

    def metrics_within(self, message: Message) -> dict[str, Scalar]:
        """Return the metrics that were kept in earlier steps of the round, if any."""
        kept = self.load_within(message.config, "metrics")
        return {name: array.item() for name, array in kept.items()}

    def weights_within(self, message: Message) -> ArrayDict:
        """Return the weights that were kept in earlier steps of the round."""
        weights = self._of_network(self.load_within(message.config, "weights"))
        if not weights:
            folder = self.store(message.config).folder
            raise ValueError(
                f"{folder}: the weights of this round are lost; the client goes on with the next "
                "round"
            )
        return weights

    def keep_before(self, weights: Arrays, config: Mapping[str, Any]) -> None:
        """Keep weights from before the last thing done in a round, for evaluation."""
        if config.get("keep-both"):
            self.keep_within(config, "before", weights)

    def store(self, config: Mapping[str, Any], what: str = "") -> PersonalStore:
        """Return the folder of the client's weights, or of something else that it keeps."""
        return PersonalStore(self.cache, config, self.seed, what)

    def load_weights(self, weights: Arrays) -> None:
        """Put weights into the model."""
        set_weights(self.model, [weights[name] for name in self.model.state_dict()])

    def parcel(self, weights: ArrayDict) -> Arrays:
        """Return weights as they go to neighbours."""
        return WeightsParcel(weights, len(self._training)).to_arrays()

    def step_weights(self, message: Message) -> Answer:
        """Send the client's weights to all neighbours; one that lost them has nothing to say."""
        own, lost = self.current(message.config)
        silent = lost and message.neighbours
        return {} if silent else {ALL: self.parcel(own)}, {RESTARTED: int(lost)}

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
        own: ArrayDict,
        parse: Callable[..., Any] = WeightsParcel.from_arrays,
    ) -> list[tuple[int, Any]]:
        """Return the neighbours' weights, without those of a norm out of all proportion."""
        most, zero = message.max_examples, {name: np.zeros_like(a) for name, a in own.items()}
        heard = self.open(message.parcels, lambda _, arrays: parse(arrays, own, most))
        weights = [own, *(parcel.weights for _, parcel in heard)]
        return self.screen(heard, screen_changes(zero, weights, message.outlier_factor))

    def screen(
        self, heard: Sequence[tuple[int, T]], verdicts: Sequence[BadReply | None]
    ) -> list[tuple[int, T]]:
        """Drop the neighbours that are refused; the first verdict is the client's own."""
        for (sender, _), bad in zip(heard, verdicts[1:], strict=True):
            if bad is not None:
                self.refuse(sender, bad)
        return [each for each, bad in zip(heard, verdicts[1:], strict=True) if bad is None]

    def refuse(self, sender: int, reason: Exception) -> None:
        """Count what a neighbour sent as refused, and log why."""
        self._rejected += 1
        logger.warning("dropped what neighbour %d sent: %s", sender, reason)


def round_of(config: Mapping[str, Any]) -> int:
    """Return the number of a message's round."""
    return int(config.get("server-round", 0))
