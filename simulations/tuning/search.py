"""The trials of a search for settings, in a study of Optuna's.

A trial is one combination of values, run with every seed in ``trials/<number>/seed-<seed>``. Optuna
draws, prunes, and keeps what came of the trials in ``search.db``, which one process alone writes.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import WARNING, getLogger
from pathlib import Path
from typing import Any, Literal

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

from ..config.config import Config
from ..config.settings import ConfigError, Value
from ..engine.progress import Progress
from .trials import FINISHED, PRUNED, run_trials

__all__ = ["Pruner", "Sampler", "Search", "Searched", "Space", "drawn", "opened", "resumed"]

Searched = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Searched]
Sampler = Literal["random", "tpe"]
Pruner = Literal["none", "median", "halving"]
Draw = Callable[[optuna.Study, int], dict[str, Value]]  # number of the trial -> its values
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
logger = getLogger("flwr")


@contextlib.contextmanager
def opened(folder: Path, metric: str, prune: Pruner, rounds: int) -> Iterator[optuna.Study]:
    """Open the study in a folder, or make it.

    Pruners take no notice of the first quarter of the rounds. Successive halving looks after a
    quarter, then each time the rounds have doubled, and lets the better half go on.
    """
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


def resumed(study: optuna.Study, base: Config, asked: dict[str, Any], folder: Path) -> None:
    """Remember what is searched, or refuse another search than before; a grid may have grown."""
    before = study.user_attrs.get("asked", asked)
    saved = Config.parse(study.user_attrs.get("config", base.values()))
    differing = {
        key: (before.get(key), asked.get(key))
        for key in {**before, **asked}
        if before.get(key) != asked.get(key) and not _grown(before.get(key), asked.get(key))
    }
    differing |= {key: both for key, both in saved.differences(base).items() if key not in asked}
    if differing:
        listed = ", ".join(f"{k} = {old!r} (now {new!r})" for k, (old, new) in differing.items())
        raise ConfigError(
            f"{folder} holds another search: {listed}; choose another folder with out, or replace "
            "that search with again"
        )
    study.set_user_attr("config", base.values())
    study.set_user_attr("asked", asked)


def _grown(before: Any, now: Any) -> bool:
    """Whether a grid's values are all there still."""
    both = isinstance(before, dict) and isinstance(now, dict)
    return both and set(before["grid"]) <= set(now["grid"])


def drawn(
    space: Space, sampler: Sampler, seed: int, study: optuna.Study, number: int
) -> dict[str, Value]:
    """Draw a trial's values by (seed, number), whatever was cut off or runs in parallel."""
    derived = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    kind = optuna.samplers.TPESampler if sampler == "tpe" else optuna.samplers.RandomSampler
    drawing = optuna.create_study(direction=study.direction, sampler=kind(seed=derived))
    distributions: dict[str, BaseDistribution] = {**space}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        values, reported = trial.user_attrs["values"], trial.intermediate_values
        drawing.add_trial(
            create_trial(
                state=trial.state,
                value=trial.value,
                params=values,
                distributions=distributions,
                intermediate_values=reported,
            )
        )
    return drawing.ask(distributions).params


@dataclass(eq=False)
class Search:
    """The trials of a search; each is in the study once for each time that it was tried.

    Attributes
    ----------
    study : optuna.Study
        Where they are.
    base : Config
        All other settings.
    seeds : sequence of int
        With which a combination is run.
    metric, last : str, int
        A run's value is the metric's mean over so many rounds at its end.
    rounds : int
        The most that a run has.
    folder : Path
        Of the search.
    """

    study: optuna.Study
    base: Config
    seeds: Sequence[int]
    metric: str
    last: int
    rounds: int
    folder: Path
    _done: dict[int, int] = field(default_factory=dict)  # number -> rounds; all if it has ended

    def newest(self) -> dict[int, FrozenTrial]:
        """Return each trial, as it was tried last, by number."""
        return {t.user_attrs["number"]: t for t in self.study.get_trials(deepcopy=False)}

    def line_up(self, combinations: Sequence[Mapping[str, Value]]) -> None:
        """Line up what was cut off or failed, and what is new."""
        for number, trial in self.newest().items():
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if trial.state in (TrialState.RUNNING, TrialState.FAIL):
                self._add(number, trial.user_attrs["values"], trial.intermediate_values)
        known = [trial.user_attrs["values"] for trial in self.newest().values()]
        new = [values for values in combinations if values not in known]
        for number, values in enumerate(new, len(known)):
            self._add(number, values)

    def _add(
        self, number: int, values: Mapping[str, Value], reported: dict[int, float] | None = None
    ) -> None:
        attributes = {"number": number, "values": dict(values)}
        trial = create_trial(
            state=TrialState.WAITING, user_attrs=attributes, intermediate_values=reported
        )
        self.study.add_trial(trial)

    def run(self, total: int, draw: Draw | None, parallel: int, shown: Progress) -> None:
        """Run the trials that are lined up, and draw others until there are `total`."""
        whole = len(self.seeds) * self.rounds

        def tasks() -> Iterator[tuple[Trial, list[Config]]]:
            while True:
                if not self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                    number = len(self.newest())
                    if draw is None or number >= total:
                        return
                    self._add(number, draw(self.study, number))
                trial = self.study.ask()
                try:
                    configs = self._configs(trial)
                except ConfigError as error:  # values drawn that do not go together
                    self._finish(trial, [], str(error))
                else:
                    yield trial, configs

        def on_round(trial: Trial, position: int, record: Mapping[str, Any]) -> bool:
            number, step = trial.user_attrs["number"], int(record["round"])
            at_end = position == len(self.seeds) - 1 and step == self._configs(trial)[0].rounds
            started, value = step > 0, record.get(self.metric)
            step += position * self.rounds
            self._done[number] = step
            self._show(shown, total)
            if value is None or not started or at_end:
                return False
            if step not in self.newest()[number].intermediate_values:  # told before a cut
                trial.report(value, step)
            return trial.should_prune()

        def on_end(trial: Trial, how: str) -> None:
            self._finish(trial, self._configs(trial), how)
            self._done[trial.user_attrs["number"]] = whole
            self._show(shown, total)

        for number, trial in self.newest().items():
            if trial.state.is_finished():
                self._done[number] = whole
        title = f"tuning {self.base.name or self.base.method} on {self.base.dataset}"
        shown.begin(title, total * whole, sum(self._done.values()))
        try:
            run_trials(tasks(), on_round, on_end, parallel)
        except KeyboardInterrupt:
            shown.end("interrupted")
            logger.log(WARNING, "interrupted; go on with the same call")
            raise
        shown.end()

    def _show(self, shown: Progress, total: int) -> None:
        ended = [trial for trial in self.newest().values() if trial.state.is_finished()]
        values = [t.values[0] for t in ended if t.state == TrialState.COMPLETE]
        shown.state = f"{len(ended)} of {total} trials"
        if values:
            best = min(values) if "loss" in self.metric else max(values)
            shown.state += f", best {self.metric} {best:.4g}"
        shown.on_round({"round": sum(self._done.values())})

    def _configs(self, trial: Trial) -> list[Config]:
        values = trial.user_attrs["values"]
        name = ", ".join(f"{key} = {value}" for key, value in values.items())
        folder = self.folder / "trials" / f"{trial.user_attrs['number']:03d}"
        changed = {**values, "name": name}
        return [
            self.base.replace(**changed, seed=seed, out=folder / f"seed-{seed}")
            for seed in self.seeds
        ]

    def _finish(self, trial: Trial, configs: Sequence[Config], how: str) -> None:
        """Have Optuna keep what came of a trial, by the rounds in its folders."""
        means, rounds, seconds = [], 0, 0.0
        for config in configs:
            path = config.folder / "rounds.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            records = [json.loads(line) for line in lines]
            measured = [r[self.metric] for r in records if r["round"] and self.metric in r]
            if measured:
                means.append(float(np.mean(measured[-self.last :])))
            rounds += max(len(records) - 1, 0)
            seconds += sum(record["seconds"] for record in records)
        if how == FINISHED and (len(means) < len(self.seeds) or not np.isfinite(means).all()):
            how = f"{self.metric} is missing or not finite"
        error = "" if how == PRUNED else how
        kept = {"means": means, "rounds": rounds, "seconds": seconds, "error": error}
        for name, value in kept.items():
            trial.set_user_attr(name, value)
        if how == FINISHED:
            self.study.tell(trial, float(np.mean(means)))
        else:
            self.study.tell(trial, state=TrialState.PRUNED if how == PRUNED else TrialState.FAIL)

    def table(self) -> pd.DataFrame:
        """Return all trials: the finished ones, the best first; the pruned; the failed."""
        rows: list[dict[str, Any]] = []
        for number, trial in self.newest().items():
            kept, means = trial.user_attrs, pd.Series(trial.user_attrs["means"], dtype=float)
            rows.append(
                {
                    **{"trial": number, "state": STATES[trial.state]},
                    **{"mean": means.mean(), "std": means.std(), **kept["values"]},
                    **{key: kept[key] for key in ("rounds", "seconds", "error")},
                }
            )
        order, sign = list(STATES.values()), 1 if "loss" in self.metric else -1
        rows.sort(key=lambda r: (order.index(r["state"]), np.isnan(r["mean"]), sign * r["mean"]))
        return pd.DataFrame(rows)
