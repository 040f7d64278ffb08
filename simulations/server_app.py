"""The server half of the Flower app: checks, runs and records the configured method."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import ERROR, INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedntk.clients import SGDClient, shrink
from fedntk.strategies import SeededFedAvg

from .checkpoints import Best, Checkpoint, newest, save, with_rows
from .config import Config, ConfigError
from .data import Data, load_data
from .engines import MeteredGrid
from .files import claimed
from .meter import peak_memory, reset_peak_memory
from .methods import device_of, evaluate_arrays, make_client, make_strategy
from .models import build_model
from .parties import projected
from .partitions import Split, load_split
from .results import clear_run, run_state, write_run, write_summary
from .threads import stop_spinning

__all__ = ["app", "prepare", "serve"]

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

    If there are checkpoints of this run already, it goes on from the newest that is whole, to the
    same bits as if it had never been interrupted; if it is finished, nothing is done.

    Parameters
    ----------
    grid : Grid
        With ``config.num_clients`` nodes that run :data:`fedntk.simulations.client_app.app`.
    config : Config
        What to run.
    on_round : callable, optional
        Is given the metrics of each round that is run.

    Raises
    ------
    ConfigError
        Before the first round, if data, split, model, nodes or checkpoint do not fit the
        configuration, or the folder holds a run with other settings.
    BlockingIOError
        If another process is at work in the folder.
    """
    folder = config.folder
    state = run_state(config)
    if state == "finished":
        logger.log(INFO, "finished before; results are in %s", folder)
        return
    threads = torch.get_num_threads()
    with claimed(folder, "server"):
        try:
            torch.set_num_threads(config.server_threads or threads)
            stop_spinning(torch.get_num_threads())
            _serve(grid, config, folder, on_round, resume=state == "interrupted")
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            if not stopped:
                logger.log(ERROR, "%s", reason)
            status = "interrupted" if stopped else "failed"
            write_summary(folder, {"status": status, "error": reason})
            raise
        finally:
            torch.set_num_threads(threads)


class Prepared(NamedTuple):
    """What a run needs besides clients; made, and so checked, before the first round."""

    data: Data
    split: Split
    model: nn.Module
    strategy: SeededFedAvg


def prepare(config: Config) -> Prepared:
    """Load data and split, build network, strategy and, as a trial, a client.

    Raises
    ------
    ConfigError
        If one of them cannot be had.
    """
    data, split = load_data(config), load_split(config)
    model = build_model(config, data.input_shape, data.num_classes)
    device_of(config)
    if isinstance(make_client(config, 0, data, split, model, {}), SGDClient):
        # a first optimizer imports much; not in the first round's time
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return Prepared(data, split, model, make_strategy(config, data, split, model))


def _serve(
    grid: Grid, config: Config, folder: Path, on_round: OnRound | None, *, resume: bool
) -> None:
    checkpoint = newest(folder) if resume else None
    data, split, model, strategy = prepare(config)
    source = _source(config, data, split)
    if checkpoint is not None:
        _require_same(checkpoint.source, source, folder)
    _await_nodes(grid, config)
    clear_run(folder, checkpoints=checkpoint is None)
    config.save(folder / "config.toml")
    metered = MeteredGrid(grid)
    x_test, y_test = data.test()  # standardised and projected once, not in each round
    most = config.test_examples or len(x_test)
    x_test, y_test = projected(config, x_test[:most]), y_test[:most]
    recorder = _Recorder(
        config,
        folder,
        metered,
        strategy,
        lambda arrays: evaluate_arrays(config, model, arrays, x_test, y_test),
        source,
        on_round,
    )
    initial = ArrayRecord(dict(model.state_dict()))
    if checkpoint is not None:
        initial = ArrayRecord({name: Array(array) for name, array in checkpoint.weights.items()})
        strategy.load_state_dict(checkpoint.strategy)
        recorder.go_on_from(checkpoint, initial)
    elif resume:
        logger.log(WARNING, "no checkpoint in %s can be used: starting with round 1", folder)
    try:
        strategy.start(
            grid=metered,
            initial_arrays=initial,
            num_rounds=config.rounds,
            train_config=ConfigRecord(),
            evaluate_config=ConfigRecord(),
            evaluate_fn=recorder,
        )
    except _NoBetterModel:
        logger.log(INFO, "no better model in %d rounds: stopped", config.patience)
    except BaseException:
        recorder.save()
        raise
    recorder.save()
    sizes = [len(own) for own in split.clients]
    summary = write_run(
        folder,
        config,
        recorder.checkpoint,
        **{
            **source,
            "examples-per-client": [min(sizes), max(sizes)],
        },
    )
    shrink(folder / "cache")  # what remains is small: a longer run goes on from it
    if unchanged := summary["rounds-unchanged"]:
        logger.log(WARNING, "%d rounds left the model as it was", unchanged)
    logger.log(INFO, "results are in %s", folder)


def _source(config: Config, data: Data, split: Split) -> dict[str, str]:
    """Say what the bits of a run depend on besides its configuration."""
    return {
        "data": data.checksum,
        "split": split.checksum,
        "device": device_of(config),
        "threads": f"{torch.get_num_threads()} on the server, {config.client_threads} in a client",
    }


def _require_same(before: Mapping[str, str], now: Mapping[str, str], folder: Path) -> None:
    """Refuse to go on with other data; warn where the machine may make other bits."""
    for key, name in (("data", "data set"), ("split", "split of the data set")):
        if before[key] != now[key]:
            raise ConfigError(
                f"the {name} has changed since the checkpoint in {folder}; choose another folder "
                "with out, or replace that run with again"
            )
    for key in ("device", "threads"):
        if before[key] != now[key]:
            logger.log(
                WARNING, "%s: %s before, %s now: bits may differ", key, before[key], now[key]
            )


class _NoBetterModel(Exception):  # noqa: N818
    """Ends a run before its last round."""


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
    """Evaluates the global model after each round, and records and saves what the round did."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        grid: MeteredGrid,
        strategy: SeededFedAvg,
        evaluate: Callable[[ArrayRecord], tuple[float, float]],
        source: dict[str, str],
        on_round: OnRound | None,
    ) -> None:
        self._config, self._folder = config, folder
        self._grid, self._strategy = grid, strategy
        self._evaluate, self._on_round = evaluate, on_round
        self._arrays = ArrayRecord()
        self._saved = -1
        self._start = time.perf_counter()
        self.checkpoint = Checkpoint(weights={}, strategy={}, source=source)
        reset_peak_memory()

    def go_on_from(self, checkpoint: Checkpoint, arrays: ArrayRecord) -> None:
        """Take over what was recorded; `arrays` are what the strategy is started from."""
        self._arrays, self.checkpoint, self._saved = arrays, checkpoint, checkpoint.round
        self._append(*checkpoint.records)

    def save(self) -> None:
        """Write a checkpoint, if there is anything new."""
        if self.checkpoint.round > self._saved:
            save(self._folder, self.checkpoint)
            self._saved = self.checkpoint.round
            self.checkpoint = replace(self.checkpoint, best_weights={})  # a file has them

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seconds = time.perf_counter() - self._start
        if server_round > self.checkpoint.round:  # not what a run that goes on begins with
            self._record(server_round, arrays, seconds)
        last, best = self.checkpoint.records[-1], self.checkpoint.best
        if best is not None and 0 < self._config.patience <= server_round - best.round:
            raise _NoBetterModel
        self._start = time.perf_counter()
        reset_peak_memory()
        return MetricRecord({"accuracy": last["accuracy"], "loss": last["loss"]})

    def _record(self, server_round: int, arrays: ArrayRecord, seconds: float) -> None:
        updated = arrays is not self._arrays  # Flower hands the same record on where none came
        loss, accuracy = self._evaluate(arrays)
        # what clients name as they like comes first, so that it replaces nothing
        record: dict[str, Any] = _numbers(self._strategy.train_metrics.get(server_round), "")
        record |= _numbers(self._strategy.evaluate_metrics.get(server_round), "client-")
        record |= {"round": server_round, "accuracy": accuracy, "loss": loss}
        if server_round > 0:
            record["model-updated"] = int(updated)
        evaluations = []
        if server_round in self._strategy.evaluate_metrics:
            evaluations = sorted(self._strategy.client_evaluations.items())
            record |= _among_clients([metrics for _, metrics in evaluations])
        costs = self._grid.take()
        waiting = costs.pop("seconds-waiting")
        record |= {**costs, "seconds-server": seconds - waiting, "seconds": seconds}
        record["peak-memory"] = peak_memory()

        before = self.checkpoint
        best = _better(before.best, record, self._config.monitor)
        weights = {name: array.numpy() for name, array in arrays.items()}
        self._arrays = arrays
        self.checkpoint = Checkpoint(
            weights=weights,
            strategy=self._strategy.state_dict(),
            source=before.source,
            records=[*before.records, record],
            evaluations=with_rows(
                before.evaluations,
                [
                    {**_numbers(metrics, ""), "round": server_round, "partition": partition}
                    for partition, metrics in evaluations
                ],
            ),
            best=best,
            best_weights=before.best_weights if best is before.best else weights,
        )
        if server_round % self._config.checkpoint_every == 0:
            self.save()
        self._append(record)
        if self._on_round is not None:
            self._on_round(record)

    def _append(self, *records: dict[str, Any]) -> None:
        with (self._folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _among_clients(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean, worst and standard deviation over the clients, each counting once."""
    statistics: dict[str, float] = {}
    for name, worst in (("accuracy", min), ("loss", max)):
        values = [float(own[name]) for own in metrics if isinstance(own.get(name), int | float)]
        if values:
            statistics |= {
                f"client-{name}-mean": float(np.mean(values)),
                f"client-{name}-worst": worst(values),
                f"client-{name}-std": float(np.std(values)),
            }
    return statistics


def _better(best: Best | None, record: Mapping[str, Any], monitor: str) -> Best | None:
    """Return the best so far; the earliest of equals."""
    value = record.get(monitor)
    if value is None or math.isnan(value):
        return best
    sign = -1 if "loss" in monitor else 1
    if best is not None and sign * value <= sign * best.value:
        return best
    return Best(int(record["round"]), float(value))


def _numbers(metrics: Mapping[str, Any] | None, prefix: str) -> dict[str, float]:
    """Name the scalars of a record for the table of rounds."""
    items = {} if metrics is None else metrics
    return {f"{prefix}{k}": v for k, v in items.items() if not isinstance(v, list)}
