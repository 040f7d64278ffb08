"""The phases of TCT with ``solve="statistics"``: one exchange of sums over all clients' features.

Beyond Yu et al., NeurIPS 2022: the problem of their stage 2 has its solution in sums over the
examples, which add over clients: see :mod:`fedntk.ntk.payloads.feature_statistics`.
"""

import contextlib
import copy
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Normaliser, NotEnoughMemory, require_memory
from fedntk.ntk.convex import RIDGES, NormalEquations, best_ridge, class_weights, normaliser_of
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.payloads import UNQUANTISED, FeatureStatistics, SplitStatistics, SumFormat
from fedntk.ntk.payloads.convex_task import Step
from fedntk.ntk.payloads.feature_statistics import FEWER, packed_size, require_counts
from fedntk.ntk.predictors.network import load_arrays

from ..core.averaging import named_arrays, record_of
from ..core.exchange import logger
from ..core.replies import Reply, screen_own_sizes
from .convex_strategy import SCALE
from .kept_sums import clients_left
from .phases import Arrays, Phase, Result

CHUNK_BYTES = 128 * 2**20  # of the validation examples' features
STEP = "step"  # of fixed-point numbers, among what is kept of a client
Sums = FeatureStatistics | SplitStatistics


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

    @property
    def upload_bytes(self) -> int:
        """Most bytes of one client's sums, of at most 133,144 examples if they are integers."""
        width, classes, gram = self.tct.width, self.tct.shape[1], packed_size(self.tct.width)
        if self.tct.bits != UNQUANTISED:
            one = 4 * (gram + classes * width)
        else:
            one = 8 * (min(gram, self.tct.max_examples * width) + classes * width)
        return (one + 8 * classes) * (2 if self.tct.validation_share else 1)

    @property
    def format(self) -> SumFormat:
        """What all clients' sums have to be."""
        weights = self.tct.class_weights if self.tct.balanced else None
        return SumFormat(self.tct.width, self.tct.shape[1], weights, self.fixed_point)

    def messages(self, nodes: list[int], config: ConfigRecord, grid: Grid) -> list[Message]:
        """Choose the steps of fixed-point numbers if these are used; make the messages."""
        if self.tct.bits != UNQUANTISED:
            try:
                features = next(self._validation(self.tct.global_arrays)[0])
            except ValueError as error:
                logger.log(WARNING, "no features of the validation examples: %s", error)
                return []
            self.fixed_point = FixedPoint.of(features, self.tct.bits)
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
            changed, metrics["ridge"] = self._solution(sums.values(), self.tct.global_arrays)
            return changed

        changed = self.try_to(solve) if sums else None
        if changed is not None:
            self._keep(sums)
            metrics["features-constant"] = int((changed[SCALE] == 0).sum())
        return changed, metrics

    def collect(self, replies: Iterable[Message]) -> tuple[Mapping[int, Sums], MetricRecord]:
        """Return sums by client, none if too few sent theirs, and the round's metrics."""
        pairs, metrics = self.gather(
            replies, lambda reply: self._parse(reply.arrays(), reply.num_examples), screen_own_sizes
        )
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
        kept = tct.kept_sums.read(tct.run_key, left)
        changed, _ = self._solution(map(self._read_kept, kept), arrays)
        return changed

    def _read_kept(self, kept: Arrays) -> Sums:
        """Read what :meth:`_keep` wrote of a client; all clients' steps are the same."""
        if STEP in kept:
            step = kept.pop(STEP)
            self.fixed_point = FixedPoint.from_arrays(step, self.tct.bits, self.tct.width)
        return self._parse(kept)

    def _keep(self, sums: Mapping[int, Sums]) -> None:
        """Write each client's sums where they are to be kept; a full disk is logged."""
        tct, fixed = self.tct, self.fixed_point
        if tct.kept_sums is None:
            return
        steps = {} if fixed is None else {STEP: fixed.step}
        try:
            tct.kept_sums.require_disk(self.upload_bytes, len(sums))
            for client, own in sums.items():
                arrays = own.to_arrays(fixed) | steps
                tct.kept_sums.write(tct.run_key, tct.server_round, client, arrays)
        except (NotEnoughMemory, OSError) as error:
            logger.log(WARNING, "the clients' sums are not kept: %s", error)
            with contextlib.suppress(OSError):
                for client in sums:
                    tct.kept_sums.remove(tct.run_key, client)
            return
        tct.summed = tuple(sums)

    def _parse(self, arrays: Arrays, num_examples: int | None = None) -> Sums:
        kind = SplitStatistics if self.tct.validation_share else FeatureStatistics
        return kind.from_arrays(arrays, self.format, num_examples)

    def _solution(self, groups: Iterable[Sums], arrays: ArrayRecord) -> tuple[Arrays, float]:
        """Add sums up in their order and solve; return the arrays that changed, and the ridge."""
        tct = self.tct
        sums: Sums = functools.reduce(operator.add, groups)
        if self.fixed_point is not None:
            sums = sums.scaled(self.fixed_point)
        ridge = tct.ridge
        if isinstance(sums, SplitStatistics):
            ridge, sums = self._ridge_of_held_out(sums), sums.everyone
        normaliser, equations = self._equations(sums)
        if tct.auto_ridge and not tct.validation_share:
            features, labels = self._validation(arrays)
            weights = self.format.weights
            held = FeatureStatistics.of(features, labels, tct.shape[1], weights=weights)
            ridge = best_ridge(equations, NormalEquations.of(held, normaliser, bias=tct.bias))
        linear, ridge = _ridge_solution(equations, ridge)
        return tct.arrays_of(normaliser, linear), ridge

    def _equations(self, sums: FeatureStatistics) -> tuple[Normaliser, NormalEquations]:
        tct = self.tct
        normaliser = normaliser_of(sums) if tct.normalise else Normaliser.identity(tct.width)
        return normaliser, NormalEquations.of(sums, normaliser, bias=tct.bias)

    def _ridge_of_held_out(self, sums: SplitStatistics) -> float:
        """Choose the ridge on held-out examples; the normaliser is from the others as well."""
        if not (sums.fitting.num_examples and sums.held_out.num_examples):
            raise ValueError(
                f"validation_share: {sums.held_out.num_examples} examples are held out and "
                f"{sums.fitting.num_examples} are not; expected some of both"
            )
        normaliser, equations = self._equations(sums.fitting)
        held = NormalEquations.of(sums.held_out, normaliser, bias=self.tct.bias)
        return best_ridge(equations, held)

    def _validation(self, arrays: ArrayRecord) -> tuple[Iterator[Tensor], Tensor]:
        """Return the validation examples' features, some at a time, and their labels."""
        if self.tct.validation is None:
            raise ValueError("validation: expected the server's validation examples, got none")
        x, labels = self.tct.validation
        network: nn.Module = copy.deepcopy(self.tct.network)
        load_arrays(network, named_arrays(self.tct.network_of(arrays)))
        extract = self.tct.feature_map.extractor(network.to(self.tct.device))
        size = max(1, CHUNK_BYTES // (4 * self.tct.width))
        return map(extract, x.split(size)), labels


def _ridge_solution(equations: NormalEquations, ridge: float) -> tuple[NDArray[np.float32], float]:
    """Return the linear model and its ridge, raised tenfold while it is too small."""
    try:
        linear = equations.solve(ridge).float()
    except ValueError as error:
        if ridge >= RIDGES[-1]:
            raise
        logger.log(WARNING, "%s: it is raised to %g", error, 10 * ridge)
        return _ridge_solution(equations, 10 * ridge)
    if not bool(linear.isfinite().all()):
        raise ArithmeticError("the solution is not finite")
    return linear.numpy(), ridge
