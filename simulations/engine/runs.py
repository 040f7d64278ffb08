"""Run a configuration, or compare several, in this process or through ``flwr run`` on Ray."""

import contextlib
import copy
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import ERROR, WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from fedntk.ntk.support.files import claimed

from ..checkpoints import Checkpoints, OnRound, Record
from ..config import importing
from ..config.config import OBJECTS, saved_values
from ..config.importing import ID
from ..config.metrics import metrics_of
from ..config.private import named_for
from ..config.settings import ConfigError
from ..configuration import Config
from ..data.data import PASSED
from ..data.load import PASSED_FILE, forget_loaded, load_data
from ..data.own import OwnData
from ..errors import CONTROL, RunFailed, first_line, naming
from ..methods import require_importable_method
from ..methods.method import Method
from ..report.results import (
    MOSTLY_FAILED,
    Run,
    State,
    clear_run,
    describe_replies,
    read_records,
    read_run,
    read_summary,
    require_same,
    run_state,
)
from ._flower import log_from
from .building import code_checksums, load_setup, source_of, with_task
from .client_app import make_app
from .engines import LocalGrid
from .flwr_run import flwr_run
from .processes import cluster_address, end_with
from .progress import Progress, silence_bars
from .progress import progress as show_progress
from .server_app import Prepared, at_work, prepare, private, train
from .writers import check_writers, writing

if TYPE_CHECKING:  # slow to import
    from ..report.comparison import Results

Engine = Literal["local", "ray"]
Runnable = Config | Mapping[str, Any] | str | Path | Method
logger = getLogger("flwr")


def run(
    config: Runnable,
    *,
    engine: Engine = "local",
    workers: int = 1,
    progress: bool = True,
    again: bool = False,
    resume: bool = False,
    writers: Sequence[str] = (),
    on_round: OnRound | None = None,
    data: Any = None,
    model: Any = None,
    **overrides: Any,
) -> Run:
    """Run a configuration and read its results back.

    A finished run is not run again, and one that was interrupted goes on from its newest
    checkpoint, with the same bits as if nothing had happened. A network, a metric or a method that
    was passed as an object may hold anything: it counts as another in each call, unless `resume`.

    Parameters
    ----------
    config : Config, dict of settings, path of a TOML file, name of a method, or Method
        Settings of the run.
    engine : {"local", "ray"}
        ``"local"``: virtual clients in this process, no Ray. ``"ray"``: ``flwr run`` as a
        subprocess, with a SuperLink of its own; Flower's files go into the run's folder. The same
        seed gives the same model bits on both.
    workers : int
        Number of clients that run at the same time on the local engine, each in a thread. On Ray,
        see the settings client-cpus and client-gpus.
    progress : bool
        Whether to show round, clients, accuracy and the time left.
    again : bool
        Whether to remove what is in the folder and run anew.
    resume : bool
        Whether network, metrics and method, if they are objects, are those of the run in the folder
        `out`, which is then returned, or goes on.
    writers : sequence of {"tensorboard", "mlflow"}
        Destinations of each round's metrics besides the run's folder.
    on_round : callable, optional
        Called with the metrics of each round that is run. What it raises ends the run; after
        ``fedntk.simulations.errors.Stopped`` the run counts as interrupted.
    data : OwnData, or what it takes, optional
        Your own examples in place of the setting `dataset`: arrays (x, y), a data frame, a dataset
        of torch or Hugging Face; :class:`~fedntk.simulations.OwnData` also says how they are split.
    model : nn.Module, callable or str, optional
        Your own network in place of the setting `model`: a module, with the weights to start from,
        or a function of (shape of an example, number of classes).
    **overrides
        Settings (snake_case) that win over `config`. `method` may be a Method or the class of a
        strategy, `metrics` a dict of functions: see :class:`~fedntk.simulations.Config`.

    Raises
    ------
    ConfigError
        If a setting cannot work, or the folder holds a run with other settings. Nothing was run.
    RunFailed
        If the run ended early, with the reason. An exception of this process is its cause.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run(Config(rounds=1, out=folder), progress=False)
    >>> list(result.curve().index)
    [0, 1]
    """
    _check(engine, workers, writers, progress=progress)
    config = read_config(config, overrides, data=data, model=model)
    if resume:
        config = with_names_of_before(config)
    else:
        forget_loaded(config.dataset)
    prepared = _prepare(config, engine, again=again)
    or_else = f", or: fedntk run --resume {shlex.quote(str(config.folder))}"
    or_else += " --trust" * (".py:" in repr(config))  # as it names code
    if any(ID.search(getattr(config, name)) for name in OBJECTS):
        or_else = f", out={str(config.folder)!r} and resume=True"
    with show_progress(config.rounds, enabled=progress, or_else=or_else) as shown:
        return _run(config, prepared, engine, workers, writers, shown, on_round, again=again)


def compare(
    configs: Mapping[str, Runnable],
    *,
    seeds: Iterable[int] | str = (0,),
    out: str | Path = "runs/compare",
    engine: Engine = "local",
    workers: int = 1,
    progress: bool = True,
    again: bool = False,
    resume: bool = False,
    writers: Sequence[str] = (),
    data: Any = None,
    model: Any = None,
    **overrides: Any,
) -> "Results":
    """Run each configuration with each seed; return all results, as :func:`load_results`.

    The table shows itself in Jupyter; it has the methods of :class:`Results`, such as ``plot``.

    All settings are checked before the first run. Finished runs are not run again and an
    interrupted one continues where it stopped, so the same call continues a comparison that was
    cut off. A run that fails does not keep the others from running: RunFailed names it afterwards.

    Parameters
    ----------
    configs : dict
        What :func:`run` takes, by the names that tables and pictures will show.
    seeds : iterable of int, or str with commas
        Seeds of split, first weights and sampling, for all configurations.
    out : path
        Folder of the comparison; runs land in ``<out>/<name>/seed-<seed>``.
    engine, workers, progress, again, resume, writers, data, model
        As in :func:`run`.
    **overrides
        Settings (snake_case) that win over all of `configs`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = compare({"wide": Config(width=20), "narrow": Config(width=5)}, seeds=[0, 1],
    ...                     out=folder, rounds=1, progress=False)
    >>> table.groupby(["run", "seed"], sort=False).size().index.tolist()
    [('wide', 0), ('wide', 1), ('narrow', 0), ('narrow', 1)]
    """
    _check(engine, workers, writers, progress=progress)
    planned = _plan(configs, seeds, Path(out), overrides, data=data, model=model)
    if resume:
        planned = [with_names_of_before(config) for config in planned]
    for config in planned:
        forget_loaded(config.dataset)
    prepared = []
    for config in planned:
        with naming(config.name):
            prepared.append(_prepare(config, engine, again=again))
    runs, failed, rounds = [], [], sum(config.rounds for config in planned)
    with show_progress(rounds, len(planned), enabled=progress) as shown:
        for config in planned:
            setup = prepared.pop(0)  # which is free after its run
            try:
                done = _run(config, setup, engine, workers, writers, shown, None, again=again)
                runs.append(done)
            except Exception as error:  # the other runs' results are worth having
                failed.append(f"{config.name}, seed {config.seed}: {error}")
                shown.end("failed")
                logger.error("%s", failed[-1], exc_info=error.__cause__)
    if failed:
        raise RunFailed(
            f"{len(failed)} of {len(planned)} runs failed ({'; '.join(failed)}). The others are in "
            f"{Path(out)}: load_results reads them. Call again to try the failed ones again."
        )
    from ..report.comparison import load_results  # imports pandas and matplotlib

    return load_results(runs)


def _check(engine: str, workers: int, writers: Sequence[str], *, progress: bool) -> None:
    if not progress:
        silence_bars()
    if engine not in get_args(Engine):
        raise ConfigError(f"engine: expected one of {', '.join(get_args(Engine))}, got {engine!r}")
    if workers < 1:
        raise ConfigError(f"workers: expected at least 1, got {workers}")
    if workers > 1 and engine == "ray":
        raise ConfigError(
            "workers is for the local engine; on Ray client-cpus and client-gpus "
            "decide how many clients run at a time"
        )
    check_writers(writers)


def _prepare(config: Config, engine: Engine, *, again: bool) -> Prepared | None:
    """Make what a run needs, and so check it; None if the run is finished."""
    if engine == "ray":
        _check_resources(config)
        require_importable(config)
    with failing_as_run():
        if not again and run_state(config) == "finished":
            return None
        setup, strategy = prepare(config)
        split = setup.split
        indices = np.concatenate([*split.clients, split.shared])
        setup.data.compute_features(indices)  # clients have one thread
        return setup, strategy


def require_importable(config: Config) -> None:
    """Refuse a method, a model or metrics that another process cannot import."""
    require_importable_method(config.method, config.chosen_method)
    a_function = "a function of (input_shape, num_classes)"
    importing.require_importable("model", config.model, what=a_function)
    for place in metrics_of(config.metrics).values():
        importing.require_importable("metrics", place)


def _check_resources(config: Config) -> None:
    """Refuse what would keep Ray waiting for ever, or a client from its device."""
    if cluster_address(config.ray_address) != "local":  # the cluster knows its machines
        return
    for key, asked, most in (
        ("client-cpus", config.client_cpus, os.cpu_count() or 1),
        ("client-gpus", config.client_gpus, torch.cuda.device_count()),
    ):
        if asked > most:
            raise ConfigError(f"{key}: expected at most this machine's {most}, got {asked}")
    if config.device.startswith("cuda") and not config.client_gpus:
        raise ConfigError(
            f"device = {config.device}: set client-gpus, a client's share of a GPU; Ray hides the "
            "GPUs from clients that have none"
        )


def read_config(
    config: Runnable, overrides: Mapping[str, Any], *, data: Any = None, model: Any = None
) -> Config:
    """Return a configuration, or that of a file or a method, with overrides."""
    if isinstance(config, str) and (config.endswith(".toml") or Path(config).is_file()):
        config = Path(config)
    if isinstance(config, Config):
        config = config.replace(**overrides)
    elif isinstance(config, Path):
        config = Config.load(config, **overrides)
    elif isinstance(config, Mapping):
        config = Config(config, **overrides)
    elif isinstance(config, str | type | Method):
        config = Config({"method": config}, **overrides)
    else:
        raise ConfigError(
            "config: expected a Config, a dict of settings, a TOML file, or a method, its name or "
            f"its strategy's class, got {config!r}"
        )
    changes: dict[str, Any] = {}
    if data is not None:
        passed = OwnData.of(data, config)
        if config.mechanism is not None:  # a test set that is drawn from them tells
            passed = replace(passed, test_share=0.0)
        changes = passed.read(standardise=config.standardise).keep(partial(named_for, config))
        if isinstance(data, OwnData) and data.moments:  # for other processes
            changes["moments"] = str(data.moments)
    for name in changes.keys() & overrides.keys():
        if changes[name] != overrides[name]:
            raise ConfigError(
                f"{name}: the data say {changes[name]}, got {overrides[name]}; leave out one"
            )
    if model is not None:
        changes["model"] = model
    return with_task(config.renewed().replace(**changes))


def with_names_of_before(config: Config) -> Config:
    """Return a configuration in which passed objects have their names in the run of its folder."""
    path = config.folder / "config.toml"
    if not config.out and any(ID.search(getattr(config, name)) for name in OBJECTS):
        raise ConfigError("resume: expected out, the folder of the run, got none")
    if not path.exists():
        return config
    return config.renewed(saved_values(config.folder))


def read_seeds(numbers: Iterable[int] | str) -> list[int]:
    """Return seeds, which may be a text with commas between them."""
    try:
        seeds = list(map(int, numbers.split(",") if isinstance(numbers, str) else numbers))
    except (TypeError, ValueError):
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds: expected numbers such as 0,1,2, each once; got {numbers!r}")
    return seeds


def _plan(
    configs: Mapping[str, Runnable],
    seeds: Iterable[int] | str,
    out: Path,
    overrides: Mapping[str, Any],
    **objects: Any,
) -> list[Config]:
    if not isinstance(configs, Mapping) or not configs:
        raise ConfigError(f"configs: expected a dict of names and settings, got {configs!r}")
    seeds = read_seeds(seeds)
    reserved = {"name", "seed", "out"} & overrides.keys()
    if reserved:
        raise ConfigError(f"{', '.join(sorted(reserved))}: set for each run by the comparison")
    folders = {name: name.replace("/", "-").replace("\\", "-").strip(". ") for name in configs}
    if "" in folders.values() or len(set(folders.values())) < len(folders):
        raise ConfigError(f"names: expected names that make different folders, got {list(configs)}")
    methods: dict[str, Any] = {}
    for config in configs.values():  # the overrides may be for the table of any of them
        with contextlib.suppress(ConfigError):
            methods |= read_config(config, {}).methods
    overrides = {**overrides, "methods": methods}
    planned = []
    for name, config in configs.items():
        with naming(name):
            named = read_config(config, overrides, **objects)
        planned += [
            named.replace(name=name, seed=seed, out=out / folders[name] / f"seed-{seed}")
            for seed in seeds
        ]
    return planned


@contextlib.contextmanager
def failing_as_run() -> Iterator[None]:
    """Turn an error into a RunFailed that says it in one line, unless a setting is wrong."""
    try:
        yield
    except (ConfigError, RunFailed):
        raise
    except BlockingIOError as error:  # another process is at work in the folder
        raise ConfigError(str(error)) from error
    except Exception as error:
        raise RunFailed(first_line(error)) from error


def _run(
    config: Config,
    prepared: Prepared | None,
    engine: Engine,
    workers: int,
    writers: Sequence[str],
    shown: Progress,
    report: OnRound | None,
    *,
    again: bool,
) -> Run:
    folder = config.folder
    # the display and the results say what is not logged
    with private(config), failing_as_run(), claimed(folder, "run"), log_from(WARNING):
        (folder / PASSED_FILE).unlink(missing_ok=True)  # of a run that was killed
        if (folder / "flwr").exists():  # what a killed run on Ray left at work
            end_with("FLWR_HOME", folder / "flwr")
        state: State = "new" if again else run_state(config)
        before = _records_before(config, state)
        done = int(before[-1]["round"]) if before else -1
        label = CONTROL.sub(" ", f"{config.label} on {config.dataset}, seed {config.seed}")
        if prepared is not None:
            shown.say(prepared[0].describe_data())
        shown.begin(label, config.rounds, max(done, 0), headline=config.headline)
        with writing(writers, config, before) as write:

            def on_round(record: Record) -> None:
                if record["round"] > done:
                    shown.on_round(record)
                    write(record)
                    if report is not None:
                        report(record)

            if state == "new":
                clear_run(folder, checkpoints=True)
            if state != "finished" and engine == "ray":
                if config.dataset.startswith(f"{PASSED}:"):
                    load_data(config).write(folder / PASSED_FILE)
                try:
                    flwr_run(config, on_round)
                finally:
                    (folder / PASSED_FILE).unlink(missing_ok=True)
            elif state != "finished":
                options: Any = {"workers": workers, "on_answer": shown.on_answer}
                clients = config.num_clients, config.run_config()
                setup, strategy = prepared or prepare(config)
                first = replace(setup, network=copy.deepcopy(setup.network))
                application = make_app(lambda _: first)
                with LocalGrid(application, *clients, **options) as grid, at_work(config):
                    train(grid, setup, strategy, on_round, resume=state == "interrupted")
    run = read_run(folder, passed=config)
    ending = "done"
    if state == "finished":
        ending = f"finished before: read from {folder}; again=True (--again) runs it anew"
    shown.end(", ".join(filter(None, [ending, describe_replies(run.summary)])))
    if run.summary["status"] == MOSTLY_FAILED:
        logger.warning(
            "%s: %s; the log of the clients says why", folder, describe_replies(run.summary)
        )
    return run


def _records_before(config: Config, state: State) -> Sequence[Record]:
    """Metrics of the rounds that need not be run."""
    if state == "interrupted":
        with log_from(ERROR):  # the server says what it cannot use
            checkpoint = Checkpoints(config.folder).newest()
        return [] if checkpoint is None else checkpoint.records
    if state == "new":
        return []
    now: dict[str, Any] = code_checksums(config)
    with contextlib.suppress(ConfigError):  # results can be read without what they depend on
        now["data"] = named_for(config, load_data(config).checksum)
        now |= source_of(load_setup(config))
    require_same(read_summary(config.folder), now, config.folder)
    return read_records(config.folder)
