"""The trials of a search for settings, in a study of Optuna, and processes that run them.

A trial is one combination of values, run with every seed in ``trials/<number>/seed-<seed>``. Optuna
draws, prunes and stores the results in ``search.db``. A trial that fails is left running there, as
one that is cut off: the next call runs both again.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR, getLogger
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from fedntk.ntk.support.files import claimed

from ..config.metrics import is_lower_better
from ..config.settings import ConfigError, Value
from ..configuration import Config
from ..data.data import Data, passed_data
from ..engine import processes
from ..engine._flower import log_from
from ..engine.progress import Progress
from ..engine.runs import run
from ..errors import RunFailed, Stopped
from ..report.results import read_records

Searched = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Searched]
Sampler = Literal["random", "tpe"]
SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
Pruner = Literal["none", "median", "halving"]
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned"}  # all others have failed
CUT_OFF = {"means": (), "rounds": 0, "seconds": 0.0, "error": "its process ended"}
PATIENCE = 60.0  # seconds for another process to take a trial, or to write


@contextlib.contextmanager
def open_study(folder: Path, metric: str, prune: Pruner, rounds: int) -> Iterator[optuna.Study]:
    """Open the study in a folder, or create it; line up the trials that failed or were cut off.

    Pruners ignore the first quarter of the rounds; halving lets the better half go on.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    quarter = max(rounds // 4, 1)
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "none": optuna.pruners.NopPruner(),
        "median": optuna.pruners.MedianPruner(4, quarter),
        "halving": optuna.pruners.SuccessiveHalvingPruner(quarter, 2),
    }
    options = {"connect_args": {"timeout": PATIENCE}}
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'search.db'}", options)
    try:
        study = optuna.create_study(
            storage=storage,
            pruner=pruners[prune],
            study_name="search",
            direction="minimize" if is_lower_better(metric) else "maximize",
            load_if_exists=True,
        )
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            storage.set_trial_user_attr(trial._trial_id, "result", {})
            storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)


@dataclass(eq=False)
class Search:
    """Draws and runs the trials of a study, and stores their results; several processes may."""

    study: optuna.Study
    folder: Path
    base: Config  # all settings that are not searched
    seeds: Sequence[int]
    metric: str
    last: int  # rounds at the end of a run, over which its value is the metric's mean
    rounds: int  # the most rounds of a run
    space: Space  # what is drawn; empty for a grid
    trials: int  # how many are drawn; 0 for a grid
    sampler: Sampler
    sampler_seed: int

    def values(self, trial: FrozenTrial | Trial) -> dict[str, Value]:
        """Return a trial's values; those of a grid, which may grow, are no parameters of Optuna."""
        return trial.user_attrs.get("values") or {key: trial.params[key] for key in self.space}

    def next_number(self) -> int | None:
        """Return the number of a trial that waits, or is to be drawn; None if none is left."""
        trials = self.study.get_trials(deepcopy=False)
        waiting = (trial.number for trial in trials if trial.state == TrialState.WAITING)
        return next(waiting, len(trials) if len(trials) < self.trials else None)

    def run(self, on_round: Callable[[], None]) -> None:
        """Run one trial after the other until none is left; call `on_round` after each round."""
        while (trial := self._ask()) is not None:
            error, state, configs = "", TrialState.COMPLETE, list[Config]()
            try:
                configs = self._configs(trial)
                for position, config in enumerate(configs):
                    self._run(trial, position, config, on_round)
            except Stopped:
                state = TrialState.PRUNED
            except (RunFailed, ConfigError) as failure:  # or values drawn that do not go together
                error, state = str(failure), TrialState.FAIL
            self._tell(trial, configs, state, error)

    def _ask(self) -> Trial | None:
        with claimed(self.folder, "trial", seconds=PATIENCE):  # other processes take trials as well
            if (number := self.next_number()) is None:
                return None
            # by the trial's number, so that draws do not depend on what was cut off
            seed = int(np.random.SeedSequence([self.sampler_seed, number]).generate_state(1)[0])
            self.study.sampler = SAMPLERS[self.sampler](seed=seed)
            return self.study.ask({**self.space})

    def _configs(self, trial: Trial) -> list[Config]:
        values = self.values(trial)
        name = ", ".join(f"{key} = {value}" for key, value in values.items())
        base = self.base.replace(**{**values, "name": name})
        folder = self.folder / "trials" / f"{trial.number:03d}"
        return [base.replace(seed=seed, out=folder / f"seed-{seed}") for seed in self.seeds]

    def _run(
        self, trial: Trial, position: int, config: Config, on_round: Callable[[], None]
    ) -> None:
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values

        def report(record: Mapping[str, Any]) -> None:
            number = int(record["round"])
            step = number + position * self.rounds
            at_end = position == len(self.seeds) - 1 and number == config.rounds
            if self.metric in record and number > 0 and not at_end:
                if step not in reported:  # before the trial was cut off
                    trial.report(record[self.metric], step)
                if trial.should_prune():
                    raise Stopped("pruned")
            on_round()

        try:
            with log_from(ERROR):  # it would say how to go on with the run, not with the search
                run(config, progress=False, resume=True, on_round=report)
        except Stopped:
            raise
        except (RunFailed, ConfigError) as error:
            raise RunFailed(f"seed {config.seed}: {error}") from error

    def _tell(self, trial: Trial, configs: Sequence[Config], state: TrialState, error: str) -> None:
        means, rounds, seconds = [], 0, 0.0
        for config in configs:
            records = read_records(config.folder)
            measured = [r[self.metric] for r in records if r["round"] and self.metric in r]
            if measured:
                means.append(float(np.mean(measured[-self.last :])))
            rounds += max(len(records) - 1, 0)
            seconds += sum(record["seconds"] for record in records)
        finite = len(means) == len(self.seeds) and np.isfinite(means).all()
        if state == TrialState.COMPLETE and not finite:
            error, state = f"{self.metric} is missing or not finite", TrialState.FAIL
        result = {"means": means, "rounds": rounds, "seconds": seconds, "error": error}
        trial.set_user_attr("result", result)
        if state != TrialState.FAIL:
            value = float(np.mean(means)) if state == TrialState.COMPLETE else None
            self.study.tell(trial, value, state)

    def rounds_done(self) -> int:
        """Return the rounds run in all trials; all rounds of a trial that has ended."""
        whole = len(self.seeds) * self.rounds
        return sum(
            whole if trial.user_attrs.get("result") else max(trial.intermediate_values, default=0)
            for trial in self.study.get_trials(deepcopy=False)
        )

    def show(self, shown: Progress) -> None:
        """Show the rounds of all trials, how many have ended, and the best value."""
        trials = self.study.get_trials(deepcopy=False)
        ended = sum(bool(trial.user_attrs.get("result")) for trial in trials)
        shown.state = f"{ended} of {max(len(trials), self.trials)} trials"
        with contextlib.suppress(ValueError):  # none has finished
            shown.state += f", best {self.metric} {self.study.best_value:.4g}"
        shown.on_round({"round": self.rounds_done()})

    def table(self) -> pd.DataFrame:
        """Return all trials: the finished ones, the best first; the pruned; the failed."""
        rows: list[dict[str, Any]] = []
        for trial in self.study.get_trials(deepcopy=False):
            result: dict[str, Any] = {**CUT_OFF, **trial.user_attrs.get("result", {})}
            means = pd.Series(result.pop("means"), dtype=float)
            row = {"trial": trial.number, "state": STATES.get(trial.state, "failed")}
            row |= {"mean": means.mean(), "std": means.std(), **self.values(trial), **result}
            rows.append(row)
        order, sign = [*STATES.values(), "failed"], 1 if is_lower_better(self.metric) else -1
        rows.sort(key=lambda r: (order.index(r["state"]), np.isnan(r["mean"]), sign * r["mean"]))
        return pd.DataFrame(rows)


def run_in_processes(search: Search, count: int, show: Callable[[], None]) -> None:
    """Run the trials in `count` processes, each with its part of the cores.

    If one is killed, its trial fails, and the others run what is left.
    """
    passed, context = passed_data(search.base.dataset), get_context("spawn")
    workers = [context.Process(target=_work, args=(search, passed)) for _ in range(count)]
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    try:
        for worker in workers:
            worker.daemon = True
            worker.start()
        while alive := [worker.sentinel for worker in workers if worker.is_alive()]:
            show()
            wait(alive, timeout=0.5)
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join(processes.PATIENCE)
                worker.kill()
                worker.join()
    if search.next_number() is not None:
        codes = [worker.exitcode for worker in workers]
        raise RunFailed(f"the processes that run trials ended, with exit codes {codes}")


def _work(search: Search, passed: Data | None) -> None:
    if passed is not None:
        passed.keep()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    getLogger("flwr").disabled = True  # the main process says what went wrong
    with contextlib.suppress(KeyboardInterrupt):
        search.run(require_parent)


def require_parent(*_: object) -> None:
    """End a process that was started by one that is there no more."""
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        raise KeyboardInterrupt
