"""Search for settings on examples that nobody trains on; the test set plays no part.

A trial is one combination of values, run with every seed in ``trials/<number>/seed-<seed>``. Optuna
draws, prunes, and keeps what came of the trials in ``search.db``, which this process alone writes.
"""

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import ERROR, WARNING, getLogger
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from fedntk.ntk.files import claimed

from ._flower import log_from
from .config import INCIDENTAL, Config
from .errors import RunFailed
from .progress import Progress
from .progress import progress as show_progress
from .report import write_tuning_report
from .runs import failing_as_run
from .server_app import prepare
from .settings import ConfigError, Value
from .trials import FINISHED, PRUNED, run_trials

__all__ = ["Tuning", "tune"]

Space = dict[str, BaseDistribution]
Sampler = Literal["random", "tpe"]
Pruner = Literal["none", "median", "halving"]
Draw = Callable[[optuna.Study, int], dict[str, Value]]  # number of the trial -> its values
# what says where to run, or what is measured, and not how a method learns
FIXED = INCIDENTAL | {
    *("seed", "name", "test-examples", "evaluate-on"),
    *("validation-examples", "validation-clients"),
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
        All other settings. It holds out validation-examples or validation-clients.
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
        ``"client-accuracy-mean"``: it is of the validation clients.
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
    loaded = config if isinstance(config, Config) else Config.load(config)
    base = loaded.replace(**{**overrides, "evaluate_on": "validation", "out": ""})
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
    for key, values in {**(grid or {}), **(random or {})}.items():
        space |= _dimension(key, values, ranged=not grid)
    each = [int(seed) for seed in seeds]
    if not each or len(set(each)) < len(each):
        raise ConfigError(f"seeds: expected at least one, each once, got {each}")
    _check_metric(base, metric)
    combinations = _combinations(base, space)
    folder = Path(out).expanduser().absolute()
    asked = {
        "searched": {key: _in_words(values) for key, values in space.items()},
        **{"seeds": each, "metric": metric, "last": last, "prune": prune},
        "drawn": "all" if grid else f"{sampler}, seed {sampler_seed}",
        "data": _prepared(base, combinations, each),
    }
    with failing_as_run(), claimed(folder, "tune"), log_from(ERROR):
        if again:
            (folder / "search.db").unlink(missing_ok=True)
            shutil.rmtree(folder / "trials", ignore_errors=True)
        rounds = max(base.replace(**values).rounds for values in combinations)
        with _opened(folder, metric, prune, rounds) as study:
            _same_search(study, base, asked, folder)
            search = _Search(study, base, space, each, metric, last, rounds, folder)
            search.plan(combinations if grid else [])
            total = len(search.newest()) if grid else trials
            draw = None if grid else partial(_drawn, space, sampler, sampler_seed)
            with show_progress(total * len(each) * rounds, enabled=progress) as shown:
                search.run(total, draw, parallel, shown)
            return search.result()


# --------------------------------------------------------------------- what is searched


def _dimension(given: str, values: Sequence[Value], *, ranged: bool) -> Space:
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


def _range(key: str, values: tuple[Any, ...], checked: Callable[[Any], Any]) -> BaseDistribution:
    log = values[2:] == ("log",)
    if len(values) == 2 or log:
        low, high = map(checked, values[:2])
        if type(low) in (int, float) and low < high and (low > 0 or not log):
            kind = IntDistribution if type(low) is int else FloatDistribution
            return kind(low, high, log=log)
    raise ConfigError(
        f'{key}: expected (low, high) or (low, high, "log") with low < high, above 0 for log, or '
        f"a list of values, got {values!r}"
    )


def _in_words(values: BaseDistribution) -> Any:
    if isinstance(values, IntDistribution | FloatDistribution):
        return f"{values.low} to {values.high}" + ", log" * values.log
    return list(getattr(values, "choices", ()))


def _combinations(base: Config, space: Space) -> list[dict[str, Value]]:
    """Return all combinations, of ranges those of their ends; each is checked."""
    methods = getattr(space.get("method"), "choices", (base.method,))
    for key in space:
        if "." in key and key.partition(".")[0] not in methods:
            raise ConfigError(f"{key} has no effect with method = {', '.join(methods)}")
    each = [
        (values.low, values.high)
        if isinstance(values, IntDistribution | FloatDistribution)
        else getattr(values, "choices", ())
        for values in space.values()
    ]
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*each)]
    for values in combinations:
        with _named(values):
            if base.replace(**values).rounds < 1:
                raise ConfigError("rounds: expected at least 1, got 0")
    return combinations


def _check_metric(base: Config, metric: str) -> None:
    known = Config.choices("monitor")
    if metric not in known:
        raise ConfigError(f"metric: expected one of {', '.join(known)}, got {metric!r}")
    asked = min(base.validation_clients, base.clients_per_evaluation)
    if metric.startswith("client-") and not asked:
        raise ConfigError(
            f"metric = {metric} is of validation clients: set validation-clients and "
            f"clients-per-evaluation, got {base.validation_clients} and "
            f"{base.clients_per_evaluation}"
        )


def _prepared(base: Config, combinations: Sequence[dict[str, Value]], seeds: Sequence[int]) -> str:
    """Have data, split, network and strategy made as a trial; return the data set's checksum."""
    for values in combinations:
        with _named(values), failing_as_run():
            prepare(base.replace(**values, seed=seeds[0]))
    for seed in seeds:
        with _named({"seed": seed}), failing_as_run():
            checksum = prepare(base.replace(seed=seed)).setup.data.checksum
    return checksum[:12]


@contextlib.contextmanager
def _named(values: Mapping[str, Value]) -> Iterator[None]:
    """Say with which values something is wrong."""
    try:
        yield
    except (ConfigError, RunFailed) as error:
        raise type(error)(f"with {_label(values)}: {error}") from error


def _label(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


# ------------------------------------------------------------------------ with Optuna


@contextlib.contextmanager
def _opened(folder: Path, metric: str, prune: Pruner, rounds: int) -> Iterator[optuna.Study]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    quarter = max(rounds // 4, 1)
    pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "none": optuna.pruners.NopPruner,
        "median": partial(optuna.pruners.MedianPruner, 4, quarter),
        "halving": partial(optuna.pruners.SuccessiveHalvingPruner, quarter, 2),
    }
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'search.db'}")
    try:
        yield optuna.create_study(
            storage=storage,
            pruner=pruners[prune](),
            study_name="search",
            direction="minimize" if "loss" in metric else "maximize",
            load_if_exists=True,
        )
    finally:
        storage.remove_session()
        storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)


def _same_search(study: optuna.Study, base: Config, asked: dict[str, Any], folder: Path) -> None:
    """Remember what is searched, or refuse another search than before; a grid may have grown."""
    before = study.user_attrs
    if before:
        saved, searched = before["asked"], asked["searched"]
        was, now = ({**each, **each["searched"]} for each in (saved, asked))
        differing = {
            key: (was.get(key), now.get(key))
            for key in {**was, **now}
            if key != "searched" and was.get(key) != now.get(key)
        }
        for key, (old, new) in list(differing.items()):
            if key in searched and isinstance(old, list) and isinstance(new, list):
                if asked["drawn"] == "all" and set(old) <= set(new):
                    del differing[key]
        others = Config.parse(before["config"]).differences(base)
        differing |= {key: both for key, both in others.items() if key not in searched}
        if differing:
            listed = ", ".join(f"{k} = {old!r} (now {new!r})" for k, (old, new) in differing.items())
            raise ConfigError(
                f"{folder} holds another search: {listed}; choose another folder with out, or "
                "replace that search with again"
            )
    study.set_user_attr("config", base.values())
    study.set_user_attr("asked", asked)


def _drawn(
    space: Space, sampler: Sampler, seed: int, study: optuna.Study, number: int
) -> dict[str, Value]:
    """Draw a trial's values by (seed, number), so that it does not matter what was cut off when."""
    derived = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    kind = optuna.samplers.TPESampler if sampler == "tpe" else optuna.samplers.RandomSampler
    drawing = optuna.create_study(direction=study.direction, sampler=kind(seed=derived))
    for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE, TrialState.PRUNED]):
        drawing.add_trial(
            create_trial(
                state=trial.state,
                value=trial.value,
                params=trial.user_attrs["values"],
                distributions=space,
                intermediate_values=trial.intermediate_values,
            )
        )
    return drawing.ask(space).params


class _Search:
    """The trials of a search; each is in Optuna's study, once more for each time it was cut off."""

    def __init__(
        self,
        study: optuna.Study,
        base: Config,
        space: Space,
        seeds: Sequence[int],
        metric: str,
        last: int,
        rounds: int,
        folder: Path,
    ) -> None:
        self.study, self.base, self.space, self.seeds = study, base, space, seeds
        self.metric, self.last, self.rounds, self.folder = metric, last, rounds, folder
        self._done: dict[int, int] = {}  # number -> rounds run with all seeds; all if it has ended

    def newest(self) -> dict[int, FrozenTrial]:
        """Number -> trial, as it was tried last."""
        return {t.user_attrs["number"]: t for t in self.study.get_trials(deepcopy=False)}

    def plan(self, combinations: Sequence[Mapping[str, Value]]) -> None:
        """Line up what is new, after what was cut off or failed."""
        for number, trial in self.newest().items():
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if trial.state in (TrialState.RUNNING, TrialState.FAIL):
                self._line_up(number, trial.user_attrs["values"], trial.intermediate_values)
        known = [trial.user_attrs["values"] for trial in self.newest().values()]
        for values in combinations:
            if values not in known:
                self._line_up(len(self.newest()), values)

    def _line_up(
        self, number: int, values: Mapping[str, Value], reported: dict[int, float] | None = None
    ) -> None:
        attributes = {"number": number, "values": dict(values)}
        waiting = TrialState.WAITING
        self.study.add_trial(
            create_trial(state=waiting, user_attrs=attributes, intermediate_values=reported)
        )

    def run(self, total: int, draw: Draw | None, parallel: int, shown: Progress) -> None:
        """Run the trials that are lined up, and draw others until there are `total`."""
        whole = len(self.seeds) * self.rounds
        ended = [TrialState.COMPLETE, TrialState.PRUNED]
        self._done = {n: whole for n, trial in self.newest().items() if trial.state in ended}

        def tasks() -> Iterator[tuple[Trial, list[Config]]]:
            while True:
                if not self.study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
                    number = len(self.newest())
                    if draw is None or number >= total:
                        return
                    self._line_up(number, draw(self.study, number))
                trial = self.study.ask()
                yield trial, self._configs(trial.user_attrs)

        def on_round(trial: Trial, position: int, record: Mapping[str, Any]) -> bool:
            step, value = position * self.rounds + int(record["round"]), record.get(self.metric)
            number, values = trial.user_attrs["number"], trial.user_attrs["values"]
            self._done[number] = step
            self._show(shown, total)
            reported = step in self.newest()[number].intermediate_values  # before it was cut off
            at_end = position == len(self.seeds) - 1
            at_end &= record["round"] == values.get("rounds", self.base.rounds)
            if value is None or record["round"] == 0 or at_end:
                return False
            if not reported:
                trial.report(value, step)
            return trial.should_prune()

        def on_end(trial: Trial, how: str) -> None:
            self._finish(trial, how)
            self._done[trial.user_attrs["number"]] = whole
            self._show(shown, total)

        title = f"tuning {self.base.name or self.base.method} on {self.base.dataset}"
        shown.begin(title, total * whole, sum(self._done.values()))
        try:
            run_trials(tasks(), on_round, on_end, parallel)
        except KeyboardInterrupt:
            shown.end("interrupted")
            logger.log(ERROR, "interrupted; go on with the same call")
            raise
        shown.end()

    def _show(self, shown: Progress, total: int) -> None:
        trials = self.newest().values()
        ended = [trial for trial in trials if trial.state.is_finished()]
        pruned = sum(trial.state == TrialState.PRUNED for trial in ended)
        values = [trial.value for trial in ended if trial.state == TrialState.COMPLETE]
        best = (min if "loss" in self.metric else max)(values, default=None)
        shown.state = f"{len(ended)} of {total} trials" + f", {pruned} pruned" * (pruned > 0)
        shown.state += "" if best is None else f", best {self.metric} {best:.4g}"
        shown.on_round({"round": sum(self._done.values())})

    def _configs(self, attributes: Mapping[str, Any]) -> list[Config]:
        values, folder = attributes["values"], self.folder / "trials" / f"{attributes['number']:03d}"
        return [
            self.base.replace(
                **{**values, "seed": seed, "name": _label(values), "out": folder / f"seed-{seed}"}
            )
            for seed in self.seeds
        ]

    def _finish(self, trial: Trial, how: str) -> None:
        """Have Optuna keep what came of a trial, by the rounds in its folders."""
        means, rounds, seconds = [], 0, 0.0
        for config in self._configs(trial.user_attrs):
            path = config.folder / "rounds.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            records = [json.loads(line) for line in lines]
            measured = [r[self.metric] for r in records if r["round"] and self.metric in r]
            if measured:
                means.append(float(np.mean(measured[-self.last :])))
            rounds += max(len(records) - 1, 0)
            seconds += sum(record["seconds"] for record in records)
        if how == FINISHED and len(means) < len(self.seeds):
            how = f"no round has {self.metric}"
        if how == FINISHED and not np.isfinite(means).all():
            how = f"{self.metric} is not finite"
        about = {"means": means, "rounds": rounds, "seconds": seconds}
        for name, value in {**about, "error": "" if how == PRUNED else how}.items():
            trial.set_user_attr(name, value)
        if how == FINISHED:
            self.study.tell(trial, float(np.mean(means)))
        else:
            self.study.tell(trial, state=TrialState.PRUNED if how == PRUNED else TrialState.FAIL)

    def _table(self) -> pd.DataFrame:
        names = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned"}
        rows = []
        for number, trial in self.newest().items():
            kept = trial.user_attrs
            means = pd.Series(kept["means"], dtype=float)
            rows.append(
                {
                    "trial": number,
                    "state": names.get(trial.state, "failed"),
                    "mean": means.mean(),
                    "std": means.std(),
                    **kept["values"],
                    **{key: kept[key] for key in ("rounds", "seconds", "error")},
                }
            )
        sign = 1 if "loss" in self.metric else -1
        places = list(names.values())
        rows.sort(
            key=lambda row: (
                places.index(row["state"]) if row["state"] in places else len(places),
                sign * row["mean"] if math.isfinite(row["mean"]) else math.inf,
                row["trial"],
            )
        )
        return pd.DataFrame(rows)

    def result(self) -> Tuning:
        """Choose the best trial, and write table, picture and configuration.

        Raises
        ------
        RunFailed
            If none was finished.
        """
        table = self._table()
        first = table.iloc[0]
        if first["state"] != "finished":
            errors = "; ".join(sorted({error for error in table["error"] if error}))
            raise RunFailed(f"no trial was finished: {errors}")
        values = self.newest()[int(first["trial"])].user_attrs["values"]
        best = self.base.replace(**{**values, "evaluate-on": "test"})
        best.save(self.folder / "best.toml")
        notes = [_at_edge(key, values[key], among) for key, among in self.space.items()]
        failed = table[table["error"] != ""]
        notes += [f"trial {row.trial} failed: {row.error}" for row in failed.itertuples()]
        for note in filter(None, notes):
            logger.log(ERROR, "%s", note)
        write_tuning_report(
            self.folder / "report",
            table,
            searched={key: _scale(among) for key, among in self.space.items()},
            metric=self.metric,
            lines=[
                f"{self.base.method} on {self.base.dataset}. A value is {self.metric} on what nobody "
                f"trains on, as a mean over the last {self.last} rounds and over {len(self.seeds)} "
                "seeds. The test set played no part.",
                *filter(None, notes),
            ],
        )
        return Tuning(best, table, self.folder)


def _at_edge(key: str, best: Value, among: BaseDistribution) -> str:
    """Warn of a grid beyond whose end better values may lie, where the setting goes further."""
    choices = getattr(among, "choices", ())
    home, name = Config.home_of(key)
    limits = home.options()[name].metadata["limits"].values()
    if len(choices) < 2 or not isinstance(best, int | float) or isinstance(best, bool):
        return ""
    ends = {min(choices): "smallest", max(choices): "largest"}
    if best not in ends or best in limits:
        return ""
    return (
        f"the best {key}, {best}, is the {ends[best]} of the grid: give the same command with more "
        "values beyond it"
    )


def _scale(among: BaseDistribution) -> str:
    """Return how values are to be drawn: log, linear, or as words."""
    if isinstance(among, IntDistribution | FloatDistribution):
        return "log" if among.log else "linear"
    choices = getattr(among, "choices", ())
    if any(isinstance(choice, bool | str) for choice in choices):
        return "words"
    return "log" if min(choices) > 0 and max(choices) >= 10 * min(choices) else "linear"
