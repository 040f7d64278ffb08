"""What a run writes, and how it is read back.

A run's folder holds ``config.toml``, ``rounds.jsonl`` (one line a round, as it happens),
``rounds.parquet`` (tidy: run, method, seed, round, metric, value), ``model.safetensors`` and
``summary.json``.
"""

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from safetensors.numpy import load_file, save_file

from .config import Config

__all__ = [
    "Run",
    "RunFailed",
    "load_model",
    "load_results",
    "machine",
    "read_run",
    "rounds_to_target",
    "write_run",
]

logger = getLogger("flwr")


class RunFailed(RuntimeError):  # noqa: N818
    """A run that ended before its last round; the message says why."""


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes
    ----------
    folder : Path
        Where its files are.
    config : Config
        What was run.
    rounds : DataFrame
        Tidy: one row for each round and metric.
    summary : dict
        Final accuracy, rounds to each target, bytes, seconds, machine, the split's checksum.
    """

    folder: Path
    config: Config
    rounds: pd.DataFrame
    summary: dict[str, Any]

    def curve(self, metric: str = "accuracy") -> pd.Series:
        """Return one metric by round."""
        rows = self.rounds[self.rounds.metric == metric]
        return pd.Series(rows.value.to_numpy(), index=rows["round"].to_numpy(), name=metric)


def write_run(
    folder: Path, config: Config, records: Sequence[dict[str, float]], **summary: Any
) -> dict[str, Any]:
    """Write ``rounds.parquet`` and ``summary.json`` of a finished run; return the summary."""
    name = config.name or config.method
    rows = [
        (name, config.method, config.seed, int(record["round"]), metric, float(value))
        for record in records
        for metric, value in record.items()
        if metric != "round"
    ]
    frame = pd.DataFrame(rows, columns=["run", "method", "seed", "round", "metric", "value"])
    frame.to_parquet(folder / "rounds.parquet", index=False)
    last = records[-1]
    content = {
        "status": "finished",
        "run": name,
        "method": config.method,
        "seed": config.seed,
        "rounds": int(last["round"]),
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "rounds-to-target": {
            str(target): rounds_to_target(records, target) for target in config.target_accuracies
        },
        "rounds-unchanged": int(sum(1 - record.get("model-updated", 1) for record in records)),
        "bytes-up": sum(record["bytes-up"] for record in records),
        "bytes-down": sum(record["bytes-down"] for record in records),
        "seconds": sum(record["seconds"] for record in records),
        "machine": machine(),
        **summary,
    }
    write_summary(folder, content)
    return content


def write_summary(folder: Path, content: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    (folder / "summary.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rounds_to_target(records: Iterable[dict[str, float]], target: float) -> int | None:
    """First round whose test accuracy is at least `target`; None if there is none.

    Examples
    --------
    >>> rounds_to_target([{"round": 0, "accuracy": 0.1}, {"round": 1, "accuracy": 0.9}], 0.8)
    1
    """
    return next((int(r["round"]) for r in records if r["accuracy"] >= target), None)


def read_run(folder: str | Path) -> Run:
    """Read a finished run's folder.

    Raises
    ------
    RunFailed
        If the run did not finish, with its reason.
    FileNotFoundError
        If there is no run.
    """
    folder = Path(folder)
    path = folder / "summary.json"
    if not path.exists():
        raise FileNotFoundError(f"no finished run in {folder}: {path.name} is missing")
    summary = json.loads(path.read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        raise RunFailed(summary["error"])
    return Run(
        folder,
        Config.load(folder / "config.toml"),
        pd.read_parquet(folder / "rounds.parquet"),
        summary,
    )


def load_results(folders: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Read several runs: one tidy DataFrame of run, method, seed, round, metric and value.

    Parameters
    ----------
    folders : path or iterable of paths
        Runs' folders, or folders that hold runs' folders. Of the latter, runs that failed are left
        out, with a warning.

    Raises
    ------
    FileNotFoundError
        If a folder holds no run.
    RunFailed
        If a run that is named itself has failed.
    """
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    tables: list[pd.DataFrame] = []
    for folder in map(Path, given):
        if (folder / "summary.json").exists():
            tables.append(read_run(folder).rounds)
            continue
        runs = sorted(path.parent for path in folder.glob("*/summary.json"))
        if not runs:
            raise FileNotFoundError(f"no finished run in {folder}")
        for path in runs:
            try:
                tables.append(read_run(path).rounds)
            except RunFailed as error:
                logger.log(WARNING, "%s is left out: it failed: %s", path, error)
    return pd.concat(tables, ignore_index=True)


def save_model(path: Path, arrays: dict[str, Any]) -> None:
    """Write weights as safetensors."""
    save_file(arrays, path)


def load_model(folder: str | Path) -> dict[str, Any]:
    """Name -> array of a run's final weights, in the order of the file."""
    weights: dict[str, Any] = load_file(Path(folder) / "model.safetensors")
    return weights


def machine() -> dict[str, Any]:
    """Describe this machine: processor, cores, memory, GPU, and versions."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "processor": model,
        "cores": psutil.cpu_count(),
        "memory-gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
