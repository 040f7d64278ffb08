"""What a run needs to go on after it was cut off, in one file a checkpoint.

There are no generators in it: all random numbers are drawn from (seed, round, partition).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tensors import DamagedFile, load_tensors, save_tensors

__all__ = ["Best", "Checkpoint", "best_path", "keep_newest", "newest", "save", "with_rows"]

logger = getLogger("flwr")
KEPT = 2
Record = dict[str, Any]


@dataclass(frozen=True)
class Best:
    """The round whose model was the best so far by the monitored metric."""

    round: int
    value: float


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
    evaluations : dict of str to ndarray of float64
        Columns round, partition and metrics of each client's evaluation so far.
    best : Best or None
        None if no round has the monitored metric.
    best_weights : dict of str to ndarray
        Of that round, while no file has them.
    """

    weights: dict[str, NDArray[Any]]
    strategy: dict[str, Any]
    source: dict[str, str]
    records: list[Record] = field(default_factory=list)
    evaluations: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    best: Best | None = None
    best_weights: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """The last round in it; -1 before any."""
        return int(self.records[-1]["round"]) if self.records else -1


def with_rows(
    columns: Mapping[str, NDArray[np.float64]], rows: Sequence[Mapping[str, float]]
) -> dict[str, NDArray[np.float64]]:
    """Append rows to a table of columns; NaN where there is no value."""
    length = len(next(iter(columns.values()), ()))
    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    empty = np.full(length, np.nan)
    return {
        name: np.append(columns.get(name, empty), [row.get(name, np.nan) for row in rows])
        for name in names
    }


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a run's folder; the one before it is kept, older ones are removed."""
    arrays = {k: v for k, v in checkpoint.strategy.items() if isinstance(v, np.ndarray)}
    # the records are bytes of a tensor, as the metadata of safetensors is limited to 100 MB
    records = np.frombuffer(json.dumps(checkpoint.records).encode(), np.uint8)
    tensors = {
        **{f"weights.{name}": array for name, array in checkpoint.weights.items()},
        **{f"strategy.{name}": array for name, array in arrays.items()},
        **{f"evaluations.{name}": array for name, array in checkpoint.evaluations.items()},
        "records": records,
    }
    best = checkpoint.best
    content = {
        "strategy": {k: v for k, v in checkpoint.strategy.items() if k not in arrays},
        "source": checkpoint.source,
        "best": None if best is None else [best.round, best.value],
    }
    if best is not None and checkpoint.best_weights:
        save_tensors(best_path(folder, best.round), checkpoint.best_weights, {"round": best.round})
    name = f"round-{checkpoint.round:06}" + (f".best-{best.round:06}" if best is not None else "")
    save_tensors(folder / "checkpoints" / f"{name}.safetensors", tensors, content)
    keep_newest(folder, KEPT)


def keep_newest(folder: Path, count: int = 1) -> None:
    """Remove all but the newest checkpoints, and the best weights that none of them speaks of."""
    kept, old = _files(folder)[:count], _files(folder)[count:]
    for path in old:
        path.unlink(missing_ok=True)
    for path in (folder / "checkpoints").glob("best-*.safetensors"):
        if not any(f".{path.name}" in other.name for other in kept):
            path.unlink(missing_ok=True)


def newest(folder: Path) -> Checkpoint | None:
    """Read the newest checkpoint that is whole, with a warning for each that is not."""
    for path in _files(folder):
        try:
            checkpoint = _load(path)
            if checkpoint.best is not None:
                load_tensors(best_path(folder, checkpoint.best.round))
        except (DamagedFile, FileNotFoundError) as error:
            logger.log(WARNING, "%s; going back to what was saved before it", error)
            continue
        return checkpoint
    return None


def best_path(folder: Path, server_round: int) -> Path:
    """File of a round's weights that were the best when it ended."""
    return folder / "checkpoints" / f"best-{server_round:06}.safetensors"


def _files(folder: Path) -> list[Path]:
    """All checkpoints, newest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"), reverse=True)


def _load(path: Path) -> Checkpoint:
    tensors, content = load_tensors(path)
    best = content["best"]
    return Checkpoint(
        weights=dict(_under("weights.", tensors)),
        strategy={**content["strategy"], **dict(_under("strategy.", tensors))},
        source=content["source"],
        records=json.loads(tensors["records"].tobytes()),
        evaluations=dict(_under("evaluations.", tensors)),
        best=None if best is None else Best(*best),
    )


def _under(prefix: str, tensors: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in tensors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), array
