"""The phases of TCT with ``solve="statistics"``: one exchange of sums over all clients' features.

Beyond Yu et al., NeurIPS 2022: the problem of their stage 2 has its solution in sums over the
examples, which add over clients as in He et al., *AFL: A Single-Round Analytic Approach for
Federated Learning with Pre-trained Models*, CVPR 2025, and Fani et al., *Accelerating Heterogeneous
Federated Learning with Closed-form Classifiers* (Fed3R), ICML 2024; there of the last layer's
inputs, here of tangent features.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import BadReply, Normaliser, TCTModel
from fedntk.ntk.arrays import require_array
from fedntk.ntk.convex import RIDGES, NormalEquations, best_ridge, class_weights, normaliser_of
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.payloads import UNQUANTISED, ConvexTask, FeatureStatistics
from fedntk.ntk.predictor import load_arrays

from .averaging import named_arrays
from .base import logger
from .replies import Reply, screen_own_sizes
from .tct_phases import Arrays, StageTwo

__all__ = ["ClassCounts", "PooledStatistics"]

LINEAR, MEAN, SCALE = TCTModel.ARRAYS
CHUNK_BYTES = 128 * 2**20  # of the validation examples' features


class ClassCounts(StageTwo):
    """One exchange of the classes' counts, from which all clients get the same weights."""

    name = "class-counts"
    asks_everyone = True
    needs = ()

    def task(self, client: int) -> ConvexTask:
        """Ask for the counts."""
        return replace(self.tct.task, step="counts")

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Add the counts up; no array changes."""
        tct = self.tct

        def parse(reply: Reply) -> NDArray[np.int64]:
            arrays = list(reply.arrays().values())
            if len(arrays) != 1:
                raise BadReply("arrays", f"expected the classes' counts, got {len(arrays)}")
            (counts,) = arrays
            require_array("counts", counts, shape=(tct.shape[1],), dtype=np.int64, low=0)
            if (total := sum(counts.tolist())) != reply.num_examples:
                raise BadReply("num-examples", f"claims {reply.num_examples}, counts {total}")
            return counts

        pairs, metrics = self.gathered(replies, parse)
        if not tct.enough(len(pairs)):
            return None, metrics
        tct.class_weights = class_weights(np.sum([counts for _, counts in pairs], axis=0))
        return {}, metrics


class PooledStatistics(StageTwo):
    """One exchange of sums over the features, from which the server solves exactly."""

    name = "pooled-statistics"
    asks_everyone = True
    changes_linear = True
    fixed_point: FixedPoint | None = None

    @property
    def memory(self) -> int:
        """36 p^2: sums, normal equations of these and of validation examples, a factor."""
        return int(36 * self.tct.width**2)

    def messages(
        self,
        server_round: int,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Make the round's messages, with the steps of fixed-point numbers where these are used."""
        if self.tct.task.bits != UNQUANTISED:
            try:
                features = next(self._validation_features(arrays))
            except ValueError as error:
                logger.log(WARNING, "no features of the validation examples: %s", error)
                return []
            self.fixed_point = FixedPoint.of(features, self.tct.task.bits)
        return super().messages(server_round, nodes, arrays, config, grid)

    def task(self, client: int) -> ConvexTask:
        """Ask for the sums."""
        return replace(self.tct.task, step="statistics")

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, the network, and what features are rounded or weighted by."""
        content = super().content_for(client, arrays, config)
        if self.fixed_point is not None:
            content["steps"] = ArrayRecord({"tct.step": Array(self.fixed_point.step)})
        if self.tct.task.balanced:
            weights = Array(self.tct.class_weights)
            content["class-weights"] = ArrayRecord({"tct.class-weights": weights})
        return content

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Add the sums up and solve."""
        tct = self.tct
        sums, metrics = self.joint_sums(replies)
        if sums is None:
            return None, metrics
        try:
            if self.fixed_point is not None:
                sums = sums.scaled(self.fixed_point)
            normaliser = normaliser_of(sums) if tct.normalise else Normaliser.identity(tct.width)
            equations = NormalEquations.of(sums, normaliser, bias=tct.task.bias)
            linear, ridge = self._solved(equations, normaliser)
        except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
            logger.log(WARNING, "no solution (%s): the model stays as it was", error)
            return None, metrics
        metrics["ridge"] = ridge
        metrics["features-constant"] = int((normaliser.inv_std == 0).sum())
        return {LINEAR: linear, MEAN: normaliser.mean, SCALE: normaliser.inv_std}, metrics

    def joint_sums(
        self, replies: Iterable[Message]
    ) -> tuple[FeatureStatistics | None, MetricRecord]:
        """Return the sums over all clients, None if too few sent theirs, and the metrics."""
        pairs, metrics = self.gathered(
            replies,
            lambda reply: self.checked(reply.arrays(), reply.num_examples),
            screen_own_sizes,
        )
        if not self.tct.enough(len(pairs)):
            return None, metrics
        return FeatureStatistics.join(own for _, own in pairs), metrics

    def checked(self, arrays: Mapping[str, NDArray[Any]], num_examples: int) -> FeatureStatistics:
        """Return sums over so many examples; BadReply if they could not be such."""
        return FeatureStatistics.from_arrays(
            list(arrays.values()),
            num_examples,
            self.tct.width,
            self.tct.shape[1],
            weights=self._weights,
            fixed_point=self.fixed_point,
        )

    def _solved(
        self, equations: NormalEquations, normaliser: Normaliser
    ) -> tuple[NDArray[np.float32], float]:
        """Return the linear model and its ridge."""
        tct = self.tct
        ridge = tct.ridge
        if tct.auto_ridge:
            held = NormalEquations.of(self._validation_sums(), normaliser, bias=tct.task.bias)
            ridge = best_ridge(equations, held)
        while True:
            try:
                linear = equations.solve(ridge).float()
                break
            except ValueError as error:
                if ridge >= RIDGES[-1]:
                    raise
                logger.log(WARNING, "%s: it is raised to %g", error, 10 * ridge)
                ridge *= 10
        if not bool(linear.isfinite().all()):
            raise ArithmeticError("the solution is not finite")
        return linear.numpy(), ridge

    def _validation_sums(self) -> FeatureStatistics:
        chunks = self._validation_features(self.tct.global_arrays)
        _, labels = self._validation
        return FeatureStatistics.of(chunks, labels, self.tct.shape[1], weights=self._weights)

    def _validation_features(self, arrays: ArrayRecord) -> Iterator[Tensor]:
        """Yield the features of the server's validation examples, some at a time."""
        x, _ = self._validation
        network: nn.Module = copy.deepcopy(self.tct.network)
        load_arrays(network, named_arrays(self.tct.network_of(arrays)))
        extract = self.tct.feature_map.extractor(network.to(self.tct.device))
        size = max(1, CHUNK_BYTES // (4 * self.tct.width))
        return map(extract, x.split(size))

    @property
    def _validation(self) -> tuple[Tensor, Tensor]:
        if self.tct.validation is None:
            raise ValueError("validation: expected the server's validation examples, got none")
        return self.tct.validation

    @property
    def _weights(self) -> NDArray[np.float64] | None:
        return self.tct.class_weights if self.tct.task.balanced else None
