"""The phases of TCT with ``solve="statistics"``: one exchange of sums over all clients' features.

Beyond Yu et al., NeurIPS 2022: the problem of their stage 2 has its solution in sums over the
examples, which add over clients as in He et al., *AFL: A Single-Round Analytic Approach for
Federated Learning with Pre-trained Models*, CVPR 2025, and Fani et al., *Accelerating Heterogeneous
Federated Learning with Closed-form Classifiers* (Fed3R), ICML 2024; there of the last layer's
inputs, here of tangent features.
"""

import contextlib
import copy
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Normaliser, NotEnoughMemory, require_memory
from fedntk.ntk.convex import RIDGES, NormalEquations, best_ridge, class_weights, normaliser_of
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.payloads import UNQUANTISED, FeatureStatistics, SplitStatistics
from fedntk.ntk.payloads.feature_statistics import FEWER, packed_size, require_counts
from fedntk.ntk.predictors.network import load_arrays

from ..core.averaging import named_arrays
from ..core.exchange import logger
from ..core.replies import Reply, screen_own_sizes
from .convex_strategy import LINEAR, MEAN, SCALE
from .kept_sums import clients_left
from .phases import Arrays, StageTwo

__all__ = ["ClassCounts", "PooledStatistics", "Sums", "steps_record"]

CHUNK_BYTES = 128 * 2**20  # of the validation examples' features
Sums = FeatureStatistics | SplitStatistics


class ClassCounts(StageTwo):
    """One exchange of the classes' counts, from which all clients get the same weights."""

    name = "class-counts"
    step = "counts"
    asks_everyone = True
    needs = ()

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Add the counts up; no array changes."""
        tct = self.tct

        def parse(reply: Reply) -> NDArray[np.int64]:
            (counts,) = reply.ordered_arrays("counts")
            require_counts(counts, tct.shape[1], reply.num_examples)
            return counts

        pairs, metrics = self.gathered(replies, parse)
        if not pairs:
            return None, metrics
        tct.class_weights = class_weights(np.sum([counts for _, counts in pairs], axis=0))
        return {}, metrics


class PooledStatistics(StageTwo):
    """One exchange of sums over the features, from which the server solves exactly."""

    name = "pooled-statistics"
    step = "statistics"
    asks_everyone = True
    changes_linear = True
    fixed_point: FixedPoint | None = None

    @property
    def memory(self) -> int:
        """Bytes on the server beside replies.

        36 p^2: sums, normal equations of these and of validation examples, a factor. 40 p^2 if
        clients hold examples out and send sums of these as well.
        """
        return int((40 if self.tct.validation_share else 36) * self.tct.width**2)

    @property
    def upload_bytes(self) -> int:
        """Bytes of the sums of one client, of at most 133,144 examples where they are integers."""
        width, classes = self.tct.width, self.tct.shape[1]
        number = 8 if self.tct.bits == UNQUANTISED else 4
        one = number * (packed_size(width) + classes * width) + 8 * classes
        return one * (2 if self.tct.validation_share else 1)

    def messages(
        self,
        server_round: int,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Choose the steps of fixed-point numbers if these are used; make the messages."""
        if self.tct.bits != UNQUANTISED:
            try:
                features = next(self._validation_features(arrays))
            except ValueError as error:
                logger.log(WARNING, "no features of the validation examples: %s", error)
                return []
            self.fixed_point = FixedPoint.of(features, self.tct.bits)
        return super().messages(server_round, nodes, arrays, config, grid)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, the network, and what features are rounded or weighted by."""
        content = super().content_for(client, arrays, config)
        if self.fixed_point is not None:
            content["steps"] = steps_record(self.fixed_point)
        if self.tct.balanced:
            weights = Array(self.tct.class_weights)
            content["class-weights"] = ArrayRecord({"tct.class-weights": weights})
        return content

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Add the sums up and solve."""
        tct = self.tct
        sums, metrics = self.collected(replies)
        if not sums:
            return None, metrics
        try:
            changed, ridge = self._solved(sums.values(), tct.global_arrays)
        except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
            logger.log(WARNING, "no solution (%s): the model stays as it was", error)
            return None, metrics
        self._keep(sums, server_round)
        metrics["ridge"] = ridge
        metrics["features-constant"] = int((changed[SCALE] == 0).sum())
        return changed, metrics

    def collected(self, replies: Iterable[Message]) -> tuple[Mapping[int, Sums], MetricRecord]:
        """Return sums by client, none if too few sent theirs, and the round's metrics."""

        def parse(reply: Reply) -> Sums:
            return self._parsed(reply.ordered_arrays(*self._kind.NAMES), reply.num_examples)

        pairs, metrics = self.gathered(replies, parse, screen_own_sizes)
        return {reply.client: own for reply, own in pairs}, metrics

    def without(self, clients: Sequence[int], arrays: ArrayRecord) -> Arrays:
        """Solve again from the kept sums of all but some clients: see :meth:`TCT.without`."""
        tct = self.tct
        if tct.kept_sums is None:
            raise ValueError("keep_sums: set a folder before the run; no client's sums were kept")
        if not tct.summed:
            raise ValueError(
                f"keep_sums: no sums were kept in {tct.kept_sums.folder} by this run yet; they "
                f"come with its round of {self.name}, and the log says if the disk was too small"
            )
        left = clients_left(tct.summed, clients)
        require_memory(self.memory, f"{self.name} of {tct.width} features", cure=FEWER)
        if tct.bits != UNQUANTISED:
            steps = tct.kept_sums.steps(tct.run_key)
            self.fixed_point = FixedPoint.from_arrays(steps, tct.bits, tct.width)
        kept = tct.kept_sums.read(tct.run_key, left)
        changed, _ = self._solved(map(self._parsed, kept), arrays)
        return changed

    def _keep(self, sums: Mapping[int, Sums], server_round: int) -> None:
        """Write each client's sums where they are to be kept; a full disk is logged."""
        tct = self.tct
        if tct.kept_sums is None:
            return
        try:
            tct.kept_sums.require_disk(self.upload_bytes, len(sums))
            if self.fixed_point is not None:
                tct.kept_sums.write_steps(tct.run_key, server_round, self.fixed_point.step)
            for client, own in sums.items():
                arrays = own.to_arrays(self.fixed_point)
                tct.kept_sums.write(tct.run_key, server_round, client, arrays)
        except (NotEnoughMemory, OSError) as error:
            logger.log(WARNING, "the clients' sums are not kept: %s", error)
            with contextlib.suppress(OSError):
                for client in sums:
                    tct.kept_sums.remove(tct.run_key, client)
            return
        tct.summed = tuple(sums)

    @property
    def _kind(self) -> type[FeatureStatistics] | type[SplitStatistics]:
        return SplitStatistics if self.tct.validation_share else FeatureStatistics

    def _parsed(self, arrays: Sequence[NDArray[Any]], num_examples: int | None = None) -> Sums:
        """Check the arrays of a client's sums, by default of as many examples as they count."""
        tct = self.tct
        if num_examples is None:
            num_examples = int(sum(counts.sum() for counts in arrays[2::3]))
        return self._kind.from_arrays(
            arrays,
            num_examples,
            tct.width,
            tct.shape[1],
            weights=self._weights,
            fixed_point=self.fixed_point,
        )

    def _solved(self, groups: Iterable[Sums], arrays: ArrayRecord) -> tuple[Arrays, float]:
        """Add sums up in their order and solve; return the arrays that changed, and the ridge.

        The ridge is chosen on the server's examples or on those that clients held out. All
        examples count in the model.
        """
        tct = self.tct
        sums: Sums = functools.reduce(operator.add, groups)
        if self.fixed_point is not None:
            sums = sums.scaled(self.fixed_point)
        ridge = tct.ridge
        if isinstance(sums, SplitStatistics):
            ridge, sums = self._ridge_of_held_out(sums), sums.everyone
        normaliser, equations = self._equations(sums)
        if tct.auto_ridge and not tct.validation_share:
            held = self._validation_sums(arrays)
            ridge = best_ridge(equations, NormalEquations.of(held, normaliser, bias=tct.bias))
        linear, ridge = _solution(equations, ridge)
        return {LINEAR: linear, MEAN: normaliser.mean, SCALE: normaliser.inv_std}, ridge

    def _equations(self, sums: FeatureStatistics) -> tuple[Normaliser, NormalEquations]:
        tct = self.tct
        normaliser = normaliser_of(sums) if tct.normalise else Normaliser.identity(tct.width)
        return normaliser, NormalEquations.of(sums, normaliser, bias=tct.bias)

    def _ridge_of_held_out(self, sums: SplitStatistics) -> float:
        """Choose the ridge of the other examples, which the normaliser is of, too."""
        if not (sums.fitting.num_examples and sums.held_out.num_examples):
            raise ValueError(
                f"validation_share: {sums.held_out.num_examples} examples are held out and "
                f"{sums.fitting.num_examples} are not; expected some of both"
            )
        normaliser, equations = self._equations(sums.fitting)
        held = NormalEquations.of(sums.held_out, normaliser, bias=self.tct.bias)
        return best_ridge(equations, held)

    def _validation_sums(self, arrays: ArrayRecord) -> FeatureStatistics:
        chunks = self._validation_features(arrays)
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
        return self.tct.class_weights if self.tct.balanced else None


def _solution(equations: NormalEquations, ridge: float) -> tuple[NDArray[np.float32], float]:
    """Return the linear model and its ridge, raised tenfold while it is too small."""
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


def steps_record(fixed_point: FixedPoint) -> ArrayRecord:
    """Return the steps of fixed-point numbers as clients are sent them."""
    return ArrayRecord({"tct.step": Array(fixed_point.step)})
