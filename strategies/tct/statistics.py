"""The phases of TCT with ``solve="statistics"``: one exchange of sums over all clients' features.

Beyond Yu et al., NeurIPS 2022: the problem of their stage 2 has its solution in sums over the
examples, which add over clients: see :mod:`fedntk.ntk.payloads.feature_statistics`.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk.convex.pooled_statistics import class_weights
from fedntk.ntk.payloads.convex_task import Step
from fedntk.ntk.support.arrays import ArrayDict, require_counts

from ..core.averaging import record_of
from ..core.exchange import logger, result_of
from ..core.feature_sums import Sums, add_up
from ..core.replies import Reply, screen_own_sizes
from .convex_strategy import SCALE
from .phases import Phase, Result

EVERYONE = -1  # in the place of a client's id


class ClassCounts(Phase):
    """One exchange of the classes' counts, from which all clients get the same weights."""

    step = "counts"
    asks_everyone = True
    needs = ()

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Add the counts up; no array changes."""
        tct = self.tct

        def parse(reply: Reply) -> NDArray[np.int64]:
            (counts,) = reply.ordered_arrays("counts")
            require_counts(counts, tct.shape[1], reply.num_examples)
            return counts

        pairs, metrics = self.gather(replies, parse)
        if not pairs:
            return None, metrics
        tct.class_weights = class_weights(np.sum([counts for _, counts in pairs], axis=0))
        return {}, metrics


class PooledStatistics(Phase):
    """One exchange of sums over the features, masked if wanted, from which the server solves."""

    step: ClassVar[Step] = "statistics"
    asks_everyone = True
    changes_linear = True

    def messages(self, nodes: list[int], config: ConfigRecord, grid: Grid) -> list[Message]:
        """Choose the steps of fixed-point numbers if these are used; make the messages."""
        try:
            self.tct.steps = self.tct.choose_steps(self.tct.global_arrays)
        except ValueError as error:
            logger.warning("no steps of fixed-point numbers: %s", error)
            return []
        return super().messages(nodes, config, grid)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, the network, and what features are rounded, weighted or masked by."""
        tct, step = self.tct, self.step
        if tct.secure is not None and (step := tct.secure.step) != "masked":  # needs no network
            content = tct.task_message(step, (), arrays, config)
        else:
            content = tct.task_message(step, tct.sent.lacks(client, *self.needs), arrays, config)
            if len(tct.steps):
                content["steps"] = record_of({"tct.step": tct.steps})
            if tct.balanced:
                content["class-weights"] = record_of({"tct.class-weights": tct.class_weights})
        if tct.secure is not None:
            tct.secure.add_to(content, client)
        return content

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Add the sums up and solve."""
        tct, (sums, metrics) = self.tct, self.collect(replies)

        def solve() -> ArrayDict:
            total, arrays = add_up(sums.values()), tct.global_arrays
            normaliser, linear, metrics["ridge"] = tct.solve_sums(total, arrays)
            return tct.arrays_of(normaliser, linear)

        changed = result_of(solve) if sums else None
        if changed is not None:
            tct.keep(sums)
            metrics["features-constant"] = int((changed[SCALE] == 0).sum())
        return changed, metrics

    def collect(self, replies: Iterable[Message]) -> tuple[Mapping[int, Sums], MetricRecord]:
        """Return sums by client, or the one sum over all, and the round's metrics.

        There are none if too few clients sent theirs.
        """
        tct = self.tct
        if tct.secure is not None:
            total, last, rejected = tct.complete_sum(tct.secure, replies)
            for reply in last:
                tct.sent.mark(reply.client, *self.needs)
            return {} if total is None else {EVERYONE: total}, tct.round_metrics(last, rejected)
        pairs, metrics = self.gather(
            replies,
            lambda reply: tct.parse_sums(reply.arrays(), reply.num_examples),
            screen_own_sizes,
        )
        return {reply.client: own for reply, own in pairs}, metrics
