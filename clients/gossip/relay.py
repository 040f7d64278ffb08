"""What the clients of decentralised methods share: weights of their own, and parcels.

Weights live with the client, on its disk; the strategy says from which round they count. Parcels
from neighbours are checked here, as nobody else reads them: one that cannot be used is dropped,
logged and counted.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING, getLogger
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk import BadReply, Predictor
from fedntk.ntk.first_weights import drawn_weights
from fedntk.ntk.options import argument, state
from fedntk.ntk.payloads import OUTLIER_FACTOR, screen_sizes
from fedntk.ntk.payloads.gossip_options import RelayOptions
from fedntk.ntk.support.arrays import require_array
from fedntk.trust import ParcelKeys

from ..core.adapter import OF_A_CLIENT
from ..core.base import ModelClient
from ..core.named_arrays import NamedArrays
from ..core.weights import Scalar, get_weights, set_weights
from ..personal.personal_store import ROUND, RUN, PersonalStore
from .sealed_parcels import ALL, OF_SEALING, SealedParcels, kept_key

__all__ = ["Answer", "Message", "RelayClient", "WeightsParcel"]

FROM = OF_A_CLIENT  # begins the names of records
OF_RELAYS = OF_SEALING | {
    RUN, ROUND, "step", "batch", "neighbours", "outlier-factor", "max-examples", "keep-both",
}  # fmt: skip
KEYS, WITHIN = "-keys", "-within-round"  # what else is kept beside the weights, in folders
COUNT = "num-examples"  # name of an array beside weights
RESTARTED, HEARD = "restarted", "neighbours-heard"  # metrics
LARGEST = 1e12  # of a neighbour's weight
MOST_EXAMPLES = 10_000_000  # of a neighbour, if the strategy names no limit
logger = getLogger("flwr")
Arrays = dict[str, NDArray[Any]]
Outgoing = Mapping[str, Mapping[str, NDArray[Any]]]
Answer = tuple[Outgoing, int, dict[str, Scalar]]
Fit = tuple[list[NDArray[Any]], int, dict[str, Scalar]]
T = TypeVar("T")


class WeightsParcel(NamedTuple):
    """A neighbour's weights, and how many examples it has."""

    weights: Arrays
    num_examples: int

    def to_arrays(self) -> Arrays:
        """Wire format: the weights by their names, and ``num-examples``."""
        return {**self.weights, COUNT: np.array(self.num_examples, np.int64)}

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        expected: Arrays,
        max_examples: int = MOST_EXAMPLES,
    ) -> "WeightsParcel":
        """Check what :meth:`to_arrays` made against a network's arrays; raise BadReply."""
        require_names(arrays, {*expected, COUNT})
        for name, own in expected.items():
            require_array(
                name,
                arrays[name],
                shape=own.shape,
                dtype=own.dtype,
                limit=LARGEST,
                low=0.0 if name.endswith("running_var") else None,
            )
        require_array(COUNT, arrays[COUNT], shape=(), dtype=np.int64, low=1, high=max_examples)
        return cls({name: arrays[name] for name in expected}, int(arrays[COUNT]))


class Message(NamedTuple):
    """What a client is to do now."""

    config: Mapping[str, Any]
    parcels: dict[int, Arrays]  # neighbour -> what it sent in the exchange before
    options: Any  # the strategy's options that travel, of the class that the client names

    @property
    def server_round(self) -> int:
        """Number of the round."""
        return round_of(self.config)

    @property
    def batch(self) -> int:
        """Part of its examples that the client is to use."""
        return int(self.config.get("batch", 0))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Ids of those to whom parcels may go."""
        return tuple(int(j) for j in self.config.get("neighbours", ()))

    @property
    def max_examples(self) -> int:
        """Most examples that a neighbour may claim."""
        return int(self.config.get("max-examples", MOST_EXAMPLES))


class RelayClient(ModelClient):
    """A client that has weights of its own, and neighbours.

    A client that finds its weights missing begins with the first ones again, and reports
    ``"restarted"``.
    """

    replies = "parcels"
    config_keys = OF_RELAYS
    told: ClassVar[type[RelayOptions]] = RelayOptions  # what its strategy's messages bring

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
    _first: Arrays = state(dict)  # first weights that the message brings
    _rejected: int = state(int)  # parcels of the message that could not be used

    @abstractmethod
    def steps(self) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step that it knows, by the step's name.

        Each is given the message, and returns receivers (``"to-<j>"``, or ``"to-neighbours"``) with
        arrays, the number of examples, and metrics.
        """

    def fit(self, parameters: list[NDArray[Any]], config: dict[str, Scalar]) -> Fit:
        """Take the step that the message names; see the method's client for what it sends."""
        records = getattr(parameters, "records", {})
        parcels = {
            int(name.removeprefix(FROM)): dict(arrays)
            for name, arrays in records.items()
            if name.startswith(FROM)
        }
        self._first = dict(records.get("arrays", {}))
        unreadable = getattr(parameters, "unreadable", {})
        for name, reason in unreadable.items():
            logger.log(WARNING, "dropped what came %s: it cannot be read: %s", name, reason)
        self._rejected = len(unreadable)
        sealing = self._sealing(config)
        if sealing is not None:
            parcels = dict(self._usable(parcels, sealing.open))
        message = Message(config, parcels, self.told.from_config(config))
        steps, step = self.steps(), config.get("step", "")
        if step not in steps:
            raise ValueError(f"step: expected one of {', '.join(steps)}, got {step!r}")
        outgoing, num_examples, metrics = steps[str(step)](message)
        if sealing is not None:
            outgoing = sealing.seal(outgoing)
        metrics["parcels-rejected"] = self._rejected  # always: odd names are left out of the means
        return NamedArrays(outgoing), num_examples, metrics

    def report(self, parameters: list[NDArray[Any]], config: dict[str, Scalar]) -> Fit:
        """Return the client's weights, for the mean model that is evaluated.

        With ``keep-both`` a record ``before`` has those of :meth:`keep_before`, if it took part.
        """
        records = {"arrays": self.own_weights(parameters, config)}
        if config.get("keep-both") and int(config.get(ROUND, 0)) == round_of(config):
            before = self._of_network(_part(self._within(config), "before"))
            records |= {"before": before} if before else {}
        return NamedArrays(records), len(self._training), {}

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Loss and accuracy of the client's own weights on its examples for evaluation."""
        return super().evaluate(list(self.own_weights(parameters, config).values()), config)

    def predictor(self, parameters: list[NDArray[Any]], config: dict[str, Scalar]) -> Predictor:
        """Make a module of the client's own weights: see :meth:`ModelClient.predictor`."""
        return super().predictor(list(self.own_weights(parameters, config).values()), config)

    # -------------------------------------------------------------------- keys

    def public_key(self, config: Mapping[str, Any]) -> bytes:
        """Return the public key with which others seal for this client, 32 raw bytes."""
        return self._keys(config).public_key

    def _keys(self, config: Mapping[str, Any]) -> ParcelKeys:
        if self.parcel_keys is not None:
            return self.parcel_keys
        return ParcelKeys(kept_key(self.store(config, KEYS).folder))

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

    # ----------------------------------------------------------------- weights

    def own_weights(self, parameters: list[NDArray[Any]], config: Mapping[str, Any]) -> Arrays:
        """Return the weights that count as the client's own, in the network's order."""
        self._first = dict(getattr(parameters, "records", {}).get("arrays", {}))
        weights, _ = self.current(config)
        return weights

    def current(self, config: Mapping[str, Any]) -> tuple[Arrays, bool]:
        """Return the client's weights from the round that counts, and whether they were lost."""
        counted = int(config.get(ROUND, 0))
        if self._first and not counted:  # they come once
            late = round_of(config) > 1  # then they are the newest mean model
            first = self._first if late else self._drawn(self._first, config)
            self.store(config).save(0, first)
        kept = self._kept_weights(counted, config)
        if counted:
            if kept is not None:
                return kept, False
            logger.log(WARNING, "a client lost its weights, and begins with the first ones again")
        elif kept is None:
            raise ValueError(
                f"arrays: expected those of the network, got {sorted(self._first)[:5]}"
                if self._first
                else f"{self.store(config).folder}: the first weights of this run are lost; the "
                "strategy sends them again"
            )
        return self.first_weights(config), counted > 0

    def first_weights(self, config: Mapping[str, Any]) -> Arrays:
        """Return the weights to begin with; the model's as it is, if the client lost them."""
        kept = self._kept_weights(0, config)
        return self._drawn(self.model_weights(), config) if kept is None else kept

    def _drawn(self, weights: Arrays, config: Mapping[str, Any]) -> Arrays:
        """Return weights of the client's own if clients begin with different ones."""
        if self.told.from_config(config).same_weights:
            return weights
        generator = np.random.default_rng([*self.seed, *b"first-weights"])
        return drawn_weights(weights, "he", generator)

    def _kept_weights(self, server_round: int, config: Mapping[str, Any]) -> Arrays | None:
        return self._of_network(self.store(config).load(server_round) or {}) or None

    def _of_network(self, kept: Arrays) -> Arrays:
        """Return the network's arrays among what was kept, in its order; empty if some lack."""
        names = list(self.model.state_dict())
        return {name: kept[name] for name in names} if kept.keys() >= set(names) else {}

    def keep(self, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
        """Keep weights as those of the round at work, and those that count until it does."""
        needed = int(config.get(ROUND, 0))
        self.store(config).save(round_of(config), weights, needed=needed)

    # -------------------------------------------------------- within the round

    def keep_within(self, config: Mapping[str, Any], **parts: Mapping[str, Any]) -> None:
        """Keep parts of the round's work, such as weights or metrics, beside its other parts."""
        store, kept = self.store(config, WITHIN), self._within(config)
        kept = {name: a for name, a in kept.items() if name.partition(" ")[0] not in parts}
        for part, arrays in parts.items():
            kept |= {f"{part} {name}": np.asarray(array) for name, array in arrays.items()}
        store.save(round_of(config), kept)

    def _within(self, config: Mapping[str, Any]) -> Arrays:
        return self.store(config, WITHIN).load(round_of(config)) or {}

    def work_within(self, message: Message) -> tuple[Arrays, dict[str, Scalar]]:
        """Return the weights and metrics that were kept in earlier steps of the round, if any."""
        kept = self._within(message.config)
        metrics = {n: array.item() for n, array in _part(kept, "metrics").items()}
        return self._of_network(_part(kept, "weights")), metrics

    def weights_within(self, message: Message) -> tuple[Arrays, dict[str, Scalar]]:
        """Return the same, and fail if the weights are lost."""
        weights, metrics = self.work_within(message)
        if not weights:
            raise ValueError(
                f"{self.store(message.config, WITHIN).folder}: the weights of this round are lost; "
                "the client goes on with the next round"
            )
        return weights, metrics

    def keep_before(self, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
        """Keep weights within a round, for evaluation: averaged ones before training.

        If averaging ends a round, these are the trained ones.
        """
        if config.get("keep-both"):
            self.keep_within(config, before=weights)

    def store(self, config: Mapping[str, Any], what: str = "") -> PersonalStore:
        """Return the folder of the client's weights, or of something else that it keeps."""
        return PersonalStore.of(self.cache, config, self.seed, what)

    def load_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Put weights into the model."""
        set_weights(self.model, [weights[name] for name in self.model.state_dict()])

    def model_weights(self) -> Arrays:
        """Return copies of the weights that the model has, by name."""
        return dict(zip(self.model.state_dict(), get_weights(self.model), strict=True))

    # ----------------------------------------------------------------- parcels

    def parcel(self, weights: Arrays) -> Mapping[str, NDArray[Any]]:
        """Return weights as they go to neighbours."""
        return WeightsParcel(weights, len(self._training)).to_arrays()

    def send_weights(self, message: Message, *, though_lost: bool = False) -> Answer:
        """Send the client's weights to all neighbours; one that lost them has nothing to say."""
        own, lost = self.current(message.config)
        silent = lost and not though_lost and message.neighbours
        sent = {} if silent else {ALL: self.parcel(own)}
        return sent, len(self._training), {RESTARTED: int(lost)}

    def open(self, message: Message, parse: Callable[[Arrays], T]) -> list[tuple[int, T]]:
        """Parse the parcels, in the order of the neighbours; those that are bad are dropped."""
        return self._usable(message.parcels, lambda _, arrays: parse(arrays))

    def weights_heard(self, message: Message, own: Arrays) -> list[tuple[int, WeightsParcel]]:
        """Return the neighbours' weights, without those that are not like one's own."""
        most = message.max_examples
        heard = self.open(message, lambda arrays: WeightsParcel.from_arrays(arrays, own, most))
        return self.screen_norms(heard, own, message)

    def screen_norms(
        self, heard: Sequence[tuple[int, Any]], own: Arrays, message: Message
    ) -> list[tuple[int, Any]]:
        """Drop the neighbours with weights of a norm out of all proportion: see :meth:`screen`."""
        norms = [norm_of(own), *(norm_of(parcel.weights) for _, parcel in heard)]
        return self.screen(heard, lambda factor: screen_sizes(norms, factor), message)

    def screen(
        self,
        heard: Sequence[tuple[int, T]],
        judge: Callable[[float], Sequence[BadReply | None]],
        message: Message,
    ) -> list[tuple[int, T]]:
        """Drop the neighbours that a rule over them and the client itself refuses.

        `judge` turns the strategy's ``outlier_factor`` into verdicts, the client's own first.
        """
        verdicts = judge(float(message.config.get("outlier-factor", OUTLIER_FACTOR)))[1:]
        for (sender, _), bad in zip(heard, verdicts, strict=True):
            if bad is not None:
                self.refuse(sender, bad)
        return [each for each, bad in zip(heard, verdicts, strict=True) if bad is None]

    def refuse(self, sender: int, reason: Exception) -> None:
        """Count what a neighbour sent as refused, and log why."""
        self._rejected += 1
        logger.log(WARNING, "dropped what neighbour %d sent: %s", sender, reason)

    def _usable(
        self, parcels: Mapping[int, Arrays], read: Callable[[int, Arrays], T]
    ) -> list[tuple[int, T]]:
        """Read the parcels, in the order of the neighbours; those that are bad are dropped."""
        good = []
        for sender, arrays in sorted(parcels.items()):
            try:
                good.append((sender, read(sender, arrays)))
            except Exception as error:  # a neighbour may send anything
                self.refuse(sender, error)
        return good


def _part(kept: Arrays, part: str) -> Arrays:
    """Return a part of a round's work; empty if it was not kept."""
    begin = f"{part} "
    return {n.removeprefix(begin): array for n, array in kept.items() if n.startswith(begin)}


def round_of(config: Mapping[str, Any]) -> int:
    """Return the number of a message's round."""
    return int(config.get("server-round", 0))


def require_names(arrays: Mapping[str, Any], expected: set[str]) -> None:
    """Raise BadReply unless a parcel has the arrays of these names."""
    if odd := sorted(arrays.keys() ^ expected):
        raise BadReply("arrays", f"names differ from the network's in {odd[:5]}")


def norm_of(weights: Mapping[str, NDArray[Any]]) -> float:
    """Return the Euclidean norm of all arrays of floating point, in float64."""
    flat = [np.asarray(a, np.float64).ravel() for a in weights.values() if a.dtype.kind == "f"]
    return float(np.sqrt(sum(float(own @ own) for own in flat)))
