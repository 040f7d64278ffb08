"""Checkpoints of a strategy's run, for any deployment: what ``start(checkpoint=...)`` writes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedntk.ntk.support.files import claimed

from .array_archive import ArrayArchive, checksum
from .averaging import differing, named_arrays, record_of

logger = getLogger("flwr")
HISTORIES = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


@contextmanager
def open_checkpoints(
    folder: str | Path | None, network: ArrayRecord, train_config: Mapping[str, Any]
) -> Iterator["RunCheckpoints | None"]:
    """Claim a folder for the checkpoints of one run; without a folder there are none."""
    if folder is None:
        yield None
        return
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"checkpoint: expected a folder, got the file {folder}")
    with claimed(folder, "checkpoint"):
        yield RunCheckpoints(folder, network, train_config)


class RunCheckpoints:
    """The checkpoints of one run in a folder of its own, which is made.

    A checkpoint must have the `train_config` of the run as it is started now, and the names and
    shapes of its `network`. If it began with other numbers, that is logged; these are not used.
    """

    def __init__(self, folder: Path, network: ArrayRecord, train_config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._archive = ArrayArchive(folder)
        self._network, self._train_config = network, dict(train_config)
        self._saved = -1
        self._first_weights = [checksum(array) for array in named_arrays(network).values()]

    def restore(self, strategy: Any, num_rounds: int) -> Result:
        """Load the newest whole checkpoint; return its result, with the next round's arrays."""
        self._archive.remove_partial()
        state = self._archive.newest()
        if state is None:
            return Result()
        arrays = record_of(state["arrays"])
        self._require_same(state, strategy.network_of(arrays))
        try:
            strategy.load_state_dict(state["strategy"])
        except ValueError as error:
            raise ValueError(
                f"checkpoint: {self.folder} holds another run ({error}); use the same settings, or "
                "another folder"
            ) from error
        self._saved, self._first_weights = strategy.server_round, state["first-weights"]
        if self._saved >= num_rounds:
            logger.warning(
                "%s: all %d rounds have been run before, and none is run now; choose another "
                "folder for another run",
                self.folder,
                self._saved,
            )
        else:
            logger.info("%s: going on after round %d", self.folder, self._saved)
        result = Result(arrays)
        for history in HISTORIES:
            records = state["result"][history].items()
            setattr(result, history, {int(k): MetricRecord(metrics) for k, metrics in records})
        return result

    def _require_same(self, state: Mapping[str, Any], network: ArrayRecord) -> None:
        if names := differing(network, self._network):
            raise ValueError(
                f"checkpoint: {self.folder} holds a run of another network, which differs in "
                f"{names[:5]}; start with that network, or choose another folder"
            )
        if (config := state["train-config"]) != self._train_config:
            raise ValueError(
                f"checkpoint: {self.folder} holds a run with train_config = {config}, got "
                f"{self._train_config}; use the same, or another folder"
            )
        if state["first-weights"] != self._first_weights:
            logger.warning(
                "%s: the run in it began with other weights than those given now, which are not "
                "used",
                self.folder,
            )

    def save(
        self, server_round: int, arrays: ArrayRecord, strategy: Mapping[str, Any], result: Result
    ) -> None:
        """Write the state after a round, unless it is there; a disk that gets full is logged."""
        if server_round <= self._saved:
            return
        state = {
            "train-config": self._train_config,
            "first-weights": self._first_weights,
            "arrays": named_arrays(arrays),
            "strategy": strategy,
            "result": {
                history: {str(k): dict(v) for k, v in getattr(result, history).items()}
                for history in HISTORIES
            },
        }
        try:
            self._archive.save(server_round, state)
        except OSError as error:
            if self._saved < 0:
                raise
            logger.warning("no checkpoint of round %d: %s", server_round, error)
            return
        self._saved = server_round
