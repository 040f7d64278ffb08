"""Metrics of each round for TensorBoard and MLflow."""

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..checkpoints import OnRound, Record
from ..configuration import Config
from ..errors import ConfigError

Records = Sequence[Record]


@contextlib.contextmanager
def _tensorboard(config: Config, before: Records) -> Iterator[OnRound]:
    """Write event files into ``tensorboard`` in the run's folder, from round 0 on."""
    from torch.utils.tensorboard import SummaryWriter

    folder = config.folder / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:

        def on_round(record: Record) -> None:
            for name, value in _metrics(record):
                writer.add_scalar(name, value, int(record["round"]))

        yield on_round


@contextlib.contextmanager
def _mlflow(config: Config, before: Records) -> Iterator[OnRound]:
    """Log to a run of MLflow's tracking server, not its active one; one goes on with its run."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedntk")
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    remembered, logged = config.folder / "mlflow-run-id", -1
    if before and remembered.exists():
        run_id = remembered.read_text(encoding="utf-8")
        history = client.get_metric_history(run_id, "accuracy")
        logged = max((metric.step for metric in history), default=-1)
    else:
        run_name = f"{config.label}-{config.seed}"
        run_id = client.create_run(experiment_id, run_name=run_name).info.run_id
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(run_id, encoding="utf-8")
        params = [Param(key, str(value)) for key, value in config.values().items()]
        client.log_batch(run_id, params=params)

    def on_round(record: Record) -> None:
        step, now = int(record["round"]), int(time.time() * 1000)
        if step > logged:
            metrics = [Metric(name, value, now, step) for name, value in _metrics(record)]
            client.log_batch(run_id, metrics=metrics)

    try:
        yield on_round
    except BaseException:
        client.set_terminated(run_id, "KILLED")
        raise
    client.set_terminated(run_id)


# name, which is also the module that is needed and the extra that brings it -> writer
WRITERS: dict[str, Any] = {"tensorboard": _tensorboard, "mlflow": _mlflow}


def check_writers(names: Sequence[str]) -> None:
    """Refuse unknown writers, and those that need a package that is not installed."""
    for name in names:
        if name not in WRITERS:
            raise ConfigError(f"writers: expected some of {', '.join(WRITERS)}, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"writer {name}: not installed; pip install 'fedntk[{name}]'")


@contextlib.contextmanager
def writing(names: Sequence[str], config: Config, before: Records) -> Iterator[OnRound]:
    """Yield a function that writes a round's metrics to all writers; write the rounds `before`."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(WRITERS[name](config, before)) for name in names]

        def on_round(record: Record) -> None:
            for write in opened:
                write(record)

        for record in before:
            on_round(record)
        yield on_round


def _metrics(record: Record) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in record.items() if name != "round"]
