"""Search for settings on examples that nobody trains on; the test set plays no part."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fedntk.ntk.support.files import claimed

from ..config.config import INCIDENTAL, Config
from ..config.settings import ConfigError, Value
from ..engine.progress import progress as show_progress
from ..engine.runs import failing_as_run, settled
from ..engine.server_app import prepare
from ..errors import RunFailed
from ..report.report import write_tuning_report
from .search import Pruner, Sampler, Search, Searched, Space, drawn, opened, resumed

__all__ = ["Tuning", "tune"]

# what says where to run, or what is measured, and not how a method learns
FIXED = INCIDENTAL | {
    *("seed", "name", "dataset", "test-examples", "test-examples-per-domain", "evaluate-on"),
    *("validation-examples", "validation-clients", "private-test", "local-test-fraction"),
}
logger = getLogger("flwr")


@dataclass(frozen=True, eq=False)
class Tuning:
    """What a search found.

    Attributes
    ----------
    best : Config
        The best combination, set to be evaluated on the test set. It is ``best.toml``, too.
    trials : DataFrame
        One row a trial, the best first: trial, state, mean and std of the metric over the seeds,
        the settings searched, rounds and seconds of all seeds together, error.
    folder : Path
        Of the search; ``report`` in it holds the table and a picture.
    """

    best: Config
    trials: pd.DataFrame
    folder: Path


def tune(
    config: Config | str | Path,
    *,
    grid: Mapping[str, Sequence[Value]] | None = None,
    random: Mapping[str, Sequence[Value]] | None = None,
    trials: int = 20,
    sampler: Sampler = "random",
    sampler_seed: int = 0,
    seeds: Iterable[int] = (0,),
    metric: str = "accuracy",
    last: int = 5,
    prune: Pruner = "none",
    parallel: int = 1,
    out: str | Path = "runs/tune",
    progress: bool = True,
    again: bool = False,
    **overrides: Any,
) -> Tuning:
    """Search for the best values of some settings, by validation examples or validation clients.

    The same call goes on with a search that was cut off; finished trials are not run again.

    Parameters
    ----------
    config : Config, or path of a TOML file
        All other settings. It holds out validation-examples or validation-clients, or with
        private-test a local-test-fraction of each client's examples.
    grid : dict of str to list
        Key -> values. Every combination is run. Give `grid` or `random`.
    random : dict of str to tuple or list
        Key -> ``(low, high)``, ``(low, high, "log")``, or a list of values to draw from.
    trials : int
        How many combinations are drawn. With more than before, a finished search goes on.
    sampler : {"random", "tpe"}
        Whether results guide the draws: tpe draws near what was good so far.
    sampler_seed : int
        Of the draws.
    seeds : iterable of int
        With each of which every combination is run.
    metric : str
        ``"accuracy"``, ``"loss"``, or what the setting monitor lists of clients, such as
        ``"client-accuracy-mean"``: it is of the validation clients, or with private-test of all
        clients on their local-test-fraction.
    last : int
        A run's value is the metric's mean over so many rounds at its end. The best round's would
        be too good, the last one's would depend on one round.
    prune : {"none", "median", "halving"}
        End trials early: those worse than the median of earlier trials at the same round, or by
        successive halving.
    parallel : int
        Trials at work at a time, each in a process of its own.
    out : path
        Folder of the search.
    progress : bool
        Show rounds, trials, the best value and the time left.
    again : bool
        Remove the search that is in the folder.
    **overrides
        Settings (snake_case) that win over `config`.

    Raises
    ------
    ConfigError
        If a setting cannot work, nothing is held out, or the folder holds another search; nothing
        has been run.
    RunFailed
        If no trial was finished.

    Examples
    --------
    >>> import tempfile
    >>> config = Config(method="fedavg", rounds=2, validation_examples=200)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = tune(config, grid={"learning-rate": [1e-6, 0.3]}, out=folder, progress=False)
    >>> found.best.learning_rate
    0.3
    """
    base = settled(config, overrides).replace(evaluate_on="validation", out="")
    if bool(grid) == bool(random):
        raise ConfigError("expected the settings to search as grid or as random, and not as both")
    for name, value, choices in (("sampler", sampler, Sampler), ("prune", prune, Pruner)):
        if value not in get_args(choices):
            listed = ", ".join(get_args(choices))
            raise ConfigError(f"{name}: expected one of {listed}, got {value!r}")
    for name, number in (("trials", trials), ("last", last), ("parallel", parallel)):
        if number < 1:
            raise ConfigError(f"{name}: expected at least 1, got {number}")
    space: Space = {}
    for key, values in (grid or random or {}).items():
        space |= _dimension(key, values, ranged=not grid)
    each = [int(seed) for seed in seeds]
    if not each or len(set(each)) < len(each):
        raise ConfigError(f"seeds: expected at least one, each once, got {each}")
    _check_metric(base, metric)
    if metric in ("accuracy", "loss") and (own := base.chosen_method.headline) != "accuracy":
        logger.log(
            WARNING,
            "metric = %s is of the server's model; %s is judged by metric = %s",
            *(metric, base.method, own),
        )
    combinations = _combinations(base, space, each_once=not grid)
    folder = Path(out).expanduser().absolute()
    asked = {
        **{key: _described(values, is_grid=bool(grid)) for key, values in space.items()},
        **{"seeds": each, "metric": metric, "last": last, "prune": prune},
        "drawn": "all" if grid else f"{sampler}, seed {sampler_seed}",
        "data": _prepared(base, combinations, each),
    }
    rounds = max(base.replace(**own).rounds for own in combinations)
    with failing_as_run(), claimed(folder, "tune"):
        if again:
            for name in ("search.db", "best.toml"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "trials", ignore_errors=True)
        with opened(folder, metric, prune, rounds) as study:
            resumed(study, base, asked, folder)
            search = Search(study, base, each, metric, last, rounds, folder)
            search.line_up(combinations if grid else [])
            total = len(search.newest()) if grid else trials
            draw = None if grid else partial(drawn, space, sampler, sampler_seed)
            with show_progress(total * len(each) * rounds, enabled=progress) as shown:
                search.run(total, draw, parallel, shown)
            return _concluded(search, space)


# --------------------------------------------------------------------- what is searched


def _dimension(given: str, values: Any, *, ranged: bool) -> Space:
    """Return a key and what it may be; each value is checked."""
    home, name = Config.home_of(given)
    key, checked = home.key(name), partial(home.checked, name)
    if key in FIXED:
        raise ConfigError(f"{key} cannot be searched: it has no part in how a method learns")
    if ranged and isinstance(values, tuple):
        return {key: _range(key, values, checked)}
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{key}: expected a list of values, got {values!r}")
    each = [checked(value) for value in values]
    if not each or len(set(each)) < len(each):
        raise ConfigError(f"{key}: expected at least one value, each once, got {each}")
    return {key: CategoricalDistribution(each)}


def _range(key: str, values: tuple[Any, ...], checked: Callable[[Any], Any]) -> Searched:
    log = values[2:] == ("log",)
    if len(values) == 2 or log:
        low, high = map(checked, values[:2])
        if type(low) in (int, float) and low < high and (low > 0 or not log):
            kind = IntDistribution if type(low) is int else FloatDistribution
            return kind(low, high, log=log)
    raise ConfigError(
        f"{key}: expected low and high, and log or nothing, with low < high, and above 0 for log; "
        f"or a list of values; got {values!r}"
    )


def _ends(values: Searched) -> Sequence[Any]:
    """Return the values of a list, or the ends of a range."""
    return (
        values.choices if isinstance(values, CategoricalDistribution) else (values.low, values.high)
    )


def _described(values: Searched, *, is_grid: bool) -> Any:
    if isinstance(values, CategoricalDistribution):
        return {"grid": list(values.choices)} if is_grid else list(values.choices)
    return f"{values.low} to {values.high}" + ", log" * values.log


def _combinations(base: Config, space: Space, *, each_once: bool) -> list[dict[str, Value]]:
    """Return and check all combinations, or as many as have each value and end of a range."""
    methods = _ends(space["method"]) if "method" in space else (base.method,)
    for key in space:
        if "." in key and key.partition(".")[0] not in methods:
            raise ConfigError(f"{key} has no effect with method = {', '.join(methods)}")
    each = [_ends(values) for values in space.values()]
    if each_once:
        most = max(map(len, each))
        rows = zip(*(itertools.islice(itertools.cycle(ends), most) for ends in each), strict=True)
    combinations = [
        dict(zip(space, values, strict=True))
        for values in (rows if each_once else itertools.product(*each))
    ]
    for values in combinations:
        with _named(values):
            if base.replace(**values).rounds < 1:
                raise ConfigError("rounds: expected at least 1, got 0")
    return combinations


def _check_metric(base: Config, metric: str) -> None:
    known = Config.choices("monitor")
    if metric not in known:
        raise ConfigError(f"metric: expected one of {', '.join(known)}, got {metric!r}")
    asked = {"validation-clients": base.validation_clients}
    if base.private_test:  # clients measure on examples that are held out of their training
        asked = {}
    asked["clients-per-evaluation"] = base.clients_per_evaluation
    if metric.startswith("client-") and not all(asked.values()):
        listed = " and ".join(f"{key} = {value}" for key, value in asked.items())
        other = "" if base.private_test else "; private-test = true takes no validation-clients"
        raise ConfigError(f"metric = {metric} needs at least 1 of each, got {listed}{other}")


def _prepared(base: Config, combinations: Sequence[dict[str, Value]], seeds: Sequence[int]) -> str:
    """Have all made that runs need, as a trial; return the data set's checksum."""
    tried: list[dict[str, Value]] = [{**values, "seed": seeds[0]} for values in combinations]
    tried += [{"seed": seed} for seed in seeds[1:]]
    for values in tried:
        with _named(values), failing_as_run():
            setup, _ = prepare(base.replace(**values))
    return setup.data.checksum[:12]


@contextlib.contextmanager
def _named(values: Mapping[str, Value]) -> Iterator[None]:
    """Say with which values something is wrong."""
    try:
        yield
    except (ConfigError, RunFailed) as error:
        listed = ", ".join(f"{key} = {value}" for key, value in values.items())
        raise type(error)(f"{error} (with {listed})") from error


# ------------------------------------------------------------------------- what was found


def _concluded(search: Search, space: Space) -> Tuning:
    """Choose the best trial; write table, picture and configuration."""
    table, base, folder = search.table(), search.base, search.folder
    errors = zip(table["trial"], table["error"], strict=True)
    failed = [f"trial {number} failed: {error}" for number, error in errors if error]
    if table["state"][0] != "finished":
        reason = failed[0] if failed else "all were pruned"
        raise RunFailed(f"no trial was finished; {reason}; give the same command to try again")
    values = search.newest()[int(table["trial"][0])].user_attrs["values"]
    notes = [
        *filter(None, (_at_edge(key, values[key], own) for key, own in space.items())),
        *failed,
    ]
    for note in notes:
        logger.log(WARNING, "%s", note)
    best = base.replace(**{**values, "evaluate-on": "test"})
    best.save(folder / "best.toml")
    write_tuning_report(
        folder / "report",
        table,
        {key: _scale(values) for key, values in space.items()},
        metric=search.metric,
        lines=[
            f"{base.method} on {base.dataset}: {search.metric} on validation examples, as a mean "
            f"over the last {search.last} rounds and over seeds. The test set played no part.",
            *notes,
        ],
    )
    return Tuning(best, table, folder)


def _at_edge(key: str, best: Value, values: Searched) -> str:
    """Warn of a grid beyond which better values may lie; not where the setting itself ends."""
    home, name = Config.home_of(key)
    if _scale(values) == "words" or best in home.options()[name].metadata["limits"].values():
        return ""
    ends = {min(_ends(values)): "smallest", max(_ends(values)): "largest"}
    if len(ends) < 2 or best not in ends:
        return ""
    return f"{key} = {best} is the best and the {ends[best]} tried: add values beyond it"


def _scale(values: Searched) -> str:
    """Return how values are to be drawn: log, linear, or as words."""
    if not isinstance(values, CategoricalDistribution):
        return "log" if values.log else "linear"
    if any(isinstance(value, bool | str) for value in values.choices):
        return "words"
    low, high = min(values.choices), max(values.choices)  # type: ignore[type-var]
    return "log" if 0 < 10 * low <= high else "linear"  # type: ignore[operator]
