"""Checkpoints of a strategy's run, for any deployment: what ``start(checkpoint=...)`` writes."""

from collections.abc import Iterator, Mapping
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from .array_archive import ArrayArchive

__all__ = ["RunCheckpoints", "RunState"]

logger = getLogger("flwr")
HISTORIES = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)


class RunState(NamedTuple):
    """A run after a round: the global arrays, the strategy's state, and the result so far."""

    arrays: ArrayRecord
    strategy: dict[str, Any]
    result: Result


class RunCheckpoints:
    """The checkpoints of one run in a folder of its own.

    Files appear whole or not at all, hold checksums, and write what changed since the one before.

    Parameters
    ----------
    folder : Path
        Is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._archive = ArrayArchive(folder)
        self._saved = -1

    def newest(self, initial_arrays: ArrayRecord) -> RunState | None:
        """Return the newest state that is whole; None if there is none.

        Raises
        ------
        ValueError
            If it is of another network than `initial_arrays`.
        """
        self._archive.remove_partial()
        found = self._archive.newest()
        if found is None:
            return None
        state = dict(found.content["strategy"])
        state |= dict(_under("strategy.", found.arrays))
        arrays = dict(_under("arrays.", found.arrays))
        for name, array in initial_arrays.items():
            if name not in arrays or arrays[name].shape != tuple(array.shape):
                raise ValueError(
                    f"checkpoint: {self._archive.folder} holds a run of another network, which "
                    f"differs in {name!r}; start with that network, or choose another folder"
                )
        result = Result(ArrayRecord({name: Array(array) for name, array in arrays.items()}))
        for history in HISTORIES:
            own = found.content["result"][history]
            setattr(result, history, {int(k): MetricRecord(v) for k, v in own.items()})
        self._saved = int(state["server-round"])
        return RunState(result.arrays, state, result)

    def save(
        self, server_round: int, arrays: ArrayRecord, strategy: Mapping[str, Any], result: Result
    ) -> None:
        """Write the state after a round, unless it is there.

        A disk that is full after the first checkpoint does not end the run: it is logged.

        Raises
        ------
        OSError
            If the first checkpoint cannot be written.
        """
        if server_round <= self._saved:
            return
        named = {f"arrays.{name}": array.numpy() for name, array in arrays.items()}
        plain: dict[str, Any] = {}
        for name, value in strategy.items():
            if isinstance(value, np.ndarray):
                named[f"strategy.{name}"] = value
            else:
                plain[name] = value
        content = {
            "strategy": plain,
            "result": {
                history: {str(k): dict(v) for k, v in getattr(result, history).items()}
                for history in HISTORIES
            },
        }
        try:
            self._archive.save(server_round, named, content)
        except OSError as error:
            if self._saved < 0:
                raise
            logger.log(WARNING, "no checkpoint of round %d: %s", server_round, error)
            return
        self._saved = server_round


def _under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in arrays.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), array
