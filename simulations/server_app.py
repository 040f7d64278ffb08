"""The server half of the Flower app: checks, runs and records the configured method."""

import json
import os
import time
from collections.abc import Callable
from logging import ERROR, INFO, WARNING, getLogger
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from fedntk.strategies import SeededFedAvg

from .config import Config, ConfigError
from .data import load_data
from .engines import MeteredGrid
from .methods import device_of, evaluate_arrays, make_strategy
from .models import build_model
from .partitions import load_split
from .results import save_model, write_run, write_summary

__all__ = ["app", "serve"]

logger = getLogger("flwr")
app = ServerApp()
OnRound = Callable[[dict[str, float]], None]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run-config says; ``flwr run`` calls this."""
    try:
        config = Config.parse(context.run_config)
    except ConfigError as error:
        logger.log(ERROR, "%s", error)
        raise
    serve(grid, config)


def serve(grid: Grid, config: Config, on_round: OnRound | None = None) -> None:
    """Run a configured method on a grid and write its results into ``config.folder``.

    Parameters
    ----------
    grid : Grid
        With ``config.num_clients`` nodes that run :data:`fedntk.simulations.client_app.app`.
    config : Config
        What to run.
    on_round : callable, optional
        Is given each round's metrics.

    Raises
    ------
    ConfigError
        Before round 1, if data, split, model or nodes do not fit the configuration.
    """
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "rounds.jsonl", "rounds.parquet", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    config.save(folder / "config.toml")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(config.server_threads or os.cpu_count() or 1)
        _serve(grid, config, folder, on_round)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        logger.log(ERROR, "%s", reason)
        write_summary(folder, {"status": "failed", "error": reason})
        raise
    finally:
        torch.set_num_threads(threads)


def _serve(grid: Grid, config: Config, folder: Path, on_round: OnRound | None) -> None:
    data, split = load_data(config), load_split(config)
    model = build_model(config, data.input_shape, data.num_classes)
    device_of(config)
    strategy = make_strategy(config, data, split, model)
    _await_nodes(grid, config)
    metered = MeteredGrid(grid)
    recorder = _Recorder(config, folder, metered, strategy, model, data.test(), on_round)
    initial = ArrayRecord(dict(model.state_dict()))
    strategy.start(
        grid=metered,
        initial_arrays=initial,
        num_rounds=config.rounds,
        train_config=ConfigRecord(),
        evaluate_config=ConfigRecord(),
        evaluate_fn=recorder,
    )
    weights = {name: array.numpy() for name, array in recorder.arrays.items()}
    save_model(folder / "model.safetensors", weights)
    sizes = [len(own) for own in split.clients]
    summary = write_run(
        folder,
        config,
        recorder.records,
        **{"split": split.checksum, "examples-per-client": [min(sizes), max(sizes)]},
    )
    if unchanged := summary["rounds-unchanged"]:
        logger.log(WARNING, "%d of %d rounds left the model as it was", unchanged, config.rounds)
    logger.log(INFO, "results are in %s", folder)


def _await_nodes(grid: Grid, config: Config, patience: float = 30) -> None:
    """Wait for the configured number of nodes, as long as new ones come within `patience` s."""
    seen, since = -1, time.monotonic()
    while (count := len(list(grid.get_node_ids()))) < config.num_clients:
        if count > seen:
            logger.log(INFO, "waiting for nodes: %d of %d are there", count, config.num_clients)
            seen, since = count, time.monotonic()
        elif time.monotonic() > since + patience:
            break
        time.sleep(0.2)
    if count != config.num_clients:
        raise ConfigError(
            f"num-clients: expected {config.num_clients} nodes, got {count}; start the run with "
            f'--federation-config "num-supernodes={config.num_clients}", or set num-clients'
        )


class _Recorder:
    """Evaluates the global model after each round and records what the round did."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        grid: MeteredGrid,
        strategy: SeededFedAvg,
        model: nn.Module,
        test: tuple[Tensor, Tensor],
        on_round: OnRound | None,
    ) -> None:
        self.records: list[dict[str, float]] = []
        self.arrays = ArrayRecord()
        self._config, self._grid, self._strategy = config, grid, strategy
        self._model, self._test, self._on_round = model, test, on_round
        self._path = folder / "rounds.jsonl"
        self._before = (0, 0)
        self._start = time.monotonic()

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seconds = time.monotonic() - self._start
        updated = arrays is not self.arrays  # Flower hands the same record on where none came
        loss, accuracy = evaluate_arrays(self._config, self._model, arrays, *self._test)
        record: dict[str, Any] = {"round": server_round, "accuracy": accuracy, "loss": loss}
        if server_round > 0:
            record["model-updated"] = int(updated)
        self.arrays = arrays
        record |= _numbers(self._strategy.train_metrics.get(server_round), "")
        record |= _numbers(self._strategy.evaluate_metrics.get(server_round), "client-")
        up, down = self._grid.bytes_up, self._grid.bytes_down
        record["bytes-up"] = up - self._before[0]
        record["bytes-down"] = down - self._before[1]
        record["seconds"] = seconds
        self._before = (up, down)
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._on_round is not None:
            self._on_round(record)
        self._start = time.monotonic()
        return MetricRecord({"accuracy": accuracy, "loss": loss})


def _numbers(metrics: MetricRecord | None, prefix: str) -> dict[str, float]:
    """Name the scalars of a record for the table of rounds."""
    items = {} if metrics is None else metrics
    return {f"{prefix}{k}": v for k, v in items.items() if not isinstance(v, list)}
