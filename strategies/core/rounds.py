"""Flower's rounds, counted on from those that were run before, and ended when it is time."""

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .averaged_model import AveragedModel

__all__ = ["AfterRound", "EvaluateFn", "ShouldStop", "run_rounds"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]
AfterRound = Callable[[int, ArrayRecord, Result], None]
logger = logging.getLogger("flwr")
FLOWER_STOPS = "should_stop" in inspect.signature(Strategy.start).parameters


def run_rounds(
    strategy: Strategy,
    done: int,
    *,
    num_rounds: int,
    evaluate_fn: EvaluateFn | None,
    should_stop: ShouldStop | None,
    after_round: AfterRound | None = None,
    before: Result | None = None,
    averaged: AveragedModel | None = None,
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
    after_round : callable, optional
        Is given each round, its arrays and the Result so far once the round is evaluated, and
        `done` first.
    before : Result, optional
        Of the rounds that have been run, to be added to.
    averaged : AveragedModel, optional
        Is given the weights of each round that changed them; its mean, not they, is what is
        evaluated and returned. `after_round` is given the weights.
    **options
        Of ``Strategy.start``.

    Returns
    -------
    Result
        Of these rounds, under their own numbers, and of those in `before`.
    """
    own_class = type(type(strategy).__name__, (_Counted,), {})  # Flower logs its name
    counted: _Counted = own_class(strategy, done, Result() if before is None else before)
    counted.averaged, result = averaged, counted.result
    if averaged is not None and averaged.count:
        result.arrays = averaged.mean

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        number, metrics = server_round + done, None
        if evaluate_fn is not None:
            metrics = _evaluated(evaluate_fn, strategy, number, counted.judged(arrays))
        if metrics is not None:
            result.evaluate_metrics_serverapp[number] = metrics
        if after_round is not None:
            after_round(number, arrays, result)
        flower_asks = FLOWER_STOPS and server_round > 0
        if should_stop is not None and not flower_asks and should_stop(number, result):
            raise _Stop
        return metrics

    if should_stop is not None and FLOWER_STOPS:
        options["should_stop"] = lambda number, _: should_stop(number + done, result)
    called = (evaluate_fn, should_stop, after_round)
    with contextlib.suppress(_Stop), _logged_from(done):
        counted.start(
            num_rounds=max(num_rounds - done, 0),
            evaluate_fn=evaluate if any(called) else None,
            **options,
        )
    if done:
        logger.info("Final results of all rounds:")
        for line in str(result).splitlines():
            logger.info("\t%s", line)
    return result


def _evaluated(
    evaluate_fn: EvaluateFn, strategy: Strategy, server_round: int, arrays: ArrayRecord
) -> MetricRecord | None:
    """Call a user's function, and say what to do where it takes all arrays for a network's."""
    try:
        return evaluate_fn(server_round, arrays)
    except RuntimeError as error:
        if "Unexpected key(s) in state_dict" not in str(error):
            raise
        raise RuntimeError(
            f"evaluate_fn: {type(strategy).__name__} passes it arrays of more than the network; "
            "use strategy.predictor(arrays) in place of the network, an nn.Module that gives the "
            "scores in every round"
        ) from error


@contextlib.contextmanager
def _logged_from(done: int) -> Iterator[None]:
    """Have Flower's log say the rounds' own numbers, and leave out its results of some of them."""
    thread, ended = threading.get_ident(), False

    def renumbered(record: logging.LogRecord) -> bool:
        nonlocal ended
        if record.thread != thread:
            return True
        if record.msg == "[ROUND %s/%s]" and isinstance(record.args, tuple):
            record.args = tuple(int(str(number)) + done for number in record.args)
        ended = ended or record.msg == "Final results:"
        return not ended

    if done:
        logger.addFilter(renumbered)
    try:
        yield
    finally:
        logger.removeFilter(renumbered)


class _Stop(Exception):  # noqa: N818
    """Leaves Flower's loop, which before 1.43 has no other end than its last round."""


class _Counted(Strategy):
    """A strategy that hears of round `done` + r where Flower says r; it keeps the result."""

    averaged: AveragedModel | None = None

    def __init__(self, strategy: Strategy, done: int, result: Result) -> None:
        self.strategy, self.done, self.result = strategy, done, result

    def judged(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what is evaluated: the mean, where there is one, else the newest arrays."""
        if self.averaged is None or not self.averaged.count:
            return arrays
        return self.averaged.mean

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
            if self.averaged is not None:
                self.averaged.add(arrays)
            self.result.arrays = self.judged(arrays)
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        number = server_round + self.done
        return self.strategy.configure_evaluate(number, self.judged(arrays), config, grid)

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
