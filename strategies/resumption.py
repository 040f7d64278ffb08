"""Going on after some rounds: Flower's ``start`` counts from 1, here it counts on."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

__all__ = ["start_after"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


def start_after(
    strategy: Strategy,
    done: int,
    *,
    num_rounds: int,
    evaluate_fn: EvaluateFn | None,
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
    **options
        Of ``Strategy.start``.

    Returns
    -------
    Result
        Of these rounds, under their own numbers.
    """
    evaluate = None
    if evaluate_fn is not None:

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return evaluate_fn(server_round + done, arrays)

    result = _After(strategy, done).start(
        num_rounds=max(num_rounds - done, 0), evaluate_fn=evaluate, **options
    )
    for name in (
        "train_metrics_clientapp",
        "evaluate_metrics_clientapp",
        "evaluate_metrics_serverapp",
    ):
        own = {number + done: metrics for number, metrics in getattr(result, name).items()}
        setattr(result, name, own)
    return result


class _After(Strategy):
    """A strategy that hears of round `done` + r where Flower says r."""

    def __init__(self, strategy: Strategy, done: int) -> None:
        self.strategy, self.done = strategy, done

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round + self.done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round + self.done, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round + self.done, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round + self.done, replies)

    def summary(self) -> None:
        self.strategy.summary()
