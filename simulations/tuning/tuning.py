"""Search for settings on examples that nobody trains on; the test set plays no part."""

import itertools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, cast, get_args

import optuna
import pandas as pd
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fedntk.ntk.options import parts_of
from fedntk.ntk.support.files import claimed

from ..config.config import INCIDENTAL, OBJECTS
from ..config.importing import ID
from ..config.settings import ConfigError, Value
from ..configuration import Config
from ..data.load import forget_loaded
from ..engine.building import code_checksums
from ..engine.progress import progress as show_progress
from ..engine.progress import silence_bars
from ..engine.runs import Runnable, failing_as_run, read_config, read_seeds, require_importable
from ..engine.server_app import prepare
from ..errors import RunFailed
from ..methods import find_method
from ..report.report import write_tuning_report
from .search import Pruner, Sampler, Search, Searched, Space, open_study, run_in_processes

# settings that say where to run or what to measure, not how a method learns
FIXED = INCIDENTAL | {
    *("seed", "name", "dataset", "test-examples", "test-examples-per-domain", "evaluate-on"),
    *("validation-examples", "validation-clients", "private-test", "local-test-fraction"),
}
SOURCE = "source of "  # before what names files, in the description of a search
logger = getLogger("flwr")


@dataclass(frozen=True, eq=False)
class Tuning:
    """What a search found.

    Attributes
    ----------
    best : Config
        The best combination, set to be evaluated on the test set; also in ``best.toml``.
    trials : DataFrame
        One row a trial, the best first: trial, state, mean and std of the metric over the seeds,
        the settings searched, rounds and seconds of all seeds together, error.
    folder : Path
        Folder of the search; its ``report`` holds the table and a picture.
    """

    best: Config
    trials: pd.DataFrame
    folder: Path


def tune(
    config: Runnable,
    *,
    grid: Mapping[str, Sequence[Value]] | None = None,
    random: Mapping[str, Sequence[Value]] | None = None,
    trials: int = 20,
    sampler: Sampler = "random",
    sampler_seed: int = 0,
    seeds: Iterable[int] | str = (0,),
    metric: str = "accuracy",
    last: int = 5,
    prune: Pruner = "none",
    parallel: int = 1,
    out: str | Path = "runs/tune",
    progress: bool = True,
    again: bool = False,
    resume: bool = False,
    data: Any = None,
    model: Any = None,
    **overrides: Any,
) -> Tuning:
    """Search for the best values of some settings, by validation examples or validation clients.

    The same call goes on with a search that was cut off; finished trials are not run again.

    Parameters
    ----------
    config : Config, path of a TOML file, name of a method, or Method
        All other settings, `overrides` (snake_case) over them. It holds out validation-examples or
        validation-clients, or with private-test a local-test-fraction of each client's examples.
    grid : dict of str to list
        Key -> values. Every combination is run. Give `grid` or `random`.
    random : dict of str to tuple or list
        Key -> ``(low, high)``, ``(low, high, "log")``, or a list of values to draw from.
    trials : int
        Number of combinations drawn. With more than before, a finished search goes on.
    sampler : {"random", "tpe"}
        How to draw, from `sampler_seed`: tpe draws near what was good so far.
    seeds : iterable of int, or str with commas
        Every combination is run with each of them.
    metric, last : str, int
        What the setting monitor may name, such as ``"accuracy"``, which with real targets is
        ``"r2"``, or of the setting metrics. A
        run's value is its mean over so many rounds at the end.
    prune : {"none", "median", "halving"}
        When to end trials early: if worse than the median of earlier trials at the same round, or
        by successive halving.
    parallel : int
        Trials that run at a time, each in another process.
    out, again : path, bool
        Folder of the search; whether to remove the search that is in it.
    progress : bool
        Whether to show rounds, trials, the best value and the time left.
    resume, data, model
        As in :func:`~fedntk.simulations.run`.

    Raises
    ------
    ConfigError
        A setting cannot work, nothing is held out, or the folder holds another search; nothing has
        been run.
    RunFailed
        No trial was finished.

    Examples
    --------
    >>> import tempfile
    >>> config = Config(method="fedavg", rounds=2, validation_examples=200)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = tune(config, grid={"learning-rate": [1e-6, 0.3]}, out=folder, progress=False)
    >>> found.best.learning_rate
    0.3
    """
    if not progress:
        silence_bars()
    base = read_config(config, overrides, data=data, model=model)
    if base.task == "regression" and metric == "accuracy":  # which is the default
        metric = "r2"
    base = base.replace(evaluate_on="validation", out="")
    forget_loaded(base.dataset)
    if bool(grid) == bool(random):
        raise ConfigError("expected the settings to search as grid or as random, and not as both")
    for name, value, kind in (("sampler", sampler, Sampler), ("prune", prune, Pruner)):
        if value not in (choices := get_args(kind)):
            raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    for name, number in (("trials", trials), ("last", last), ("parallel", parallel)):
        if number < 1:
            raise ConfigError(f"{name}: expected at least 1, got {number}")
    searched = grid or random or {}
    if isinstance(methods := searched.get("method"), list | tuple):
        base = base.knowing(*methods)
    space: Space = dict(
        _dimension(base, key, values, ranged=not grid) for key, values in searched.items()
    )
    numbers = read_seeds(seeds)
    _check_metric(base, metric)
    if parallel > 1:
        require_importable(base)
    combinations = _combinations(base, space, each_once=not grid)
    checksums, rounds = _prepare(base, combinations, numbers)
    folder = Path(out).expanduser().absolute()
    described = {
        **{key: value for key, value in base.values().items() if key not in INCIDENTAL},
        **{key: list(_ends(values)) if grid else str(values) for key, values in space.items()},
        **{"seeds": numbers, "metric": metric, "last": last, "prune": prune},
        "drawn": "all" if grid else f"{sampler}, seed {sampler_seed}",
        **checksums,
    }
    with failing_as_run(), claimed(folder, "tune"):
        if again:
            for name in ("search.db", "best.toml"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "trials", ignore_errors=True)
        with open_study(folder, metric, prune, rounds) as study:
            grown = list(space) if grid else []
            _require_same_search(study, described, grown, folder, resume=resume)
            for combination in combinations if grid else []:
                study.enqueue_trial(combination, {"values": combination}, skip_if_exists=True)
            drawn = {} if grid else space, 0 if grid else trials, sampler, sampler_seed
            search = Search(study, folder, base, numbers, metric, last, rounds, *drawn)
            most = max(len(study.trials), search.trials) * len(numbers) * rounds
            with show_progress(most, enabled=progress) as shown:
                title = f"tuning {base.label} on {base.dataset}"
                shown.begin(title, most, search.rounds_done())
                show = partial(search.show, shown)
                if parallel == 1:
                    search.run(show)
                else:
                    run_in_processes(search, parallel, show)
                show()
                shown.end()
            return _conclude(search, space)


# --------------------------------------------------------------------- what is searched


def _dimension(base: Config, name: str, values: Any, *, ranged: bool) -> tuple[str, Searched]:
    """Return a key and what it may be; each value is checked."""
    home, name = base.home_of(name)
    key, checked = home.key(name), partial(home.checked, name)
    if key in FIXED:
        raise ConfigError(f"{key} cannot be searched: it has no part in how a method learns")
    if ranged and isinstance(values, tuple):
        log = values[2:] == ("log",)
        if len(values) == 2 or log:
            low, high = (cast(Any, checked(value)) for value in values[:2])
            if type(low) in (int, float) and low < high and (low > 0 or not log):
                kind = IntDistribution if type(low) is int else FloatDistribution
                return key, kind(low, high, log=log)
        raise ConfigError(
            f"{key}: expected low and high, and log or nothing, with low < high, and above 0 for "
            f"log; or a list of values; got {values!r}"
        )
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{key}: expected a list of values, got {values!r}")
    choices = [checked(value) for value in values]
    if not choices or len(set(choices)) < len(choices):
        raise ConfigError(f"{key}: expected at least one value, each once, got {choices}")
    option = home.setting_of(name)
    return key, CategoricalDistribution([option.plain(value) for value in choices])


def _ends(values: Searched) -> Sequence[Any]:
    if isinstance(values, CategoricalDistribution):
        return values.choices
    return values.low, values.high


def _combinations(base: Config, space: Space, *, each_once: bool) -> list[dict[str, Value]]:
    """Return all combinations, or as many as have each value and end of a range."""
    names = _ends(space["method"]) if "method" in space else (base.method,)
    methods = [find_method(name, base.methods)[1].name for name in names]
    for key in space:
        if "." in key and key.partition(".")[0] not in (*methods, *parts_of(Config)):
            raise ConfigError(f"{key} has no effect with method = {', '.join(methods)}")
    ends = [_ends(values) for values in space.values()]
    rows: Iterable[tuple[Any, ...]] = itertools.product(*ends)
    if each_once:
        longest = range(max(map(len, ends)))
        rows = [tuple(values[i % len(values)] for values in ends) for i in longest]
    return [dict(zip(space, values, strict=True)) for values in rows]


def _check_metric(base: Config, metric: str) -> None:
    base.replace(monitor=metric, patience=0)  # refuses one that is unknown or is not measured
    if metric.startswith("client-") and not (base.validation_clients or base.private_test):
        raise ConfigError(f"metric = {metric} needs validation-clients, or private-test = true")
    headline = base.headline
    if metric in ("accuracy", "r2", "loss") and headline.startswith("client-"):
        judged = f"{base.chosen_method.name} is judged by metric = {headline}"
        logger.warning("metric = %s is of the server's model; %s", metric, judged)


def _prepare(
    base: Config, combinations: Sequence[dict[str, Value]], seeds: Sequence[int]
) -> tuple[dict[str, str], int]:
    """Prepare a run of each combination and seed; return their sources' checksums, and most rounds.

    A grid that grows may name more sources, but must not change one.
    """
    tried: list[dict[str, Value]] = [{**values, "seed": seeds[0]} for values in combinations]
    tried += [{**combinations[0], "seed": seed} for seed in seeds[1:]]
    rounds, checksums = [], dict[str, str]()
    for values in tried:
        try:
            config = base.replace(**values)
            if config.rounds < 1:
                raise ConfigError("rounds: expected at least 1, got 0")
            with failing_as_run():
                setup, _ = prepare(config)
                checksums["data"] = setup.data.checksum[:12]
                for name, digest in code_checksums(config).items():
                    if digest:
                        named = config.values()[name.removesuffix("-code")]
                        checksums[f"{SOURCE}{ID.sub('', str(named))}"] = digest
        except (ConfigError, RunFailed) as error:
            listed = ", ".join(f"{key} = {value}" for key, value in values.items())
            raise type(error)(f"{error} (with {listed})") from error
        rounds.append(config.rounds)
    return checksums, max(rounds)


def _require_same_search(
    study: optuna.Study,
    described: dict[str, Any],
    grid: Sequence[str],
    folder: Path,
    *,
    resume: bool,
) -> None:
    """Store what is searched, or refuse another search than before; a grid may have grown.

    To `resume` is to say that passed objects are the same.
    """
    before = study.user_attrs.get("described", described)
    differing = []
    for key in {**before, **described}:
        old, new = before.get(key), described.get(key)
        grown = key in grid and isinstance(old, list) and {*old} <= {*described[key]}
        grown |= key.startswith(SOURCE) and old is None
        if resume and key in OBJECTS and isinstance(old, str):
            old, new = (ID.sub("", str(name)) for name in (old, new))
        if old != new and not grown:
            differing.append(f"{key} = {old!r} (now {new!r})")
    if differing:
        raise ConfigError(
            f"{folder} holds another search: {', '.join(differing)}; choose another folder with "
            "out, or replace that search with again=True (--again); an object counts as another in "
            "each call: if it is the same, resume=True"
        )
    study.set_user_attr("described", described)


# ------------------------------------------------------------------------- what was found


def _conclude(search: Search, space: Space) -> Tuning:
    """Choose the best trial; write table, picture and configuration."""
    table, base, folder = search.table(), search.base, search.folder
    errors = zip(table["trial"], table["error"], strict=True)
    failed = [f"trial {number} failed: {error}" for number, error in errors if error]
    if table["state"][0] != "finished":
        reason = failed[0] if failed else "all were pruned"
        raise RunFailed(f"no trial was finished; {reason}; give the same command to try again")
    values = {key: table[key].tolist()[0] for key in space}
    at_edges = (_note_of_edge(base, key, values[key], options) for key, options in space.items())
    notes = [*filter(None, at_edges), *failed]
    for note in notes:
        logger.warning("%s", note)
    best = base.replace(**{**values, "evaluate-on": "test"})
    best.save(folder / "best.toml")
    lines = [
        f"{base.chosen_method.name} on {base.dataset}: {search.metric} on validation examples, as "
        f"a mean over the last {search.last} rounds and over seeds. The test set played no part.",
        *notes,
    ]
    write_tuning_report(folder / "report", table, list(space), metric=search.metric, lines=lines)
    return Tuning(best, table, folder)


def _note_of_edge(base: Config, key: str, best: Value, values: Searched) -> str:
    """Say that better values may lie beyond a grid, unless the setting itself ends there."""
    home, name = base.home_of(key)
    if isinstance(best, bool | str) or best in home.setting_of(name).limits.values():
        return ""
    ends = {min(_ends(values)): "smallest", max(_ends(values)): "largest"}
    if len(ends) < 2 or best not in ends:
        return ""
    return f"{key} = {best} is the best and the {ends[best]} tried: add values beyond it"
