"""What is recorded of each round, and when a run has learned enough."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from fedntk.ntk.predictors.network import Evaluation
from fedntk.strategies import Strategy
from fedntk.strategies.core.replies import INCOMPLETE
from fedntk.strategies.core.rounds import fault_of

from ..checkpoints import Best, Checkpoint, Checkpoints, OnRound, Record, Round
from ..config.config import BaseConfig
from ..config.metrics import MEASURED, MEASURED_PREFIXES, OF_TARGETS, is_lower_better, metrics_of
from .engines import MeteredGrid, peak_memory, reset_peak_memory

logger = getLogger("flwr")

# what strategies of all methods report of a round's replies
OF_REPLIES = ("num-examples", "replies-accepted", "replies-rejected", INCOMPLETE)
QUALITY = {"accuracy": min, "loss": max, "r2": min, "mae": max}  # of models; the worst of several
DEFINED = {"accuracy", "loss", "mae"}  # of these, with any examples
OTHERS = 32  # names that clients may choose over a run
LONGEST = 64  # characters of such a name


class AdmittedMetrics:
    """Metrics of clients that are recorded: known ones, a bounded number of others."""

    def __init__(
        self, known: Iterable[str], refused: Callable[[str], bool], source: str, most: int = OTHERS
    ) -> None:
        self._known, self._refused, self._source = frozenset(known), refused, source
        self._others: set[str] = set()
        self._reasons: set[str] = set()  # of rejected replies: names that servers give
        self._most, self._warned = most, False

    def take(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers among the metrics that are recorded."""
        scalars = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and not self._refused(name)
        }
        admitted = {n for n in scalars if n.isprintable() and self._admits(n)}
        if (left_out := scalars.keys() - admitted) and not self._warned:
            self._warned = True
            logger.warning(
                "metrics of %s are left out, as %.80r: %d names of at most %d printable characters "
                "are recorded besides the known ones",
                *(self._source, min(left_out), self._most, LONGEST),
            )
        return {name: value for name, value in scalars.items() if name in admitted}

    def remember(self, names: Iterable[str]) -> None:
        """Admit names that were recorded before a run was cut off."""
        for name in set(names) - self._known:
            self._pool(name).add(name)

    def _pool(self, name: str) -> set[str]:
        return self._reasons if name.startswith("rejected-") else self._others

    def _admits(self, name: str) -> bool:
        if name in self._known:
            return True
        pool = self._pool(name)
        most = OTHERS if pool is self._reasons else self._most
        if len(name) <= LONGEST and len(pool) < most:
            pool.add(name)
        return name in pool


@dataclass(eq=False)
class Recorder:
    """Evaluates what was learned after each round; records and saves what the round did.

    It calls `on_round` with the metrics of each round, and writes `source` into each
    :class:`~fedntk.simulations.checkpoints.Checkpoint`.
    """

    config: BaseConfig
    grid: MeteredGrid
    strategy: Strategy
    evaluate: Callable[[dict[str, NDArray[Any]]], Evaluation]
    checkpoints: Checkpoints
    source: dict[str, str]
    on_round: OnRound | None = None

    def __post_init__(self) -> None:
        self._arrays = ArrayRecord()
        self._saved = -1
        self._start = time.perf_counter()
        config, method = self.config, self.config.chosen_method
        known: tuple[str, ...] = (*OF_REPLIES, "train-loss", *method.metrics)
        further = {n: max if is_lower_better(n) else min for n in config.metrics_of_clients}
        self._quality = QUALITY | further
        of_clients = (*OF_REPLIES, *self._quality, *method.evaluation_metrics)
        most = OTHERS
        if config.mechanism is not None:  # what is on its list, and nothing else
            known, of_clients = (*OF_REPLIES, *config.mechanism.metrics), (*QUALITY,)
            most = 0
        self._of_training = AdmittedMetrics(known, self._is_measured_here, "training", most)
        self._of_evaluation = AdmittedMetrics(of_clients, self._is_statistic, "evaluation", most)
        source = "clients' evaluations"
        self._of_clients = AdmittedMetrics(of_clients, lambda _: False, source, most)
        self.checkpoint = Checkpoint({}, self.strategy.learned, {}, self.source)
        reset_peak_memory()

    def go_on_from(self, checkpoint: Checkpoint, arrays: ArrayRecord) -> None:
        """Take over what was recorded; `arrays` are what the strategy is started from."""
        self._arrays, self.checkpoint, self._saved = arrays, checkpoint, checkpoint.round
        names = {name for record in checkpoint.records for name in record}
        self._of_training.remember(n for n in names if not self._is_measured_here(n))
        of_clients = (n.removeprefix("client-") for n in names if n.startswith("client-"))
        self._of_evaluation.remember(name for name in of_clients if not self._is_statistic(name))
        self._of_clients.remember(name for r in checkpoint.rounds for _, name, _ in r.clients)
        self._append(*checkpoint.records)

    def save(self) -> None:
        """Write a checkpoint, if there is anything new and the run is not in vain so far."""
        changed = any(record.get("model-updated") for record in self.checkpoint.records)
        in_vain = self._saved <= 0 and fault_of(self.strategy, changed=changed)
        if self.checkpoint.round > self._saved and not in_vain:
            self.checkpoints.save(self.checkpoint)
            self._saved = self.checkpoint.round

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate and record a round, unless a run goes on from it: Flower's ``evaluate_fn``."""
        seconds = time.perf_counter() - self._start
        if server_round > self.checkpoint.round:
            self._record(server_round, arrays, seconds)
        else:
            self._arrays = arrays  # as the strategy hands them on, from which a run goes on
        last = self.checkpoint.rounds[-1].metrics
        self._start = time.perf_counter()
        reset_peak_memory()
        if "loss" not in last:
            return None
        return MetricRecord({name: last[name] for name in QUALITY if name in last})

    def should_stop(self, server_round: int, result: Result) -> bool:
        """Whether this round is evaluated, and as many as `patience` had no better model."""
        best, patience = self.checkpoint.best, self.config.patience
        in_vain = best is not None and 0 < patience <= server_round - best.round
        if not in_vain or not self.strategy.evaluates_in(server_round):
            return False
        logger.info("no better model in %d rounds: stopped", patience)
        return True

    def _is_measured_here(self, name: str) -> bool:
        measured = *MEASURED, *OF_TARGETS, *metrics_of(self.config.metrics)
        return name in measured or name.startswith(MEASURED_PREFIXES)

    def _is_statistic(self, name: str) -> bool:
        return name.startswith(tuple(f"{quality}-" for quality in self._quality))

    def _record(self, server_round: int, arrays: ArrayRecord, seconds: float) -> None:
        updated = arrays is not self._arrays  # Flower hands on the same record if none came
        weights = {name: array.numpy() for name, array in arrays.items()}
        strategy = self.strategy
        evaluated: dict[str, Any] = {}
        if strategy.evaluates_in(server_round):
            loss, accuracy, more = self.evaluate(weights)
            evaluated = {**more, "accuracy": accuracy, "loss": loss}
            evaluated = {name: value for name, value in evaluated.items() if value is not None}
        record: Record = self._of_training.take(strategy.train_metrics.get(server_round, {}))
        by_clients = self._of_evaluation.take(strategy.evaluate_metrics.get(server_round, {}))
        record |= {f"client-{name}": value for name, value in by_clients.items()}
        record |= {**evaluated, "round": server_round}
        if server_round in strategy.train_metrics:
            record["model-updated"] = int(updated)
        clients: dict[int, dict[str, float]] = {}
        if server_round in strategy.evaluate_metrics:
            evaluations = sorted(strategy.client_evaluations.items())
            clients = {
                partition: self._of_clients.take(metrics) for partition, metrics in evaluations
            }
            record |= self._among_clients(list(clients.values()))
        costs = self.grid.take()
        waiting = costs.pop("seconds-waiting")
        record |= {**costs, "seconds-server": seconds - waiting, "seconds": seconds}
        record["peak-memory"] = peak_memory()

        config, best = self.config, self.checkpoint.best
        sign = -1 if is_lower_better(config.monitor) else 1
        value = record.get(config.monitor, math.nan)
        if not math.isnan(value) and (best is None or sign * value > sign * best.value):
            best = Best(server_round, float(value), strategy.learned, weights)
        self._arrays = arrays
        rounds = [*self.checkpoint.rounds, Round.of(record, clients)]
        self.checkpoint = Checkpoint(
            weights, strategy.learned, strategy.state_dict(), self.checkpoint.source, rounds, best
        )
        config.chosen_method.after_round(strategy, server_round, config.folder / "details")
        if server_round % config.checkpoint_every == 0:
            self.save()
        self._append(record)
        if self.on_round is not None:
            self.on_round(record)

    def _among_clients(self, metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Mean, worst and standard deviation over the clients, each counting once.

        They are NaN where a client's value is NaN or infinite, which its reply leaves out.
        """
        statistics: dict[str, float] = {}
        for name, worst in self._quality.items():
            values = [float(client[name]) for client in metrics if name in client]
            if 0 < len(values) < len(metrics) and name in DEFINED:
                values = [math.nan]
            if values:
                statistics[f"client-{name}-mean"] = float(np.mean(values))
                statistics[f"client-{name}-worst"] = worst(values)
                statistics[f"client-{name}-std"] = float(np.std(values))
        return statistics

    def _append(self, *records: Record) -> None:
        with (self.config.folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
