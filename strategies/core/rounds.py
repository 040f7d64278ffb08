"""The rounds of a run, over the hooks that all of Flower's strategies have."""

import time
from collections.abc import Callable
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .checkpoint import RunCheckpoints
from .replies import NoUsableReply

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]
GIVE_UP = 3  # first rounds of a run that may pass without any reply that can be used
logger = getLogger("flwr")


def run_rounds(
    strategy: Any,
    grid: Grid,
    arrays: ArrayRecord,
    num_rounds: int,
    checkpoints: RunCheckpoints | None,
    *,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    evaluate_fn: EvaluateFn | None,
    should_stop: ShouldStop | None,
) -> Result:
    """Run the rounds that remain, in the order of Flower's own ``Strategy.start``.

    `strategy` is a BaseStrategy; the other parameters are those of its ``start``. The newest
    checkpoint, if there is one, takes the place of `arrays`.
    """
    result = Result() if checkpoints is None else checkpoints.restore(strategy, num_rounds)
    done = strategy.rounds_loaded or 0
    name = type(strategy).__name__
    logger.info("Starting %s strategy: rounds %d to %d", name, done + 1, num_rounds)
    strategy.summary()
    arrays = strategy.begin(result.arrays or arrays, num_rounds, done)
    if strategy.averaged is not None and strategy.averaged.count:
        arrays, result.arrays = strategy.averaged.newest, strategy.averaged.mean
    arrays = strategy.centre(arrays, grid)
    started = time.monotonic()

    def fault() -> RuntimeError | None:
        return None if done else fault_of(strategy, changed=bool(result.arrays))

    def is_last(number: int) -> bool:
        if evaluate_fn is not None:
            metrics = _evaluate(evaluate_fn, strategy, number, strategy.choose_evaluated(arrays))
            logger.info("Evaluation on the server: %s", metrics)
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
        if checkpoints is not None and not fault():
            checkpoints.save(number, arrays, strategy.state_dict(), result)
        return strategy.finished or (should_stop is not None and should_stop(number, result))

    for number in () if is_last(done) else range(done + 1, num_rounds + 1):
        logger.info("[ROUND %s/%s]", number, num_rounds)
        messages = strategy.configure_train(number, arrays, train_config, grid)
        replies = strategy.receive(grid, MessageType.TRAIN, messages)
        found = strategy.aggregate_train(number, replies)
        if not (isinstance(found, tuple) and isinstance(found[0], ArrayRecord | None)):
            raise TypeError(
                f"{name}.aggregate_train: expected to get an ArrayRecord, or None, and metrics, "
                f"got {found!r:.60}; end it with: return cast_like(new, model), metrics"
            )
        found, metrics = found
        if not strategy.fraction_train:  # nobody was asked
            strategy.train_metrics.pop(number, None)
            metrics = None
        if found is not None:
            arrays = found
            if strategy.averaged is not None:
                strategy.averaged.add(arrays)
            result.arrays = strategy.choose_evaluated(arrays)
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.train_metrics_clientapp[number] = metrics
        if number == GIVE_UP and strategy.gives_up and (error := fault()):
            raise error
        judged = strategy.choose_evaluated(arrays)
        messages = strategy.configure_evaluate(number, judged, evaluate_config, grid)
        replies = strategy.receive(grid, MessageType.EVALUATE, messages)
        metrics = strategy.aggregate_evaluate(number, replies)
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.evaluate_metrics_clientapp[number] = metrics
        if is_last(number):
            break
    logger.info("Finished in %.2f s. Results:", time.monotonic() - started)
    for line in str(result).splitlines():
        logger.info("\t%s", line)
    if error := fault():
        raise error
    result.arrays = result.arrays or arrays
    return result


def fault_of(strategy: Any, *, changed: bool) -> RuntimeError | None:
    """Return why all rounds of a run so far were in vain; such a run leaves no checkpoint."""
    if strategy.last_failure and not changed:
        rounds = strategy.server_round
        return RuntimeError(f"in {rounds} rounds the model never changed: {strategy.last_failure}")
    trained = [m for m in strategy.train_metrics.values() if "replies-accepted" in m]
    if not trained or any(metrics["replies-accepted"] for metrics in trained):
        return None
    return NoUsableReply(
        f"in {len(trained)} rounds no client's reply could be used; the last refused: "
        f"{strategy.last_refusal or 'none came at all'}"
    )


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
