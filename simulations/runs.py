"""Run a configuration, or compare several, in this process or through ``flwr run`` on Ray."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import ERROR, WARNING, getLogger
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from ._flower import log_from
from .checkpoints import newest
from .client_app import app as client_application
from .config import Config, ConfigError
from .engines import LocalGrid
from .files import claimed
from .flwr_run import end_leftovers, flwr_run
from .progress import Progress, progress
from .results import Run, RunFailed, State, clear_run, load_results, read_run, run_state
from .server_app import prepare, serve
from .writers import check_writers, writing

__all__ = ["Engine", "compare", "run"]

Engine = Literal["local", "ray"]
logger = getLogger("flwr")


def run(
    config: Config | str | Path,
    *,
    engine: Engine = "local",
    workers: int = 1,
    progress: bool = True,
    again: bool = False,
    writers: Sequence[str] = (),
    **overrides: Any,
) -> Run:
    """Run a configuration and read its results back.

    A run that is finished in its folder is not run again, and one that was interrupted goes on from
    its newest checkpoint, with the same bits as if nothing had happened.

    Parameters
    ----------
    config : Config, or path of a TOML file
        What to run.
    engine : {"local", "ray"}
        ``"local"``: virtual clients in this process, no Ray. ``"ray"``: ``flwr run`` as a
        subprocess, with a SuperLink of its own that is stopped afterwards; Flower's files go into
        the run's folder. The same seed gives the same model bits on both.
    workers : int
        On the local engine: clients at work at the same time, each in a thread. On Ray, see the
        settings client-cpus and client-gpus.
    progress : bool
        Show round, clients, accuracy and the time left.
    again : bool
        Remove what is in the folder and run anew.
    writers : sequence of {"tensorboard", "mlflow"}
        Where each round's metrics go besides the run's folder.
    **overrides
        Settings (snake_case) that win over `config`.

    Returns
    -------
    Run
        Its folder, rounds and summary.

    Raises
    ------
    ConfigError
        If a setting cannot work, or the folder holds a run with other settings; nothing has been
        run.
    RunFailed
        If the run ended early on the ray engine, with the reason it gave.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run(Config(rounds=1, out=folder), progress=False)
    >>> list(result.curve().index)
    [0, 1]
    """
    _check(engine, workers, writers)
    config = _settle(config, overrides)
    state = "new" if again else run_state(config)
    if state != "finished":
        prepare(config)
    with _shown([config], progress) as shown:
        return _run(config, state, engine, workers, writers, shown)


def compare(
    configs: Mapping[str, Config | str | Path],
    *,
    seeds: Iterable[int] = (0,),
    out: str | Path = "runs/compare",
    engine: Engine = "local",
    workers: int = 1,
    progress: bool = True,
    again: bool = False,
    writers: Sequence[str] = (),
    **overrides: Any,
) -> pd.DataFrame:
    """Run each configuration with each seed, and read all results back.

    All settings are checked before the first run. Finished runs are not run again and an
    interrupted one goes on where it stopped, so the same call goes on with a comparison that was
    cut off. A run that fails does not keep the others from running.

    Parameters
    ----------
    configs : dict of str to Config or path
        What to compare, by the names that tables and pictures will show.
    seeds : iterable of int
        Of split, first weights and sampling. All configurations share them.
    out : path
        Folder of the comparison; runs land in ``<out>/<name>/seed-<seed>``.
    engine, workers, progress, again, writers
        As in :func:`run`.
    **overrides
        Settings (snake_case) that win over all of `configs`.

    Returns
    -------
    DataFrame
        Tidy: run, method, seed, round, metric, value.

    Raises
    ------
    ConfigError
        If a setting cannot work, or a folder holds a run with other settings; nothing has been run.
    RunFailed
        If some runs failed, after all others have been run.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = compare({"wide": Config(width=20), "narrow": Config(width=5)}, seeds=[0, 1],
    ...                     out=folder, rounds=1, progress=False)
    >>> table.groupby(["run", "seed"], sort=False).size().index.tolist()
    [('wide', 0), ('wide', 1), ('narrow', 0), ('narrow', 1)]
    """
    _check(engine, workers, writers)
    planned = _plan(configs, list(seeds), Path(out), overrides)
    states: list[State] = ["new" if again else run_state(config) for config in planned]
    for config, state in zip(planned, states, strict=True):
        if state != "finished":
            with _named(config):
                prepare(config)
    failed = []
    with _shown(planned, progress) as shown:
        for config, state in zip(planned, states, strict=True):
            try:
                _run(config, state, engine, workers, writers, shown)
            except Exception as error:  # the other runs' results are worth having
                failed.append(f"{config.name}, seed {config.seed}: {error}")
                shown.end("failed")
                logger.log(ERROR, "failed: %s", failed[-1])
    if failed:
        raise RunFailed(
            f"{len(failed)} of {len(planned)} runs failed ({'; '.join(failed)}). The others are in "
            f"{Path(out)}: load_results reads them. Call again to try the failed ones again."
        )
    return load_results([config.folder for config in planned])


def _check(engine: str, workers: int, writers: Sequence[str]) -> None:
    if engine not in get_args(Engine):
        raise ConfigError(f"engine: expected one of {', '.join(get_args(Engine))}, got {engine!r}")
    if workers < 1:
        raise ConfigError(f"workers: expected at least 1, got {workers}")
    check_writers(writers)


def _settle(config: Config | str | Path, overrides: Mapping[str, Any]) -> Config:
    if isinstance(config, Config):
        return config.replace(**overrides)
    return Config.load(config, **overrides)


def _plan(
    configs: Mapping[str, Config | str | Path],
    seeds: Sequence[int],
    out: Path,
    overrides: Mapping[str, Any],
) -> list[Config]:
    if not configs or not seeds:
        raise ConfigError(
            f"expected at least one configuration and seed, got {len(configs)} and {len(seeds)}"
        )
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds: expected each once, got {seeds}")
    reserved = {"name", "seed", "out"} & overrides.keys()
    if reserved:
        raise ConfigError(f"{', '.join(sorted(reserved))}: set for each run by the comparison")
    folders = {name: name.replace("/", "-").replace("\\", "-").strip(". ") for name in configs}
    if "" in folders.values() or len(set(folders.values())) < len(folders):
        raise ConfigError(f"names: expected names that make different folders, got {list(configs)}")
    return [
        _settle(config, overrides).replace(
            name=name, seed=seed, out=str(out / folders[name] / f"seed-{seed}")
        )
        for name, config in configs.items()
        for seed in seeds
    ]


@contextlib.contextmanager
def _named(config: Config) -> Iterator[None]:
    """Say which configuration an error is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{config.name}: {error}") from error


@contextlib.contextmanager
def _shown(configs: Sequence[Config], enabled: bool) -> Iterator[Progress]:
    total = sum(config.rounds for config in configs)
    with progress(total, len(configs), enabled=enabled) as shown:
        yield shown


def _run(
    config: Config,
    state: State,
    engine: Engine,
    workers: int,
    writers: Sequence[str],
    shown: Progress,
) -> Run:
    label = f"{config.name or config.method} on {config.dataset}, seed {config.seed}"
    if state == "finished":
        shown.begin(label, config.rounds, done=config.rounds)
        with contextlib.suppress(BlockingIOError), claimed(config.folder, "run"):
            end_leftovers(config.folder)
        shown.end("finished before")
        return read_run(config.folder)
    done = -1
    if state == "interrupted":
        with log_from(ERROR):  # the server says what it cannot use
            checkpoint = newest(config.folder)
        done = -1 if checkpoint is None else checkpoint.round
    shown.begin(label, config.rounds, max(done, 0))

    def on_round(record: Mapping[str, Any]) -> None:
        if record["round"] > done:
            shown.on_round(record)
            write(record)

    try:
        with (
            claimed(config.folder, "run"),
            writing(writers, config, fresh=done < 0) as write,
            log_from(WARNING),  # the display and the results say the rest
        ):
            end_leftovers(config.folder)
            if state == "new":
                clear_run(config.folder, checkpoints=True)
            if engine == "ray":
                flwr_run(config, on_round)
            else:
                with LocalGrid(
                    client_application,
                    config.num_clients,
                    config.values(),
                    workers=workers,
                    on_answer=shown.on_answer,
                ) as grid:
                    serve(grid, config, on_round)
        result = read_run(config.folder)
    except KeyboardInterrupt:
        shown.end(f"interrupted; go on with: fedntk run --resume {config.folder}")
        raise
    except BlockingIOError as error:
        raise ConfigError(str(error)) from error
    shown.end()
    return result
