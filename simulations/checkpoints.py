"""What a run needs to go on after it was cut off: checkpoints that write what changed.

A checkpoint is a file with the arrays that no file before it holds, and with a list of all its
arrays: for each its checksum and the file it is in. So a network that no longer changes, the model
of a client that was not asked, and the rounds of long ago are written once. When less than half of
what the files hold is needed, a checkpoint is written whole, and the others are removed.

There are no generators in it: all random numbers are drawn from (seed, round, partition).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .files import whole
from .settings import ConfigError
from .tensors import DamagedFile

__all__ = ["Best", "Checkpoint", "Checkpoints", "Evaluations"]

logger = getLogger("flwr")
FORMAT = 2
KEPT = 2  # checkpoints
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
        self._places: dict[str, _Place] = {}  # by checksum, of what the newest checkpoint needs
        self._best: dict[str, str] = {}  # name -> checksum of the best weights

    def save(self, checkpoint: Checkpoint) -> None:
        """Write what changed since the last one; that one is kept, older ones are removed."""
        arrays = _to_arrays(checkpoint)
        if checkpoint.best_weights:
            self._best = {}
        names = {name: _checksum(array) for name, array in arrays.items()} | self._best
        self._best = {name: digest for name, digest in names.items() if name[:5] == "best."}
        there = {path for path in {place.path for place in self._places.values()} if path.exists()}
        known = {digest: place for digest, place in self._places.items() if place.path in there}
        needed = {digest: known[digest] for digest in names.values() if digest in known}
        files = {place.path for place in needed.values()}
        stored = sum(path.stat().st_size for path in files)
        if stored > 2 * sum(place.nbytes for place in needed.values()) + 2**16:
            for name, digest in names.items():  # what only files hold
                if name not in arrays:
                    arrays[name] = _read(needed[digest].path, [digest])[digest]
            needed = {}
        new = {names[name]: a for name, a in arrays.items() if names[name] not in needed}
        self._write(checkpoint, names, new, needed)
        self._remove_all_but(KEPT)

    def _write(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        new: Arrays,
        needed: Mapping[str, "_Place"],
    ) -> None:
        best = checkpoint.best
        manifest = {
            "format": FORMAT,
            "names": dict(names),
            "files": {digest: [place.path.name, place.nbytes] for digest, place in needed.items()},
            "strategy": {
                name: value
                for name, value in checkpoint.strategy.items()
                if not isinstance(value, np.ndarray)
            },
            "strategy-order": list(checkpoint.strategy),
            "source": checkpoint.source,
            "metrics": list(checkpoint.evaluations.names),
            "learned": checkpoint.learned,
            "best": None if best is None else [best.round, best.value, best.learned],
        }
        text = json.dumps(manifest)
        described = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
        path = self.folder / f"round-{checkpoint.round:06}.safetensors"
        with whole(path) as file:
            file.write(save(new, {"fedntk": json.dumps(described)}))
        own = {digest: _Place(path, array.nbytes) for digest, array in new.items()}
        self._places = {**needed, **own}

    def finish(self, checkpoint: Checkpoint) -> None:
        """Write the last checkpoint whole, and remove all others."""
        arrays = self._best_arrays() | _to_arrays(checkpoint)
        names = {name: _checksum(array) for name, array in arrays.items()}
        self._write(checkpoint, names, {names[name]: a for name, a in arrays.items()}, {})
        self._remove_all_but(1)

    def best_weights(self) -> Arrays:
        """Read the weights of the best round so far; empty if no round has the metric.

        Raises
        ------
        DamagedFile
            If a file is not as it was written.
        """
        return {name.removeprefix("best."): array for name, array in self._best_arrays().items()}

    def _best_arrays(self) -> Arrays:
        return {
            name: _read(self._places[digest].path, [digest])[digest]
            for name, digest in self._best.items()
        }

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole, with a warning for each that is not.

        Raises
        ------
        ConfigError
            If there is one that an older version has written.
        """
        for path in self._files():
            try:
                return self._load(path)
            except (DamagedFile, FileNotFoundError) as error:
                logger.log(WARNING, "%s; going back to what was saved before it", error)
        return None

    def _load(self, path: Path) -> Checkpoint:
        manifest = _manifest(path)
        names: dict[str, str] = manifest["names"]
        elsewhere = {
            digest: _Place(self.folder / name, nbytes)
            for digest, (name, nbytes) in manifest["files"].items()
        }
        by_file: dict[Path, list[str]] = {}
        for digest in dict.fromkeys(names.values()):
            place = elsewhere.get(digest)
            by_file.setdefault(place.path if place else path, []).append(digest)
        found: Arrays = {}
        for file, digests in by_file.items():
            found |= _read(file, digests)
        places = {d: elsewhere.get(d, _Place(path, array.nbytes)) for d, array in found.items()}
        arrays = {name: found[digest] for name, digest in names.items()}
        self._places = places
        self._best = {name: digest for name, digest in names.items() if name[:5] == "best."}
        state = {**manifest["strategy"], **dict(_under("strategy.", arrays))}
        best = manifest["best"]
        return Checkpoint(
            weights=dict(_under("weights.", arrays)),
            strategy={name: state[name] for name in manifest["strategy-order"]},
            source=manifest["source"],
            records=[
                record
                for _, chunk in _under("records.", arrays)
                for record in json.loads(chunk.tobytes())
            ],
            evaluations=Evaluations(
                tuple(manifest["metrics"]),
                np.concatenate(
                    [np.zeros((0, 3), np.int64), *dict(_under("evaluation-keys.", arrays)).values()]
                ),
                np.concatenate([np.zeros(0), *dict(_under("evaluation-values.", arrays)).values()]),
            ),
            best=None if best is None else Best(*best),
            learned=manifest["learned"],
        )

    def _files(self) -> list[Path]:
        """All checkpoints, newest first."""
        return sorted(self.folder.glob("round-*.safetensors"), reverse=True)

    def _remove_all_but(self, count: int) -> None:
        """Remove all files but the newest checkpoints and what these need."""
        files = self._files()
        kept = {path.name for path in files[:count]}
        for path in files[:count]:
            try:
                kept |= {name for name, _ in _manifest(path)["files"].values()}
            except DamagedFile:
                continue  # it will not be gone on from
        for path in files[count:]:
            if path.name not in kept:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Place:
    """Where an array is, and how large it is."""

    path: Path
    nbytes: int


def _to_arrays(checkpoint: Checkpoint) -> Arrays:
    """Name all arrays of a checkpoint; records and evaluations are arrays of some rounds each."""
    arrays: Arrays = {f"weights.{name}": array for name, array in checkpoint.weights.items()}
    arrays |= {f"best.{name}": array for name, array in checkpoint.best_weights.items()}
    for name, value in checkpoint.strategy.items():
        if isinstance(value, np.ndarray):
            arrays[f"strategy.{name}"] = value
    for start in range(0, len(checkpoint.records), ROUNDS):
        # bytes of an array, as the metadata of safetensors is limited to 100 MB
        text = json.dumps(checkpoint.records[start : start + ROUNDS])
        arrays[f"records.{start}"] = np.frombuffer(text.encode(), np.uint8)
    evaluations = checkpoint.evaluations
    chunk = evaluations.keys[:, 0] // ROUNDS
    for number in np.unique(chunk):
        arrays[f"evaluation-keys.{number}"] = evaluations.keys[chunk == number]
        arrays[f"evaluation-values.{number}"] = evaluations.values[chunk == number]
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _checksum(array: NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(array.data)
    return digest.hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    """Read what a file says of its checkpoint, and check that it is as it was written."""
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {})["fedntk"])
        if "order" in described:
            raise ConfigError(
                f"{path} is a checkpoint of an older version, which this one cannot go on from; "
                "choose another folder with out, or replace that run with again"
            )
        manifest: dict[str, Any] = described["manifest"]
        expected = described["sha256"]
    except ConfigError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    if hashlib.sha256(json.dumps(manifest).encode()).hexdigest() != expected:
        raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    return manifest


def _read(path: Path, checksums: list[str]) -> Arrays:
    """Read arrays by their checksums, and check these."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {digest: file.get_tensor(digest) for digest in checksums}
    except (SafetensorError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    for digest, array in arrays.items():
        if _checksum(array) != digest:
            raise DamagedFile(f"{path} is damaged: its checksum is not that of its content")
    return arrays


def _under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in arrays.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), array
