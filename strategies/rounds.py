"""Flower's rounds, counted on from those that were run before, and ended when it is time."""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

__all__ = ["EvaluateFn", "ShouldStop", "run_rounds"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]
FLOWER_STOPS = "should_stop" in inspect.signature(Strategy.start).parameters


def run_rounds(
    strategy: Strategy,
    done: int,
    *,
    num_rounds: int,
    evaluate_fn: EvaluateFn | None,
    should_stop: ShouldStop | None,
    **options: Any,
) -> Result:
    """Run the rounds ``done + 1 ... num_rounds`` of a strategy.

    Parameters
    ----------
    strategy : Strategy
        In the state after `done` rounds.
    done : int
        Rounds that have been run.
    num_rounds : int
        Rounds in all.
    evaluate_fn : callable, optional
        Is called first with `done` and the arrays that the strategy starts from.
    should_stop : callable, optional
        (round, Result so far) -> whether that round is the last one. Called after each evaluation
        of these, the first one, too.
    **options
        Of ``Strategy.start``.

    Returns
    -------
    Result
        Of these rounds, under their own numbers.
    """
    counted = _Counted(strategy, done)
    result = counted.result

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        number, metrics = server_round + done, None
        if evaluate_fn is not None:
            metrics = evaluate_fn(number, arrays)
        if metrics is not None:
            result.evaluate_metrics_serverapp[number] = metrics
        flower_asks = FLOWER_STOPS and server_round > 0
        if should_stop is not None and not flower_asks and should_stop(number, result):
            raise _Stop
        return metrics

    if should_stop is not None and FLOWER_STOPS:
        options["should_stop"] = lambda number, _: should_stop(number + done, result)
    with contextlib.suppress(_Stop):
        counted.start(
            num_rounds=max(num_rounds - done, 0),
            evaluate_fn=None if evaluate_fn is None and should_stop is None else evaluate,
            **options,
        )
    return result


class _Stop(Exception):  # noqa: N818
    """Leaves Flower's loop, which before 1.43 has no other end than its last round."""


class _Counted(Strategy):
    """A strategy that hears of round `done` + r where Flower says r; it keeps the result."""

    def __init__(self, strategy: Strategy, done: int) -> None:
        self.strategy, self.done = strategy, done
        self.result = Result()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round + self.done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        number = server_round + self.done
        arrays, metrics = self.strategy.aggregate_train(number, replies)
        if arrays is not None:
            self.result.arrays = arrays
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round + self.done, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        number = server_round + self.done
        metrics = self.strategy.aggregate_evaluate(number, replies)
        if metrics is not None:
            self.result.evaluate_metrics_clientapp[number] = metrics
        return metrics

    def summary(self) -> None:
        self.strategy.summary()
