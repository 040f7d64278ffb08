"""The rounds of a run, over the hooks that all of Flower's strategies have."""

import time
from collections.abc import Callable, Iterable
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedntk.trust.secure_sum import FEWEST

from .asynchrony import Asynchrony
from .centre import STAGE, CentreInputs
from .channel import Conversation
from .checkpoint import RunCheckpoints
from .replies import NoUsableReply
from .round import Round, timeout_of
from .sampling import Population, await_nodes, patience_with
from .secure import SecureAggregation
from .weight_average import WeightAverage

Strategy = Any  # that of core.strategy, which imports this file
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]
GIVE_UP = 3  # first rounds of a run that may pass without any reply that can be used
logger = getLogger("flwr")


def run_rounds(
    strategy: Strategy,
    grid: Grid,
    arrays: ArrayRecord,
    num_rounds: int,
    checkpoints: RunCheckpoints | None,
    configs: tuple[ConfigRecord, ConfigRecord],
    evaluate_fn: EvaluateFn | None,
    should_stop: ShouldStop | None,
) -> Result:
    """Run the rounds that remain, as Flower's own ``start`` does, from the newest checkpoint."""
    train_config, evaluate_config = configs
    result = Result() if checkpoints is None else checkpoints.restore(strategy, num_rounds)
    done = strategy.rounds_loaded or 0
    name = type(strategy).__name__
    logger.info("Starting %s strategy: rounds %d to %d", name, done + 1, num_rounds)
    strategy.summary()
    arrays = open_run(strategy, result.arrays or arrays, num_rounds, done)
    average = strategy.part_of(WeightAverage)
    if average is not None and average.count:
        arrays, result.arrays = average.newest, average.mean
    arrays = _centre(strategy, arrays, grid)
    started = time.monotonic()

    def fault() -> RuntimeError | None:
        return None if done else fault_of(strategy, changed=bool(result.arrays))

    def evaluated() -> ArrayRecord:
        return arrays if average is None or not average.count else average.mean

    def replies_to(messages: Iterable[Message], stage: str) -> Iterable[Message]:
        timeout = timeout_of(strategy, stage)
        replies: Iterable[Message] = strategy.channel.collect(grid, messages, timeout)
        return replies

    def is_last(number: int) -> bool:
        if evaluate_fn is not None:
            metrics = _evaluate(evaluate_fn, strategy, number, evaluated())
            logger.info("Evaluation on the server: %s", metrics)
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
        if checkpoints is not None and not fault():
            checkpoints.save(number, arrays, strategy.state_dict(), result)
        return strategy.finished or (should_stop is not None and should_stop(number, result))

    for number in () if is_last(done) else range(done + 1, num_rounds + 1):
        logger.info("[ROUND %s/%s]", number, num_rounds)
        messages = strategy.configure_train(number, arrays, train_config, grid)
        replies = replies_to(messages, MessageType.TRAIN)
        update, metrics = strategy.aggregate_train(number, replies)
        if update is not None:
            arrays = update
            if average is not None:
                average.add(arrays)
            result.arrays = evaluated()
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.train_metrics_clientapp[number] = metrics
        waits = strategy.part_of(Asynchrony) is not None  # for late replies
        if number == GIVE_UP and not waits and (error := fault()):
            raise error
        messages = strategy.configure_evaluate(number, evaluated(), evaluate_config, grid)
        replies = replies_to(messages, MessageType.EVALUATE)
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


def fault_of(strategy: Strategy, *, changed: bool) -> RuntimeError | None:
    """Return why all rounds of a run so far were in vain; such a run leaves no checkpoint."""
    if strategy.channel.last_failure and not changed:
        rounds = strategy.server_round
        return RuntimeError(
            f"in {rounds} rounds the model never changed: {strategy.channel.last_failure}"
        )
    trained = [m for m in strategy.train_metrics.values() if "replies-accepted" in m]
    if not trained or any(metrics["replies-accepted"] for metrics in trained):
        return None
    return NoUsableReply(
        f"in {len(trained)} rounds no client's reply could be used; the last refused: "
        f"{strategy.channel.last_refusal or 'none came at all'}"
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


def open_run(
    strategy: Strategy, initial_arrays: ArrayRecord, num_rounds: int, done: int
) -> ArrayRecord:
    """Return the arrays that a run begins with; if no round is `done`, forget earlier runs."""
    strategy.require_memory()
    strategy.last_round = num_rounds
    strategy.reset_state(saved_too=strategy.rounds_loaded is None)
    strategy.rounds_loaded = None
    begun: ArrayRecord = strategy.begin(initial_arrays, num_rounds, done)
    return begun


def _centre(strategy: Strategy, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
    """Ask clients for the mean of their inputs, if it is to be taken off them."""
    centre: CentreInputs | None = strategy.part_of(CentreInputs)
    if centre is None or not strategy.fraction_train:
        return arrays
    fewest, available = strategy.fewest_replies, strategy.min_available_nodes
    population = Population(1.0, fewest, 0, available, strategy.sampling.held_out)
    strategy.channel.grid = grid
    r = Round(strategy, 0, STAGE, arrays, {}, population)
    return Conversation(centre.centred(r), strategy.channel).run()


def require_nodes(strategy: Strategy, grid: Grid) -> None:
    """Refuse, before any work, what wants more nodes than the grid will ever have."""
    if patience_with(grid) == float("inf"):
        return
    wanted = dict[str, int]()
    if strategy.fraction_train:
        wanted["min_train_nodes"] = strategy.min_train_nodes
        rule = strategy.screening.rule
        fewest = {
            "min_completed": int(strategy.min_completed),
            f"screening.rule = {rule}": strategy.screening.fewest,
            "secure": 0 if strategy.part_of(SecureAggregation) is None else FEWEST,
        }
        held_out = sum(partition >= 0 for partition in set(strategy.sampling.held_out))
        beside = f" beside {held_out} held out" if held_out else ""
        wanted |= {f"{name}{beside}": n + held_out for name, n in fewest.items() if n > 1}
    if strategy.fraction_evaluate:
        wanted["min_evaluate_nodes"] = strategy.min_evaluate_nodes
    if wanted:
        await_nodes(grid, {"min_available_nodes": strategy.min_available_nodes} | wanted)
