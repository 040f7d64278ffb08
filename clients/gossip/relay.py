"""What the clients of decentralised methods share: weights of their own, and parcels.

Weights live with the client, on its disk; the strategy says of which round they count. What comes
from a neighbour is checked here, as nobody else reads it: a parcel that cannot be used is dropped,
logged and counted.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING, getLogger
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk import BadReply, Predictor
from fedntk.ntk.averages import weighted_sum
from fedntk.ntk.first_weights import drawn_weights
from fedntk.ntk.payloads import OUTLIER_FACTOR, screen_sizes
from fedntk.ntk.support.arrays import require_array
from fedntk.trust import ParcelKeys

from ..core.adapter import OF_A_CLIENT
from ..core.base import ModelClient
from ..core.named_arrays import NamedArrays
from ..core.weights import Scalar, get_weights, set_weights
from ..personal.personal_store import ROUND, RUN, PersonalStore
from .sealed_parcels import OF_SEALING, SealedParcels, kept_key

__all__ = ["Answer", "Message", "RelayClient", "WeightsParcel"]

FROM, TO, ALL = OF_A_CLIENT, "to-", "to-neighbours"  # begin the names of records, or are one
OF_RELAYS = OF_SEALING | {
    RUN, ROUND, "step", "batch", "neighbours", "same-weights", "outlier-factor",
    "max-examples", "keep-both",
}  # fmt: skip
BEFORE = "-before"  # where weights are kept as they were before the end of a round
KEYS = "-keys"  # where the own key is kept, beside the weights
COUNT = "num-examples"  # name of an array beside weights
LARGEST = 1e12  # of a neighbour's weight
MOST_EXAMPLES = 10_000_000  # of a neighbour, where the strategy does not tell
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
        """Check what :meth:`to_arrays` made against a network's arrays.

        Raises
        ------
        BadReply
            If names, shapes or dtypes differ, numbers are not finite, or there are no examples or
            more than `max_examples`.
        """
        if arrays.keys() != {*expected, COUNT}:
            odd = sorted(arrays.keys() ^ {*expected, COUNT})
            raise BadReply("arrays", f"names differ from the network's in {odd[:5]}")
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
    """What a client is to do now.

    Attributes
    ----------
    step : str
        Name of the exchange.
    batch : int
        Which part of its examples it is to use.
    parcels : dict of int to dict of str to ndarray
        Neighbour -> what it sent in the exchange before.
    neighbours : tuple of int
        To whom parcels may go.
    config : dict
        The message's configuration.
    """

    step: str
    batch: int
    parcels: dict[int, Arrays]
    neighbours: tuple[int, ...]
    config: dict[str, Any]

    @property
    def max_examples(self) -> int:
        """Most examples that a neighbour may claim: the strategy's ``max_examples``."""
        return int(self.config.get("max-examples", MOST_EXAMPLES))


class RelayClient(ModelClient):
    """A client that has weights of its own, and neighbours.

    Parameters
    ----------
    cache : path, optional
        Folder for its weights; ``fedntk/personal`` in $XDG_CACHE_HOME or ``~/.cache`` by default:
        see :class:`~fedntk.clients.PersonalisedClient`. A client that finds its weights missing
        begins with the first ones again, and reports ``"restarted"``.
    parcel_keys : ParcelKeys, optional
        With which parcels are sealed, and opened. A client that is given them takes part in no run
        whose strategy does not seal. By default, where the strategy does, the client draws a key
        for the run, and keeps it in its folder.
    **model_options
        Of :class:`ModelClient`.
    """

    replies = "parcels"
    config_keys = OF_RELAYS

    def __init__(
        self,
        *args: Any,
        cache: str | os.PathLike[str] | None = None,
        parcel_keys: ParcelKeys | None = None,
        **model_options: Any,
    ) -> None:
        super().__init__(*args, **model_options)
        self.cache = cache
        self.parcel_keys = parcel_keys
        self._rejected = 0

    @abstractmethod
    def steps(self, message: Message) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step that it knows, by the step's name.

        Each is given the message, and returns receivers (``"to-<j>"``, or ``"to-neighbours"``) with
        arrays, the number of examples, and metrics.
        """

    def answer(self, message: Message) -> Answer:
        """Take the step that a message names.

        Raises
        ------
        ValueError
            If the client knows no such step.
        """
        steps = self.steps(message)
        if message.step not in steps:
            raise ValueError(f"step: expected one of {', '.join(steps)}, got {message.step!r}")
        return steps[message.step](message)

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
            parcels = dict(self._usable(parcels, sealing.opened))
        neighbours = tuple(int(j) for j in config.get("neighbours", ()))  # type: ignore[union-attr]
        message = Message(
            str(config.get("step", "")), int(config.get("batch", 0)), parcels, neighbours, config
        )
        outgoing, num_examples, metrics = self.answer(message)
        if sealing is not None:
            outgoing = sealing.sealed(outgoing)
        metrics["parcels-rejected"] = self._rejected  # always: odd names are left out of the means
        return NamedArrays(outgoing), num_examples, metrics

    def report(self, parameters: list[NDArray[Any]], config: dict[str, Scalar]) -> Fit:
        """Return the client's weights, for the mean model that is evaluated.

        With ``keep-both`` a record ``before`` has those of :meth:`keep_before`, if it took part.
        """
        records = {"arrays": self.own_weights(parameters, config)}
        number = int(config.get("server-round", 0))
        if config.get("keep-both") and int(config.get(ROUND, 0)) == number:
            before = self._kept_weights(number, config, BEFORE)
            records |= {} if before is None else {"before": before}
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
        """Return the public key for which others are to seal, 32 raw bytes."""
        return self._keys(config).public_key

    def _keys(self, config: Mapping[str, Any]) -> ParcelKeys:
        if self.parcel_keys is not None:
            return self.parcel_keys
        return ParcelKeys(kept_key(self.store(config, KEYS).folder))

    def _sealing(self, config: Mapping[str, Any]) -> SealedParcels | None:
        """Return what a message's parcels are opened and sealed with; None if they are not."""
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
        """Return the client's weights as of the round that counts, and whether they were lost.

        Raises
        ------
        ValueError
            If none count yet, and the first ones are lost or not the network's.
        """
        server_round = int(config.get(ROUND, 0))
        if self._first and not server_round:  # they come once
            late = int(config.get("server-round", 0)) > 1  # then they are the model as it is
            first = self._first if late else self._drawn(self._first, config)
            self.store(config).save(0, first)
        kept = self._kept_weights(server_round, config)
        if server_round:
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
        return self.first_weights(config), server_round > 0

    def first_weights(self, config: Mapping[str, Any]) -> Arrays:
        """Return the weights to begin with; of a client that lost them, the model's as it is."""
        kept = self._kept_weights(0, config)
        return self._drawn(self.model_weights(), config) if kept is None else kept

    def _drawn(self, weights: Arrays, config: Mapping[str, Any]) -> Arrays:
        """Return weights of the client's own where clients begin with different ones."""
        if config.get("same-weights", True):
            return weights
        generator = np.random.default_rng([*self.seed, *b"first-weights"])
        return drawn_weights(weights, "he", generator)

    def keep_before(self, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
        """Keep weights within a round, for whoever judges them: averaged ones before training.

        Where averaging ends a round, these are the trained ones.
        """
        if config.get("keep-both"):
            self.store(config, BEFORE).save(int(config.get("server-round", 0)), weights)

    def _kept_weights(
        self, server_round: int, config: Mapping[str, Any], what: str = ""
    ) -> Arrays | None:
        """Return the network's arrays that were kept in a round, in its order; None if missing."""
        kept, names = self.store(config, what).load(server_round), list(self.model.state_dict())
        if kept is None or kept.keys() != set(names):
            return None
        return {name: kept[name] for name in names}

    def keep(self, weights: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
        """Keep weights as those of the round at work, and those that count until it does."""
        needed = int(config.get(ROUND, 0))
        self.store(config).save(int(config.get("server-round", 0)), weights, needed=needed)

    def store(self, config: Mapping[str, Any], what: str = "") -> PersonalStore:
        """Return the folder of the client's weights, or of something else of a round's."""
        return PersonalStore.of(self.cache, config, self.seed, what)

    def load_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Put weights into the model."""
        set_weights(self.model, [weights[name] for name in self.model.state_dict()])

    def model_weights(self) -> Arrays:
        """Return copies of the weights that the model has, by name."""
        return dict(zip(self.model.state_dict(), get_weights(self.model), strict=True))

    # ----------------------------------------------------------------- parcels

    def opened(self, message: Message, parse: Callable[[Arrays], T]) -> list[tuple[int, T]]:
        """Parse the parcels, in the order of the neighbours; those that are bad are dropped."""
        return self._usable(message.parcels, lambda _, arrays: parse(arrays))

    def weights_heard(self, message: Message, own: Arrays) -> list[tuple[int, WeightsParcel]]:
        """Return the neighbours' weights; those that are not like one's own are dropped.

        So are those whose norm is out of all proportion: see :meth:`screened`.
        """
        most = message.max_examples
        heard = self.opened(message, lambda arrays: WeightsParcel.from_arrays(arrays, own, most))
        norms = [norm_of(own), *(norm_of(parcel.weights) for _, parcel in heard)]
        return self.screened(heard, lambda factor: screen_sizes(norms, factor), message)

    def screened(
        self,
        heard: Sequence[tuple[int, T]],
        screen: Callable[[float], Sequence[BadReply | None]],
        message: Message,
    ) -> list[tuple[int, T]]:
        """Drop the neighbours that a rule over them and the client itself refuses.

        Parameters
        ----------
        heard : list of (int, T)
            Neighbours, and what they sent.
        screen : callable
            The strategy's ``outlier_factor`` -> verdicts, the client's own first.
        message : Message
            It tells the factor.
        """
        verdicts = screen(float(message.config.get("outlier-factor", OUTLIER_FACTOR)))[1:]
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


def norm_of(weights: Mapping[str, NDArray[Any]]) -> float:
    """Euclidean norm of all arrays of floating point, in float64."""
    flat = [np.asarray(a, np.float64).ravel() for a in weights.values() if a.dtype.kind == "f"]
    return float(np.sqrt(sum(float(own @ own) for own in flat)))


def mean_weights(parcels: list[WeightsParcel]) -> Arrays:
    """Mean of weights by the numbers of examples, in float64 and cast back: eq. (1).

    Source: Thompson et al., *NTK-DFL*, ICML 2025.
    """
    total = sum(parcel.num_examples for parcel in parcels)
    shares = [parcel.num_examples / total for parcel in parcels]
    return weighted_sum([parcel.weights for parcel in parcels], shares)
