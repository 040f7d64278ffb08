"""A run's results: written into its folder, and read back. ``docs/results.md`` lists the files."""

import contextlib
import csv
import io
import json
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import torch

from fedntk.ntk.support.arrays import ArrayDict
from fedntk.ntk.support.files import whole
from fedntk.strategies.core.array_archive import load_tensors, save_tensors

from ..checkpoints import Checkpoint, Record
from ..config.config import CACHE, OBJECTS, REPLACE_RUN, BaseConfig, saved_values
from ..config.importing import ID
from ..config.metrics import metrics_of
from ..config.private import named_for
from ..config.settings import ConfigError
from ..configuration import Config
from ..data.load import load_data
from ..errors import RunFailed, first_line

if TYPE_CHECKING:  # slow to import
    import pandas as pd

logger = getLogger("flwr")


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    `summary` has final and best accuracy; last metrics; rounds, bytes and seconds to each target;
    bytes, seconds, machine, checksums. `tables` has pyarrow's ``"rounds"`` and ``"clients"``.
    """

    folder: Path
    config: Config
    summary: dict[str, Any]
    tables: dict[str, Any]

    @cached_property
    def rounds(self) -> "pd.DataFrame":
        """Metrics, tidy: one row for each round and metric."""
        table: pd.DataFrame = self.tables["rounds"].to_pandas()
        return table.assign(run=self.summary["run"])

    @cached_property
    def clients(self) -> "pd.DataFrame":
        """Clients' own evaluations, tidy: one row for each round, partition and metric."""
        table: pd.DataFrame = self.tables["clients"].to_pandas()
        return table.assign(run=self.summary["run"])

    def curve(self, metric: str = "") -> "pd.Series":
        """Return one metric by round, by default the accuracy, or R^2 of real targets."""
        metric = metric or self.quality
        rows = self.rounds[self.rounds.metric == metric]
        return rows.set_index("round").value.rename(metric).rename_axis(None)

    @property
    def quality(self) -> str:
        """Metric of the server's examples: accuracy, or r2 of real targets."""
        return "r2" if self.config.task == "regression" else "accuracy"

    def to_target(self, target: float) -> dict[str, float] | None:
        """Return :func:`to_target` of the method's headline."""
        table = self.rounds.pivot_table(index="round", columns="metric", values="value")
        records: Any = table.reset_index().to_dict("records")
        return to_target(records, target, self.config.headline)

    def _repr_html_(self) -> str:
        import pandas as pd

        from .figures import accuracy_curves, as_html

        shown = ["run", "seed", "rounds", self.quality, "loss", *TOTALS]
        curves = accuracy_curves(
            self.rounds, evaluated_on=self.config.evaluate_on, metric=self.quality
        )
        return as_html(pd.DataFrame([self.summary])[shown].round(3), curves)


TOTALS = ("bytes-up", "bytes-down", "seconds")
State = Literal["new", "interrupted", "finished"]
MOSTLY_FAILED = "mostly-failed"  # all rounds were run, and in most of them most clients failed
OVER = ("finished", MOSTLY_FAILED)  # statuses of runs with results


def run_state(config: BaseConfig) -> State:
    """Say how far a run has come in its folder; with more rounds than before, it is interrupted.

    ConfigError if the folder holds a run with other settings.
    """
    folder = config.folder
    started = (folder / "rounds.jsonl").exists() or (folder / "checkpoints").exists()
    if not started or not (folder / "config.toml").exists():
        return "new"
    saved = saved_values(folder)
    differing = config.differences(saved)
    longer = config.rounds > saved["rounds"]
    if longer:
        del differing["rounds"]
    if differing:
        listed = ", ".join(f"{k} = {old!r} (now {new!r})" for k, (new, old) in differing.items())
        is_same = ""
        if {*differing} <= {*OBJECTS} and all(ID.search(new) for new, _ in differing.values()):
            is_same = "; an object counts as another in each call: if it is the same, resume=True"
        raise ConfigError(
            f"{folder} holds a run with other settings: {listed}; choose another folder with out, "
            f"or {REPLACE_RUN}{is_same}"
        )
    if longer or not (folder / "summary.json").exists():
        return "interrupted"
    return "finished" if read_summary(folder)["status"] in OVER else "interrupted"


def clear_run(folder: Path, *, checkpoints: bool) -> None:
    """Remove a run's results from its folder, and its checkpoints if asked."""
    tables = "summary.json", "rounds.jsonl", "rounds.parquet", "clients.parquet"
    for name in (*tables, "model.safetensors", "best.safetensors"):
        (folder / name).unlink(missing_ok=True)
    stale = [path.parent for path in folder.glob("without-*/unlearned.json")]
    if checkpoints:
        stale += [folder / name for name in ("checkpoints", CACHE, "details")]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)


def write_run(config: BaseConfig, checkpoint: Checkpoint, **more: Any) -> dict[str, Any]:
    """Write a finished run's tables and models; return the summary, with `more` in it."""
    method = config.chosen_method
    folder, headline = config.folder, config.headline
    names = config.label, method.name, config.seed
    rounds, clients = [], []
    for entry in checkpoint.rounds:
        first = *names, int(entry.metrics["round"])
        rounds += [(*first, key, float(x)) for key, x in entry.metrics.items() if key != "round"]
        clients += [(*first, *row) for row in entry.clients]
    columns = {"run": "string", "method": "string", "seed": "int64", "round": "int64"}
    metric = {"metric": "string", "value": "float64"}
    _write_table(folder / "rounds.parquet", columns | metric, rounds)
    _write_table(folder / "clients.parquet", columns | {"partition": "int64"} | metric, clients)
    records, best = checkpoint.records, checkpoint.best
    for file, saved in (("model", checkpoint), ("best", best)):
        if saved is not None:
            described = {"round": saved.round, "learned": saved.learned}
            described |= {"frozen": more["frozen"]} if "frozen" in more else {}
            save_tensors(folder / f"{file}.safetensors", saved.weights, described)
    measured = next(record for record in reversed(records) if "loss" in record)
    quality = ("r2", "mae") if config.task == "regression" else ("accuracy",)
    replies = count_replies(records)
    most_failed = 2 * replies["rounds-mostly-failed"] > replies["rounds-with-replies"]
    return {
        "status": MOSTLY_FAILED if most_failed else "finished",
        **dict(zip(("run", "method", "seed"), names, strict=True)),
        "rounds": checkpoint.round,
        **{name: measured.get(name) for name in quality},
        "loss": measured["loss"],
        "metrics": {name: measured.get(name) for name in metrics_of(config.metrics)},
        "headline": headline,
        "best": best and {"metric": config.monitor, "round": best.round, "value": best.value},
        "to-target": {str(goal): to_target(records, goal, headline) for goal in config.targets},
        "rounds-unchanged": int(sum(1 - record.get("model-updated", 1) for record in records)),
        **replies,
        **{total: sum(record[total] for record in records) for total in TOTALS},
        "machine": machine(),
        **{name: r[name] for name in method.summarised for r in records if name in r},
        **more,
    }


def count_replies(records: Iterable[Record]) -> dict[str, int]:
    """Count the replies of training: those used, those that came or failed, and bad rounds."""
    counts = [(r.get("replies-accepted", 0), r.get("replies-rejected", 0)) for r in records]
    return {
        "replies-used": int(sum(used for used, _ in counts)),
        "replies-asked": int(sum(map(sum, counts))),
        "rounds-with-replies": sum(used + failed > 0 for used, failed in counts),
        "rounds-mostly-failed": sum(used < failed for used, failed in counts),
    }


def describe_replies(summary: Mapping[str, Any]) -> str:
    """Say how many replies a run used of how many, if some failed; else nothing."""
    used, asked = summary.get("replies-used", 0), summary.get("replies-asked", 0)
    if used == asked:
        return ""
    bad, rounds = summary["rounds-mostly-failed"], summary["rounds-with-replies"]
    words = f"{used} of {asked} replies were used"
    return f"{words}; most clients failed in {bad} of {rounds} rounds" if bad else words


def _write_table(path: Path, kinds: dict[str, str], rows: Iterable[Sequence[Any]]) -> None:
    """Write pyarrow's table, by way of CSV: its other ways import pandas, which is slow."""
    text = io.StringIO()
    csv.writer(text).writerows([tuple(kinds), *rows])
    table = pyarrow.csv.read_csv(
        io.BytesIO(text.getvalue().encode()),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=kinds, null_values=[]),
    )
    pyarrow.parquet.write_table(table, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, such as ``summary.json``, whole or not at all."""
    with whole(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def to_target(
    records: Iterable[dict[str, float]], target: float, metric: str = "accuracy"
) -> dict[str, float] | None:
    """Return the round at which a metric reaches `target`, by `round_at`, and its cost.

    Costs are summed from the first round on. None if no round reaches the target.

    Examples
    --------
    >>> costs = {"bytes-up": 10, "bytes-down": 20, "seconds": 0.5}
    >>> to_target([{"round": r, "accuracy": r / 2, **costs} for r in (0, 1, 2)], 0.4)
    {'round': 1, 'bytes-up': 20, 'bytes-down': 40, 'seconds': 1.0}
    """
    records = list(records)
    reached = round_at({int(r["round"]): r.get(metric, np.nan) for r in records}, target)
    if reached is None:
        return None
    spent = [record for record in records if record["round"] <= reached]
    return {"round": reached} | {total: sum(record[total] for record in spent) for total in TOTALS}


def round_at(values: Mapping[int, float], target: float) -> int | None:
    """Return the first round at which the mean of five evaluations is at least `target`.

    The mean is of a round's evaluation, the two before and the two after. The first two rounds have
    fewer before them, and take as many after; the last two have fewer after them. Round 0, before
    any training, counts by itself, and in no other mean.

    `values` has the metric by round, in order; NaN are left out.

    Examples
    --------
    >>> noisy = {1: 0.7, 2: 0.78, 3: 0.81, 4: 0.77, 5: 0.8, 6: 0.83, 7: 0.84, 8: 0.83}
    >>> round_at(noisy, 0.8)  # (0.81 + 0.77 + 0.8 + 0.83 + 0.84) / 5
    5
    """
    measured = {number: value for number, value in values.items() if not np.isnan(value)}
    if measured.pop(0, -np.inf) >= target:
        return 0
    series = [*measured.values()]
    for place, number in enumerate(measured):
        each_side = min(place, 2)
        if np.mean(series[place - each_side : place + each_side + 1]) >= target:
            return number
    return None


def read_run(folder: str | Path, *, trust: bool = False, passed: BaseConfig | None = None) -> Run:
    """Read a finished run; RunFailed says why it did not finish. Options: see `Config.of_run`."""
    folder = Path(folder)
    if not (folder / "summary.json").exists():
        raise FileNotFoundError(f"no finished run in {folder}: summary.json is missing")
    summary = read_summary(folder)
    if summary["status"] not in OVER:
        raise RunFailed(summary["error"] if summary["status"] == "failed" else "interrupted")
    tables = {}
    for name in ("rounds", "clients"):
        path = folder / f"{name}.parquet"
        with _tell_damage(path), pyarrow.parquet.ParquetFile(path) as file:
            tables[name] = file.read()
    return Run(folder, Config.of_run(folder, trust=trust, passed=passed), summary, tables)


def read_records(folder: Path) -> list[Record]:
    """Read the metrics of each round so far; RunFailed if they are damaged."""
    path = folder / "rounds.jsonl"
    with _tell_damage(path, f"; {REPLACE_RUN}"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def read_summary(folder: Path) -> dict[str, Any]:
    """Read ``summary.json``; RunFailed if it is damaged."""
    path = folder / "summary.json"
    with _tell_damage(path, f"; remove it to go on from the checkpoints, or {REPLACE_RUN}"):
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary["status"], str):
            raise TypeError(f"expected a word as status, got {summary['status']!r}")
    return summary


@contextlib.contextmanager
def _tell_damage(path: Path, cure: str = "") -> Iterator[None]:
    """Raise RunFailed with a cure if what is read of a file is not as it was written."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:  # pyarrow's are ValueErrors
        raise RunFailed(f"{path} is damaged: {first_line(error)}{cure}") from error


# checksums in a summary, and in a checkpoint, of what results depend on besides the settings
SOURCES = {
    "data": "data set",
    "split": "split of the data set",
    "network": "network",
    "frozen": "frozen part of the network",
    "sample-outputs": "network",
    "first-weights": "network at the start",
    "model-code": "code of the model",
    "metrics-code": "code of the metrics",
    "method-code": "code of the method",
}


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse a run if a checksum of `now` is another than `before`."""
    for key, name in SOURCES.items():
        old, new = before.get(key, ""), now.get(key, before.get(key, ""))
        same = old == new
        if key == "sample-outputs" and len(old) == len(new) > 0:  # as another machine computes them
            same = np.allclose(old, new, rtol=1e-3, atol=1e-4 * abs(new[-1]), equal_nan=True)
        if not same:
            raise ConfigError(
                f"the {name} has changed since the run in {folder}; restore it, choose another "
                f"folder with out, or {REPLACE_RUN}"
            )


def run_with_its_data(run: Run | str | Path, *, trust: bool = False) -> Run:
    """Return a run, or read it from its folder; refuse it if its data set has changed since."""
    if not isinstance(run, Run):
        run = read_run(run, trust=trust)
    elif trust:
        run = read_run(run.folder, trust=True, passed=run.config)
    checksum = named_for(run.config, load_data(run.config).checksum)
    require_same(run.summary, {"data": checksum}, run.folder)
    return run


def read_runs(
    folders: str | Path | Iterable[str | Path | Run], *, trust: bool = False
) -> list[Run]:
    """Read several finished runs; those of one name get names that say how their settings differ.

    Each of `folders` is a run's, or holds some at any depth; of these, unreadable ones are skipped
    with a warning. FileNotFoundError if a folder holds no finished run, RunFailed if a run that is
    named itself did not finish. `trust`: see `Config.of_run`.
    """
    runs: list[Run] = []
    for place in [folders] if isinstance(folders, str | Path) else folders:
        if isinstance(place, Run):
            runs.append(place)
            continue
        folder = Path(place)
        if (folder / "summary.json").exists():
            runs.append(read_run(folder, trust=trust))
            continue
        count = len(runs)
        for path in sorted(path.parent for path in folder.rglob("config.toml")):
            if not (path / "rounds.jsonl").exists():
                continue  # Flower's own settings, or a run that never began
            try:
                runs.append(read_run(path, trust=trust))
            except (RunFailed, ConfigError, FileNotFoundError) as error:
                logger.warning("%s is left out: %s", path, error)
        if len(runs) == count:
            raise FileNotFoundError(f"no finished run in {folder}")
    return _with_names_apart(runs)


def _with_names_apart(runs: Sequence[Run]) -> list[Run]:
    """Add the settings that differ to the names of different runs of one name."""
    named: dict[tuple[str, int], Run] = {}
    for run in runs:
        alike = [other.config for other in runs if other.summary["run"] == run.summary["run"]]
        keys = {key for other in alike for key in run.config.differences(other)} - {"seed", "name"}
        values = run.config.values()
        differing = (f"{key} = {values[key]}" for key in sorted(keys) if key in values)
        name = ", ".join([run.summary["run"], *differing])
        renamed = replace(run, summary={**run.summary, "run": name})
        first = named.setdefault((name, run.summary["seed"]), renamed)
        if first is not renamed:
            logger.warning("%s is left out: it is the run of %s", run.folder, first.folder)
    names = sorted({name for name, _ in named})
    for run in named.values():
        for table in (run.rounds, run.clients):
            table.attrs["runs"] = names  # of which pictures make one style a run
    return list(named.values())


def load_model(folder: str | Path, which: Literal["model", "best"] = "model") -> ArrayDict:
    """Return name -> array of a run's last or best weights, in the order of its state dict.

    DamagedFile if the file is not as it was written, FileNotFoundError if there is none.
    """
    return load_tensors(Path(folder) / f"{which}.safetensors")[0]


def machine() -> dict[str, Any]:
    """Describe this machine: processor, cores, memory, GPU, and versions."""
    processors = [platform.processor() or platform.machine()]
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        processors = re.findall(r"^model name\s*: (.+?)\s*$", cpu, re.MULTILINE) or processors
    return {
        "processor": processors[0],
        "cores": psutil.cpu_count(),
        "memory-gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
