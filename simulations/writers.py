"""Metrics of each round for TensorBoard and MLflow, where they are asked for."""

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .config import Config, ConfigError

__all__ = ["WRITERS", "check_writers", "writing"]

OnRound = Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def _tensorboard(config: Config, *, fresh: bool) -> Iterator[OnRound]:
    """Write event files into ``tensorboard`` in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    folder = config.folder / "tensorboard"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:

        def on_round(record: Mapping[str, Any]) -> None:
            for name, value in _metrics(record):
                writer.add_scalar(name, value, int(record["round"]))

        yield on_round


@contextlib.contextmanager
def _mlflow(config: Config, *, fresh: bool) -> Iterator[OnRound]:
    """Log to a run in the experiment ``fedntk``, at the tracking server that MLflow is set to."""
    import mlflow

    remembered = config.folder / "mlflow-run-id"
    mlflow.set_experiment("fedntk")
    known = None if fresh or not remembered.exists() else remembered.read_text(encoding="utf-8")
    name = f"{config.name or config.method}-{config.seed}"
    with mlflow.start_run(run_id=known, run_name=None if known else name) as active:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(active.info.run_id, encoding="utf-8")
        if known is None:
            mlflow.log_params(config.values())

        def on_round(record: Mapping[str, Any]) -> None:
            mlflow.log_metrics(dict(_metrics(record)), step=int(record["round"]))

        yield on_round


# name, which is also the module that is needed and the extra that brings it -> writer
WRITERS: dict[str, Any] = {"tensorboard": _tensorboard, "mlflow": _mlflow}


def check_writers(names: Sequence[str]) -> None:
    """Refuse unknown writers and those whose package is not installed.

    Raises
    ------
    ConfigError
        With the name, and what to install.
    """
    for name in names:
        if name not in WRITERS:
            raise ConfigError(f"writers: expected some of {', '.join(WRITERS)}, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"writer {name}: not installed; pip install 'fedntk[{name}]'")


@contextlib.contextmanager
def writing(names: Sequence[str], config: Config, *, fresh: bool) -> Iterator[OnRound]:
    """Open the named writers for a run; what is yielded takes each round's record."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(WRITERS[name](config, fresh=fresh)) for name in names]

        def on_round(record: Mapping[str, Any]) -> None:
            for write in opened:
                write(record)

        yield on_round


def _metrics(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in record.items() if name != "round"]
