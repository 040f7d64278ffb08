"""Make a table: search, run each cell, and read its figures, in processes beside each other.

Each search and each cell has a folder, in which it goes on after a kill. A cell that is done leaves
its figures there as ``figures.parquet``; those of all cells become one table.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from logging import ERROR, getLogger
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save_file

from fedntk.ntk.support.files import claimed, whole

from ..configuration import Config
from ..engine._flower import log_from
from ..engine.building import load_setup
from ..engine.progress import Progress, progress, silence_bars
from ..engine.runs import run
from ..errors import ConfigError, RunFailed, Stopped
from ..report.results import machine, write_json
from ..tuning.search import require_parent
from ..tuning.tuning import tune
from .declaration import TABLES, Cell, Declaration, merged
from .measures import MOVED, NO_ROUND, Value, costs, program_values

FIGURES = "figures.parquet"  # of a cell
CHOICE = "chosen.json"  # of a search
KEYS = ["table", "form", "row", "column", "seed", "measure", "round"]
CHOSEN = "chosen "  # begins the measure that tells what a search chose
logger = getLogger("flwr")


def make(
    declaration: Declaration,
    cells: Sequence[Cell],
    out: str | Path,
    *,
    data_dir: str = "",
    workers: int = 1,
    shown: bool = True,
) -> pd.DataFrame:
    """Run cells that have no figures yet, in `workers` processes; return the figures of all.

    RunFailed names the cells that failed, after all others have ended.
    """
    out = Path(out).expanduser().absolute()
    with claimed(out, "reproduce"):
        place_of_declaration(out, declaration).write_text(declaration.as_text(), encoding="utf-8")
        todo = [cell for cell in cells if not is_done(declaration, out, cell)]
        failed = _run_all(declaration, todo, out, data_dir, workers, shown) if todo else []
    table = collect(declaration, out, cells)
    if failed:
        raise RunFailed(
            f"{len(failed)} of {len(cells)} cells failed ({'; '.join(failed)}); the others are in "
            f"{out}; give the same command to try again"
        )
    return table


def place_of_declaration(out: Path, declaration: Declaration) -> Path:
    """Return where a copy of a declaration stands beside its results."""
    return out / f"{declaration.name.replace('/', '-')}.toml"


def is_done(declaration: Declaration, out: Path, cell: Cell) -> bool:
    """Say whether a cell has a figure of each measure."""
    path = out / cell.place / FIGURES
    if not path.exists():
        return False
    measured = set(pd.read_parquet(path, columns=["measure"]).measure)
    wanted = {*declaration.measures, *(f"{name}, {MOVED}" for name in declaration.nudged)}
    return wanted <= measured | {name.partition(", ")[0] for name in measured}


def collect(declaration: Declaration, out: Path, cells: Iterable[Cell]) -> pd.DataFrame:
    """Return the figures of all cells that are done."""
    done = [out / cell.place / FIGURES for cell in cells if is_done(declaration, out, cell)]
    tables = [pd.read_parquet(path) for path in done]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=KEYS)


# ------------------------------------------------------------------------- processes


def _run_all(
    declaration: Declaration,
    cells: Sequence[Cell],
    out: Path,
    data_dir: str,
    workers: int,
    shown: bool,
) -> list[str]:
    """Run all searches, then the cells; return a line for each cell that failed."""
    searches = list({cell.line_place: cell for cell in cells if cell.search}.values())
    failed: dict[str, BaseException] = {}
    total = sum(rounds_of(cell) for cell in cells) + sum(map(rounds_of_search, searches))
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # so bits do not depend on the number of cores
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)
    try:
        with pool, _ending(pool), progress(total, enabled=shown) as bar:
            bar.begin(declaration.name, total, _rounds_done(out, cells))
            for work, todo in ((_search, searches), (_make_cell, cells)):
                jobs = {
                    pool.submit(work, declaration, cell, out, data_dir): cell
                    for cell in todo
                    if cell.place not in failed
                }
                for cell, error in _failures(jobs, partial(_show, bar, out, cells)):
                    expected = isinstance(error, ConfigError | RunFailed)
                    logger.error("%s: %s", cell.place, error, exc_info=None if expected else error)
                    same_search = [c for c in cells if c.line_place == cell.line_place]
                    lost = same_search if work is _search else [cell]
                    failed |= {lost_cell.place: error for lost_cell in lost}
            bar.end("failed" if failed else "done")
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
    return [f"{place}: {error}" for place, error in failed.items()]


def _failures(
    jobs: Mapping[Future[None], Cell], show: Callable[[], None]
) -> Iterator[tuple[Cell, BaseException]]:
    """Wait for all jobs, and yield those that fail; show how far they are every second."""
    waiting = set(jobs)
    while waiting:
        done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
        for job in done:
            if error := job.exception():
                yield jobs[job], error
        show()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    silence_bars()


@contextmanager
def _ending(pool: ProcessPoolExecutor) -> Iterator[None]:
    """End the pool's processes on an error: the pool itself waits for what they are at."""
    try:
        yield
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        raise


def _show(bar: Progress, out: Path, cells: Sequence[Cell]) -> None:
    done = sum((out / cell.place / FIGURES).exists() for cell in cells)  # cheaper than `is_done`
    bar.state = f"{done} of {len(cells)} cells"
    bar.on_round({"round": _rounds_done(out, cells)})


def _rounds_done(out: Path, cells: Iterable[Cell]) -> int:
    paths = {out / cell.place / "rounds.jsonl" for cell in cells}
    for folder in {out / cell.line_place / "search" for cell in cells if cell.search}:
        paths.update(folder.glob("trials/*/*/rounds.jsonl"))
    return sum(max(path.read_bytes().count(b"\n") - 1, 0) for path in paths if path.exists())


def rounds_of(cell: Cell) -> int:
    """Return the number of rounds of a cell."""
    return int(cell.settings.get("rounds", Config().rounds))


def rounds_of_search(cell: Cell) -> int:
    """Return the number of rounds of the search before a cell."""
    if cell.search is None:
        return 0
    settings = merged(cell.settings, cell.search.settings)
    rounds = int(settings.get("rounds", Config().rounds))
    return rounds * cell.search.trials * len(cell.search.seeds)


# ------------------------------------------------------------------------- one cell


def config_of(declaration: Declaration, cell: Cell, out: Path, data_dir: str) -> Config:
    """Return the configuration of a cell's run.

    In its data set ``{data}`` is the folder of the data, ``{tables}`` that of the declarations that
    come with fedntk, and ``{folder}`` that of the declaration.
    """
    settings = merged({"server-threads": 1, "targets": "0.5"}, cell.settings)
    if "dataset" in settings:
        places = {"{data}": data_dir or "data", "{tables}": str(TABLES)}
        places["{folder}"] = str(declaration.folder)
        for name, place in places.items():
            settings["dataset"] = settings["dataset"].replace(name, place)
    folder = {"data-dir": data_dir} if data_dir else {}
    return Config(settings, folder, seed=cell.seed, out=str(out), name=cell.row)


def _search(declaration: Declaration, cell: Cell, out: Path, data_dir: str) -> None:
    """Choose settings for a row in a column, on validation examples."""
    if cell.search is None:
        return
    folder = out / cell.line_place / "search"
    tried = replace(cell, settings=merged(cell.settings, cell.search.settings), search=None)
    tuning = tune(
        config_of(declaration, tried, folder, data_dir),
        grid=cell.search.grid,
        seeds=cell.search.seeds,
        metric=cell.search.metric,
        last=cell.search.last,
        out=folder,
        progress=False,
    )
    chosen = {key: tuning.trials[key].tolist()[0] for key in cell.search.grid}  # the best is first
    write_json(out / cell.line_place / CHOICE, chosen)


def _make_cell(declaration: Declaration, cell: Cell, out: Path, data_dir: str) -> None:
    chosen: dict[str, Any] = {}
    if cell.search is not None:
        chosen = json.loads((out / cell.line_place / CHOICE).read_text(encoding="utf-8"))
    figures = list(measure(declaration, cell.chosen(chosen), out / cell.place, data_dir))
    for key, value in chosen.items():
        figures.append(Value(CHOSEN + key, NO_ROUND, float(value)))
    (out / cell.place).mkdir(parents=True, exist_ok=True)
    with whole(out / cell.place / FIGURES) as file:
        as_table(cell, figures).to_parquet(file, index=False)


def measure(declaration: Declaration, cell: Cell, folder: Path, data_dir: str) -> Iterator[Value]:
    """Run a cell in a folder, and yield its figures."""
    if declaration.program:
        place = str(declaration.folder / declaration.program)
        settings = {"data-dir": data_dir, **cell.settings}
        started, threads = time.perf_counter(), torch.get_num_threads()
        torch.set_num_threads(1)  # as in the processes of `make`
        try:
            yield from program_values(place, settings, cell.seed)
        finally:
            torch.set_num_threads(threads)
        yield Value("seconds", NO_ROUND, time.perf_counter() - started)
        return
    with log_from(ERROR):
        config = config_of(declaration, cell, folder, data_dir)
        finished = run(config, progress=False, resume=True, on_round=require_parent)
    kept = {cost.measure: cost for cost in costs(finished)}  # a measure of that name shows it
    figures = [
        figure
        for name, one in declaration.measures.items()
        if name not in kept
        for figure in one.of(finished, name, declaration.folder)
    ]
    yield from (*figures, *kept.values())
    if declaration.nudged:
        with log_from(ERROR), tempfile.TemporaryDirectory() as scratch:
            nudged = run(_nudged(config, Path(scratch)), progress=False, on_round=require_parent)
        for name in declaration.nudged:
            (again,) = declaration.measures[name].of(nudged, name, declaration.folder)
            (before,) = (figure for figure in figures if figure.measure == name)
            yield Value(f"{name}, {MOVED}", NO_ROUND, abs(again.value - before.value))
    for name in ("cache", "checkpoints"):  # gigabytes, in some methods
        shutil.rmtree(folder / name, ignore_errors=True)


def _nudged(config: Config, folder: Path) -> Config:
    """Return a run in `folder` whose first weights differ in their last bits."""
    state = load_setup(config).network.state_dict()
    path = folder / "weights.safetensors"
    save_file({k: t * (1 + torch.finfo(t.dtype).eps) if t.is_floating_point() else t
               for k, t in state.items()}, path)  # fmt: skip
    return config.replace(weights=str(path), init="default", out=str(folder / "run"))


def as_table(cell: Cell, figures: Sequence[Value]) -> pd.DataFrame:
    """Return figures as tidy rows, with what made them."""
    table = pd.DataFrame(figures)
    places = {key: getattr(cell, key) for key in ("table", "form", "row", "column", "seed")}
    made = {"settings": cell.digest, "code": code_digest(), "versions": versions()}
    return table.assign(**places, **made, machine=processor())[[*KEYS, "value", *made, "machine"]]


@functools.cache
def code_digest() -> str:
    """Return a checksum of the source files of fedntk."""
    package, digest = Path(__file__).parents[2], hashlib.sha256()
    rooms = [path.parent for path in package.glob("*/__init__.py")]
    for room in sorted(rooms):
        for path in sorted(room.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def versions() -> str:
    """Return the versions of Python and the packages whose arithmetic counts."""
    names = ("fedntk", "flwr", "numpy", "torch")
    packages = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([f"python {platform.python_version()}", *packages])


@functools.cache
def processor() -> str:
    """Return the processor's name, and the number of its cores."""
    described = machine()
    return f"{described['processor']}, {described['cores']} cores"


# ------------------------------------------------------------------------- cost


Task = tuple[str, ...]  # what a round's cost depends on most


def task_of(cell: Cell) -> Task:
    """Return a cell's row, data set and network."""
    return (cell.row, *(str(cell.settings.get(key, "")) for key in ("dataset", "model")))


def probe(
    declaration: Declaration, cells: Sequence[Cell], out: Path, data_dir: str
) -> dict[Task, float]:
    """Return task -> seconds of its first round on this machine, of a cell that is to be run."""
    seconds: dict[Task, float] = {}

    def stop_after_one(record: Mapping[str, float]) -> None:
        seconds[task_of(cell)] = seconds.get(task_of(cell), 0.0) + record["seconds"]
        if record["round"] > 0:
            raise Stopped("one round is enough")

    for cell in cells:
        if task_of(cell) in seconds or declaration.program or is_done(declaration, out, cell):
            continue
        with tempfile.TemporaryDirectory() as folder, log_from(ERROR), suppress(Stopped):
            config = config_of(declaration, cell, Path(folder), data_dir)
            run(config, progress=False, on_round=stop_after_one)
    return seconds


def seconds_left(
    declaration: Declaration, out: Path, cells: Sequence[Cell], a_round: Mapping[Task, float]
) -> float:
    """Return the seconds of one core that cells without figures will take."""
    todo = [cell for cell in cells if not is_done(declaration, out, cell)]
    lines = {cell.line_place: cell for cell in todo}
    rounds = [(task_of(cell), rounds_of(cell)) for cell in todo]
    rounds += [(task_of(cell), rounds_of_search(cell)) for cell in lines.values()]
    return sum(a_round.get(task, 0.0) * number for task, number in rounds)
