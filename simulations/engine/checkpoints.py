"""What a run needs to go on after it was cut off: checkpoints that write what changed.

A network that no longer changes, the model of a client that was not asked, and the rounds of long
ago are written once: see :mod:`fedntk.strategies.core.array_archive`.

There are no generators in it: all random numbers are drawn from (seed, round, partition).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedntk.strategies.core.array_archive import (
    ArrayArchive,
    OldFormat,
    Version,
    split_arrays,
    under,
)

from ..config.settings import ConfigError

__all__ = ["Best", "Checkpoint", "Checkpoints", "Evaluations"]

ROUNDS = 32  # whose records are one array
Record = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Best:
    """The round whose model was the best so far by the monitored metric.

    Attributes
    ----------
    round : int
        Which.
    value : float
        Of the metric.
    learned : str
        What the model's arrays hold: see :class:`~fedntk.strategies.BaseStrategy`.
    """

    round: int
    value: float
    learned: str = "network"


@dataclass(frozen=True, eq=False)
class Evaluations:
    """Metrics of clients' own evaluations, one entry for each round, partition and metric.

    Attributes
    ----------
    names : tuple of str
        Of the metrics, in the order in which they first came.
    keys : int64, shape (m, 3)
        Round, partition and position of the name. The id of a node that reports no partition may
        have 64 bits; it is the signed number of the same bits, as in Flower's own tables.
    values : float64, shape (m,)
        The metrics.
    """

    names: tuple[str, ...] = ()
    keys: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def with_round(self, server_round: int, metrics: Mapping[int, Mapping[str, float]]) -> Self:
        """Append a round's metrics, given by partition; what is not a number is left out."""
        names = dict.fromkeys([*self.names, *(name for own in metrics.values() for name in own)])
        positions = {name: i for i, name in enumerate(names)}
        keys, values = [], []
        for partition, own in metrics.items():
            for name in sorted(own, key=positions.__getitem__):
                if own[name] == own[name]:
                    keys.append((server_round, _signed(partition), positions[name]))
                    values.append(float(own[name]))
        new = np.array(keys, np.int64).reshape(-1, 3)
        return type(self)(
            tuple(names), np.concatenate([self.keys, new]), np.append(self.values, values)
        )


def _signed(number: int) -> int:
    """Return the int64 of the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after a round.

    Attributes
    ----------
    weights : dict of str to ndarray
        The global model.
    strategy : dict
        The strategy's ``state_dict()``.
    source : dict of str to str
        Checksums of data and split, which must be the same where the run goes on; device and
        threads, which the bits depend on.
    records : list of dict
        Metrics of all rounds so far, from round 0.
    evaluations : Evaluations
        Of the clients so far.
    best : Best or None
        None if no round has the monitored metric.
    best_weights : dict of str to ndarray
        Of that round, if they are not saved yet.
    learned : str
        What the arrays of the last round hold.
    """

    weights: Arrays
    strategy: dict[str, Any]
    source: dict[str, str]
    records: list[Record] = field(default_factory=list)
    evaluations: Evaluations = field(default_factory=Evaluations)
    best: Best | None = None
    best_weights: Arrays = field(default_factory=dict)
    learned: str = "network"

    @property
    def round(self) -> int:
        """The last round in it; -1 before any."""
        return int(self.records[-1]["round"]) if self.records else -1


class Checkpoints:
    """The checkpoints in a run's folder; one process at a time writes them.

    Parameters
    ----------
    folder : Path
        The run's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self._archive = ArrayArchive(self.folder)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write what changed since the last one; that one is kept, older ones are removed."""
        best = () if checkpoint.best_weights else self._best
        self._archive.save(
            checkpoint.round, _to_arrays(checkpoint), _to_content(checkpoint), unchanged=best
        )

    def finish(self, checkpoint: Checkpoint) -> None:
        """Write the last checkpoint whole, and remove all others."""
        arrays = self._archive.read(self._best) | _to_arrays(checkpoint)
        self._archive.save_whole(checkpoint.round, arrays, _to_content(checkpoint))

    def best_weights(self) -> Arrays:
        """Read the weights of the best round so far; empty if no round has the metric.

        Raises
        ------
        DamagedFile
            If a file is not as it was written.
        """
        return under("best.", self._archive.read(self._best))

    @property
    def _best(self) -> list[str]:
        return [name for name in self._archive.names if name.startswith("best.")]

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole, with a warning for each that is not.

        Raises
        ------
        ConfigError
            If there is one that an older version has written.
        """
        try:
            found = self._archive.newest()
        except OldFormat as error:
            raise ConfigError(
                f"{error}; choose another folder with out, or replace that run with again"
            ) from error
        return None if found is None else _from_version(found)


def _to_content(checkpoint: Checkpoint) -> Record:
    """Return what is no array."""
    best = checkpoint.best
    return {
        "strategy": split_arrays("strategy.", checkpoint.strategy)[1],
        "strategy-order": list(checkpoint.strategy),
        "source": checkpoint.source,
        "metrics": list(checkpoint.evaluations.names),
        "learned": checkpoint.learned,
        "best": None if best is None else [best.round, best.value, best.learned],
    }


def _from_version(found: Version) -> Checkpoint:
    arrays, content = found
    state = {**content["strategy"], **under("strategy.", arrays)}
    best = content["best"]
    chunks = [np.zeros((0, 3), np.int64), *under("evaluation-keys.", arrays).values()]
    values = [np.zeros(0), *under("evaluation-values.", arrays).values()]
    return Checkpoint(
        weights=under("weights.", arrays),
        strategy={name: state[name] for name in content["strategy-order"]},
        source=content["source"],
        records=[
            record
            for chunk in under("records.", arrays).values()
            for record in json.loads(chunk.tobytes())
        ],
        evaluations=Evaluations(
            tuple(content["metrics"]), np.concatenate(chunks), np.concatenate(values)
        ),
        best=None if best is None else Best(*best),
        learned=content["learned"],
    )


def _to_arrays(checkpoint: Checkpoint) -> Arrays:
    """Name all arrays of a checkpoint; records and evaluations are arrays of some rounds each."""
    arrays: Arrays = {f"weights.{name}": array for name, array in checkpoint.weights.items()}
    arrays |= {f"best.{name}": array for name, array in checkpoint.best_weights.items()}
    arrays |= split_arrays("strategy.", checkpoint.strategy)[0]
    for start in range(0, len(checkpoint.records), ROUNDS):
        # bytes of an array, as the metadata of safetensors is limited to 100 MB
        text = json.dumps(checkpoint.records[start : start + ROUNDS])
        arrays[f"records.{start}"] = np.frombuffer(text.encode(), np.uint8)
    evaluations = checkpoint.evaluations
    chunk = evaluations.keys[:, 0] // ROUNDS
    for number in np.unique(chunk):
        arrays[f"evaluation-keys.{number}"] = evaluations.keys[chunk == number]
        arrays[f"evaluation-values.{number}"] = evaluations.values[chunk == number]
    return arrays
