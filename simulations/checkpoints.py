"""A run's state after a round, and its checkpoints; no generators are in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord

from fedntk.ntk.support.arrays import ArrayDict
from fedntk.strategies.core.array_archive import ArrayArchive, OldFormat
from fedntk.strategies.core.averaging import record_of

from .config.config import REPLACE_RUN
from .config.settings import ConfigError

Record = dict[str, Any]  # a round's metrics
OnRound = Callable[[Record], None]


class Best(NamedTuple):
    """The best model so far by the monitored metric; `learned` says what its weights hold."""

    round: int
    value: float
    learned: str
    weights: ArrayDict


class Round(NamedTuple):
    """Metrics of a round, and (partition, metric, value) of the clients' own evaluations."""

    metrics: Record
    clients: Sequence[tuple[int, str, float]] = ()

    @classmethod
    def of(cls, metrics: Record, clients: Mapping[int, Mapping[str, float]]) -> "Round":
        """Take clients' metrics by partition, without what is not a number."""
        rows = [
            ((partition + 2**63) % 2**64 - 2**63, name, float(value))
            for partition, evaluated in clients.items()
            for name, value in evaluated.items()
            if value == value
        ]
        return cls(metrics, rows)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after a round."""

    weights: ArrayDict  # the global model
    learned: str  # what its arrays hold
    strategy: dict[str, Any]  # the strategy's state_dict()
    source: dict[str, str]  # checksums of data and split; device and threads, for the bits
    rounds: Sequence[Round] = ()  # all so far, from round 0
    best: Best | None = None  # None if no round has the monitored metric

    @property
    def arrays(self) -> ArrayRecord:
        """The global model, as strategies take it."""
        return record_of(self.weights)

    @property
    def records(self) -> list[Record]:
        """Metrics of all rounds so far."""
        return [entry.metrics for entry in self.rounds]

    @property
    def round(self) -> int:
        """The last round in it; -1 before any."""
        return int(self.rounds[-1].metrics["round"]) if self.rounds else -1


class Checkpoints:
    """The checkpoints in the folder of a run; one process at a time writes them."""

    def __init__(self, folder: Path) -> None:
        self._archive = ArrayArchive(folder / "checkpoints")

    def save(self, checkpoint: Checkpoint, *, last: bool = False) -> None:
        """Write a checkpoint, and keep the one before it unless it is the `last`."""
        self._archive.save(checkpoint.round, vars(checkpoint), keep=1 if last else 2)

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole, with a warning for each that is not."""
        try:
            state = self._archive.newest()
        except OldFormat as error:
            raise ConfigError(
                f"{error}; choose another folder with out, or {REPLACE_RUN}"
            ) from error
        if state is None:
            return None
        rounds = [Round(*fields) for fields in state["rounds"]]
        best = Best(*state["best"]) if state["best"] else None
        return Checkpoint(**{**state, "rounds": rounds, "best": best})
