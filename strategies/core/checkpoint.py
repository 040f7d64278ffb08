"""Checkpoints of a strategy's run, for any deployment: what ``start(checkpoint=...)`` writes."""

import hashlib
from collections.abc import Callable, Mapping
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from .array_archive import ArrayArchive, checksum, split_arrays, under

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
    network : ArrayRecord
        With which the run is started now. If it goes on from a checkpoint, their names and shapes
        have to be that run's; weights other than its first ones are not used, which is logged.
    train_config : mapping
        Of the run as it is started now. It has to be that of the run in the folder.
    """

    def __init__(self, folder: Path, network: ArrayRecord, train_config: Mapping[str, Any]) -> None:
        self._archive = ArrayArchive(folder)
        self._network, self._train_config = network, dict(train_config)
        self._saved = -1
        self._began = _digest(network)  # with these weights

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._archive.folder

    def newest(self, network_of: Callable[[ArrayRecord], ArrayRecord]) -> RunState | None:
        """Return the newest state that is whole; None if there is none.

        Parameters
        ----------
        network_of : callable
            Picks the network's arrays among the global ones.

        Raises
        ------
        ValueError
            If it is of another network or another configuration.
        """
        self._archive.remove_partial()
        found = self._archive.newest()
        if found is None:
            return None
        state = {**found.content["strategy"], **under("strategy.", found.arrays)}
        arrays = {name: Array(array) for name, array in under("arrays.", found.arrays).items()}
        everything = ArrayRecord(arrays)
        self._require_same(found.content, network_of(everything))
        result = Result(everything)
        for history in HISTORIES:
            own = found.content["result"][history]
            setattr(result, history, {int(k): MetricRecord(v) for k, v in own.items()})
        self._saved = int(state["server-round"])
        self._began = found.content["first-weights"]
        return RunState(result.arrays, state, result)

    def _require_same(self, content: Mapping[str, Any], saved: ArrayRecord) -> None:
        own = (self._network, saved)
        now, then = ({name: tuple(a.shape) for name, a in arrays.items()} for arrays in own)
        if now != then:
            odd = [name for name in {**then, **now} if now.get(name) != then.get(name)]
            raise ValueError(
                f"checkpoint: {self.folder} holds a run of another network, which differs in "
                f"{odd[:5]}; start with that network, or choose another folder"
            )
        if content["train-config"] != self._train_config:
            raise ValueError(
                f"checkpoint: {self.folder} holds a run with train_config = "
                f"{content['train-config']}, got {self._train_config}; use the same, or another "
                "folder"
            )
        if content["first-weights"] != self._began:
            logger.log(
                WARNING,
                "%s: the run in it began with other weights than those given now, which are not "
                "used",
                self.folder,
            )

    def save(
        self,
        server_round: int,
        arrays: ArrayRecord,
        strategy: Mapping[str, Any],
        result: Result,
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
        own, others = split_arrays("strategy.", strategy)
        content = {
            "train-config": self._train_config,
            "first-weights": self._began,
            "strategy": others,
            "result": {
                history: {str(k): dict(v) for k, v in getattr(result, history).items()}
                for history in HISTORIES
            },
        }
        try:
            self._archive.save(server_round, named | own, content)
        except OSError as error:
            if self._saved < 0:
                raise
            logger.log(WARNING, "no checkpoint of round %d: %s", server_round, error)
            return
        self._saved = server_round


def _digest(network: ArrayRecord) -> str:
    return hashlib.sha256(
        "".join(checksum(np.ascontiguousarray(a.numpy())) for a in network.values()).encode()
    ).hexdigest()
