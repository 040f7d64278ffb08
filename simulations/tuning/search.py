"""The trials of a search for settings, in a study of Optuna.

A trial is one combination of values, run with every seed in ``trials/<number>/seed-<seed>``. Optuna
draws, prunes and stores the results in ``search.db``, which only one process writes. A trial that
fails is left running there, as one that is cut off: the next call runs both again.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from ..config.config import Config
from ..config.settings import ConfigError, Value
from ..engine.progress import Progress
from ..report.results import read_records
from .trials import FINISHED, PRUNED, run_trials

Searched = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Searched]
Sampler = Literal["random", "tpe"]
SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
Pruner = Literal["none", "median", "halving"]
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned"}  # all others have failed


@contextlib.contextmanager
def open_study(folder: Path, metric: str, prune: Pruner, rounds: int) -> Iterator[optuna.Study]:
    """Open the study in a folder, or create it; line up the trials that failed or were cut off.

    Pruners ignore the first quarter of the rounds. Successive halving looks after a quarter and
    each time the rounds have doubled, and lets the better half go on.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    quarter = max(rounds // 4, 1)
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "none": optuna.pruners.NopPruner(),
        "median": optuna.pruners.MedianPruner(4, quarter),
        "halving": optuna.pruners.SuccessiveHalvingPruner(quarter, 2),
    }
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'search.db'}")
    try:
        study = optuna.create_study(
            storage=storage,
            pruner=pruners[prune],
            study_name="search",
            direction="minimize" if "loss" in metric else "maximize",
            load_if_exists=True,
        )
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)


@dataclass(eq=False)
class Search:
    """Draws and runs the trials of a study, and stores what came of them."""

    study: optuna.Study
    folder: Path
    base: Config  # all settings that are not searched
    seeds: Sequence[int]
    metric: str
    last: int  # rounds at the end of a run, over which its value is the metric's mean
    rounds: int  # the most rounds of a run
    space: Space  # what is drawn; empty for a grid
    sampler: Sampler
    sampler_seed: int

    def __post_init__(self) -> None:
        self._whole = len(self.seeds) * self.rounds
        self._done: dict[int, int] = {}  # number of a trial -> its rounds; all if it has ended

    def values(self, trial: FrozenTrial | Trial) -> dict[str, Value]:
        """Return a trial's values; those of a grid, which may grow, are no parameters of Optuna."""
        return trial.user_attrs.get("values") or {key: trial.params[key] for key in self.space}

    def run(self, total: int, parallel: int, shown: Progress) -> None:
        """Run the trials that are lined up, and draw others until there are `total`."""
        ended = self.study.get_trials(deepcopy=False, states=tuple(STATES))
        self._done = {trial.number: self._whole for trial in ended}

        def show() -> None:
            shown.state = f"{list(self._done.values()).count(self._whole)} of {total} trials"
            with contextlib.suppress(ValueError):  # none has finished
                shown.state += f", best {self.metric} {self.study.best_value:.4g}"
            shown.on_round({"round": sum(self._done.values())})

        def on_round(trial: Trial, position: int, record: Mapping[str, Any]) -> bool:
            number = int(record["round"])
            self._done[trial.number] = step = number + position * self.rounds
            show()
            rounds = self.values(trial).get("rounds", self.base.rounds)
            at_end = position == len(self.seeds) - 1 and number == rounds
            if self.metric not in record or number == 0 or at_end:
                return False
            before = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
            if step not in before:  # reported, and then cut off
                trial.report(record[self.metric], step)
            return trial.should_prune()

        def on_end(trial: Trial, how: str) -> None:
            self._finish(trial, self._configs(trial), how)
            show()

        title = f"tuning {self.base.label} on {self.base.dataset}"
        shown.begin(title, total * self._whole, sum(self._done.values()))
        run_trials(self._trials(total), on_round, on_end, parallel)
        shown.end()

    def _trials(self, total: int) -> Iterator[tuple[Trial, list[Config]]]:
        while True:
            trials = self.study.get_trials(deepcopy=False)
            waiting = [trial.number for trial in trials if trial.state == TrialState.WAITING]
            number = waiting[0] if waiting else len(trials)
            if not waiting and number >= total:
                return
            # by the trial's number, so that draws do not depend on what was cut off
            seed = int(np.random.SeedSequence([self.sampler_seed, number]).generate_state(1)[0])
            self.study.sampler = SAMPLERS[self.sampler](seed=seed)
            trial = self.study.ask({**self.space})
            try:
                configs = self._configs(trial)
            except ConfigError as error:  # values drawn that do not go together
                self._finish(trial, [], str(error))
            else:
                yield trial, configs

    def _configs(self, trial: Trial) -> list[Config]:
        values = self.values(trial)
        name = ", ".join(f"{key} = {value}" for key, value in values.items())
        base = self.base.replace(**{**values, "name": name})
        folder = self.folder / "trials" / f"{trial.number:03d}"
        return [base.replace(seed=seed, out=folder / f"seed-{seed}") for seed in self.seeds]

    def _finish(self, trial: Trial, configs: Sequence[Config], how: str) -> None:
        """Store a trial's result, read from its runs' folders."""
        means, rounds, seconds = [], 0, 0.0
        for config in configs:
            records = read_records(config.folder)
            measured = [r[self.metric] for r in records if r["round"] and self.metric in r]
            if measured:
                means.append(float(np.mean(measured[-self.last :])))
            rounds += max(len(records) - 1, 0)
            seconds += sum(record["seconds"] for record in records)
        if how == FINISHED and (len(means) < len(self.seeds) or not np.isfinite(means).all()):
            how = f"{self.metric} is missing or not finite"
        error = "" if how == PRUNED else how
        result = {"means": means, "rounds": rounds, "seconds": seconds, "error": error}
        trial.set_user_attr("result", result)
        self._done[trial.number] = self._whole
        if how == FINISHED:
            self.study.tell(trial, float(np.mean(means)))
        elif how == PRUNED:
            self.study.tell(trial, state=TrialState.PRUNED)

    def table(self) -> pd.DataFrame:
        """Return all trials: the finished ones, the best first; the pruned; the failed."""
        rows: list[dict[str, Any]] = []
        for trial in self.study.get_trials(deepcopy=False):
            result: dict[str, Any] = {**trial.user_attrs["result"]}
            means = pd.Series(result.pop("means"), dtype=float)
            row = {"trial": trial.number, "state": STATES.get(trial.state, "failed")}
            row |= {"mean": means.mean(), "std": means.std(), **self.values(trial), **result}
            rows.append(row)
        order, sign = [*STATES.values(), "failed"], 1 if "loss" in self.metric else -1
        rows.sort(key=lambda r: (order.index(r["state"]), np.isnan(r["mean"]), sign * r["mean"]))
        return pd.DataFrame(rows)
