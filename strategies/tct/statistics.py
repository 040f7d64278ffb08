"""The phases of TCT with ``solve="statistics"``: one exchange of sums over all clients' features.

Beyond Yu et al., NeurIPS 2022: the problem of their stage 2 has its solution in sums over the
examples, which add over clients: see :mod:`fedntk.ntk.payloads.feature_statistics`.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import require_memory
from fedntk.ntk.convex import class_weights
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.payloads.convex_task import Step
from fedntk.ntk.payloads.feature_statistics import FEWER, require_counts

from ..core.averaging import record_of
from ..core.exchange import logger
from ..core.feature_sums import Sums
from ..core.replies import Reply, screen_own_sizes
from .convex_strategy import SCALE
from .phases import Arrays, Phase, Result


class ClassCounts(Phase):
    """One exchange of the classes' counts, from which all clients get the same weights."""

    name = "class-counts"
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
    """One exchange of sums over the features, from which the server solves exactly."""

    name = "pooled-statistics"
    step: ClassVar[Step] = "statistics"
    asks_everyone = True
    changes_linear = True
    fixed_point: FixedPoint | None = None

    @property
    def memory(self) -> int:
        """Bytes on the server beside replies: sums, two normal equations, a factor."""
        return int((40 if self.tct.validation_share else 36) * self.tct.width**2)

    def messages(self, nodes: list[int], config: ConfigRecord, grid: Grid) -> list[Message]:
        """Choose the steps of fixed-point numbers if these are used; make the messages."""
        try:
            self.fixed_point = self.tct.choose_steps(self.tct.global_arrays)
        except ValueError as error:
            logger.log(WARNING, "no steps of fixed-point numbers: %s", error)
            return []
        return super().messages(nodes, config, grid)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, the network, and what features are rounded or weighted by."""
        content = super().content_for(client, arrays, config)
        if self.fixed_point is not None:
            content["steps"] = record_of({"tct.step": self.fixed_point.step})
        if self.tct.balanced:
            content["class-weights"] = record_of({"tct.class-weights": self.tct.class_weights})
        return content

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Add the sums up and solve."""
        sums, metrics = self.collect(replies)

        def solve() -> Arrays:
            total: Sums = functools.reduce(operator.add, sums.values())
            changed, metrics["ridge"] = self._solution(total, self.tct.global_arrays)
            return changed

        changed = self.try_to(solve) if sums else None
        if changed is not None:
            self.tct.keep(sums, self.fixed_point)
            metrics["features-constant"] = int((changed[SCALE] == 0).sum())
        return changed, metrics

    def collect(self, replies: Iterable[Message]) -> tuple[Mapping[int, Sums], MetricRecord]:
        """Return sums by client, none if too few sent theirs, and the round's metrics."""
        tct = self.tct

        def parse(reply: Reply) -> Sums:
            return tct.parse_sums(reply.arrays(), self.fixed_point, reply.num_examples)

        pairs, metrics = self.gather(replies, parse, screen_own_sizes)
        return {reply.client: own for reply, own in pairs}, metrics

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> Arrays:
        """Solve again from the kept sums of all but some clients: see :meth:`TCT.without`."""
        kept, self.fixed_point = self.tct.kept_without(clients)
        require_memory(self.memory, f"{self.name} of {self.tct.width} features", cure=FEWER)
        changed, _ = self._solution(functools.reduce(operator.add, kept), arrays)
        return changed

    def _solution(self, sums: Sums, arrays: ArrayRecord) -> tuple[Arrays, float]:
        """Return the arrays that changed, and the ridge."""
        normaliser, linear, ridge = self.tct.solve_sums(sums, self.fixed_point, arrays)
        return self.tct.arrays_of(normaliser, linear), ridge
