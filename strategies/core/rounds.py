"""The rounds of a run, over the hooks that all of Flower's strategies have."""

import logging
import time
from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

__all__ = ["AfterRound", "EvaluateFn", "ShouldStop", "run_rounds"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]
AfterRound = Callable[[int, ArrayRecord, Result], None]
logger = logging.getLogger("flwr")


def run_rounds(
    strategy: Any,
    grid: Grid,
    arrays: ArrayRecord,
    result: Result,
    *,
    rounds: range,
    timeout: float,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    evaluate_fn: EvaluateFn | None,
    should_stop: ShouldStop | None,
    after_round: AfterRound | None = None,
) -> None:
    """Run some rounds of a strategy, in the order of Flower's own ``Strategy.start``.

    Parameters
    ----------
    strategy : BaseStrategy
        In the state before these rounds.
    grid : Grid
        Sends messages and waits for the replies.
    arrays : ArrayRecord
        What the first of these rounds begins with.
    result : Result
        What each round returned is added to it, under the round's number.
    rounds : range
        Numbers of the rounds, from 1.
    evaluate_fn : callable, optional
        Called with the arrays before the first of these rounds, and after each.
    should_stop : callable, optional
        (round, result so far) -> whether that round is the last one; asked after each evaluation.
    after_round : callable, optional
        Called when a round has been evaluated with its number, the newest arrays and the result.
    timeout, train_config, evaluate_config
        Flower's.
    """
    started = time.monotonic()

    def is_last(number: int) -> bool:
        if evaluate_fn is not None:
            metrics = _evaluate(evaluate_fn, strategy, number, strategy.judged(arrays))
            logger.info("Evaluation on the server: %s", metrics)
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
        if after_round is not None:
            after_round(number, arrays, result)
        return should_stop is not None and should_stop(number, result)

    over = is_last(rounds.start - 1)
    for number in () if over else rounds:
        logger.info("[ROUND %s/%s]", number, rounds.stop - 1)
        messages = strategy.configure_train(number, arrays, train_config, grid)
        replies = grid.send_and_receive(messages=messages, timeout=timeout)
        found, metrics = strategy.aggregate_train(number, replies)
        if found is not None:
            arrays = found
            strategy.keep_mean(arrays)
            result.arrays = strategy.judged(arrays)
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.train_metrics_clientapp[number] = metrics
        judged = strategy.judged(arrays)
        messages = strategy.configure_evaluate(number, judged, evaluate_config, grid)
        replies = grid.send_and_receive(messages=messages, timeout=timeout)
        metrics = strategy.aggregate_evaluate(number, replies)
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.evaluate_metrics_clientapp[number] = metrics
        if is_last(number):
            break
    logger.info("Finished in %.2f s. Results:", time.monotonic() - started)
    for line in str(result).splitlines():
        logger.info("\t%s", line)


def _evaluate(
    evaluate_fn: EvaluateFn, strategy: Strategy, server_round: int, arrays: ArrayRecord
) -> MetricRecord | None:
    """Call a user's function, and say what to do if it takes all arrays for a network's."""
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
