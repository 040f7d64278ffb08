"""A network's last layer in closed form, from sums over all clients' features, in one exchange.

What such methods share: all but the last layer stays as it was, clients send sums over what it is
given, and the server computes the layer's weights. :class:`GramStrategy` is the base of those that
solve least squares, from the features' Gram matrix. The methods' files say how, and after whom.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import Normaliser, require_memory
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.options import option, state
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.ntk.support.shared_arrays import require_whole

from ..core.averaging import cast_like
from ..core.base import BaseStrategy
from ..core.exchange import Aggregated, result_of
from ..core.features import FeatureStrategy
from ..core.replies import Reply, screen_own_sizes

Layer = tuple[NDArray[np.float64], NDArray[np.float64]]  # weights (C, p) and bias (C,)


class ClosedFormStrategy(FeatureStrategy):
    """Compute the last layer from sums; clients are :class:`~fedntk.clients.ClosedFormClient`.

    Features are those of the initial arrays. All clients that are not `held_out` are asked,
    for any ``fraction_train``, in the first round. If fewer than ``min_completed`` replies are
    good, or there is no solution, the next round asks again. Once the layer is `solved` for, rounds
    only evaluate. What is learned is a network; for fine-tuning, have another strategy start from
    it. With three clients or more, features of over 100 times the median client's size are dropped.
    Other valid-looking malicious replies are not detected: one can leave all rounds without a
    solution.
    """

    client = "ClosedFormClient"
    replies = "sums of features"
    averages = False

    head: str = option("layer that is computed; the last linear one by default", default="")
    solved: bool = state(bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, last = self.feature_map.last_layer(self.network)
        prefix = f"{name}." if name else ""
        self.weight, self.bias = f"{prefix}weight", "" if last.bias is None else f"{prefix}bias"
        require_whole(self.network, (self.weight, self.bias), "be computed")

    @abstractmethod
    def last_layer(self, sums: Sequence[Any]) -> Layer:
        """Return the layer, from what :meth:`parse` made of the replies, in the clients' order.

        If there is no solution: ArithmeticError, RuntimeError, ValueError or MemoryError.
        """

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Refuse initial arrays that lack the layer."""
        found = initial_arrays.get(self.weight)
        if found is None or tuple(found.shape) != self.shape:
            raise ValueError(
                f"initial_arrays: expected {self.weight} of shape {self.shape}, got "
                f"{'none' if found is None else tuple(found.shape)}; give the strategy the network "
                "to which they belong"
            )
        return super().begin(initial_arrays, num_rounds, done)

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Share another strategy's clients, if it shows all of them."""
        if not everyone:
            raise ValueError(
                f"{type(self).__name__}: expected a strategy that shows all clients in a round, "
                f"got a {type(owner).__name__}, which would leave out some of them"
            )
        super().work_within(owner, everyone=everyone)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all clients for their sums, until the layer is computed."""
        self.global_arrays, self.server_round = arrays, server_round
        if self.solved or self.fraction_train == 0.0:
            return []
        minimum = self.fewest_sampled
        nodes = self.sample(grid, server_round, "train", 1.0, minimum, self.held_out)
        return self.messages(nodes, MessageType.TRAIN, arrays, config)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Compute the last layer from the accepted sums."""
        if self.solved:
            return None, None
        sums, metrics = self.collect(replies)
        self.train_metrics[server_round] = metrics
        found = result_of(lambda: self.with_layer(self.global_arrays, sums)) if sums else None
        self.solved = found is not None
        return found, metrics

    def with_layer(self, arrays: ArrayRecord, sums: Sequence[Any]) -> ArrayRecord:
        """Return arrays with the last layer in its place; errors of :meth:`last_layer`."""
        weight, bias = self.last_layer(sums)
        layer = {self.weight: weight, **({self.bias: bias} if self.bias else {})}
        changed = cast_like(layer, {n: arrays[n].numpy() for n in layer})
        if not all(np.isfinite(array.numpy()).all() for array in changed.values()):
            raise ArithmeticError("the layer is not finite")
        return ArrayRecord({**arrays, **changed})

    def collect(self, replies: Iterable[Message]) -> tuple[Sequence[Any], MetricRecord]:
        """Return the accepted sums, none if they are too few, and the round's metrics."""
        pairs, rejected = self.accepted(replies, self.parse, MessageType.TRAIN)
        pairs = self.apply_screen(pairs, rejected, screen_own_sizes)
        metrics = self.round_metrics([reply for reply, _ in pairs], rejected)
        return [sums for _, sums in pairs] if self.enough(len(pairs)) else [], metrics


class GramStrategy(ClosedFormStrategy):
    """Solve for the last layer by least squares, from the features' Gram matrix.

    Features are as they are, neither centred nor scaled, and labels one-hot.
    """

    ridge: float = option(
        "ridge of the joint problem, over the examples' mean squared norm; 0: least squares of "
        "least norm",
        default=0.0,
        at_least=0,
    )

    def require_memory(self) -> None:
        """Refuse a layer that the server lacks the memory to solve for."""
        width = self.width
        require_memory(  # an upload is half of p^2 in float64, as it came, and as an array
            (36 + 8 * self.min_available_nodes) * width**2,
            f"{width} features from {self.min_available_nodes} clients",
            cure="use a smaller last layer",
        )

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add that Gram matrices are to be sent."""
        super().prepare_config(config, server_round)
        config.update(SumTask().to_config())

    def parse(self, reply: Reply) -> FeatureStatistics:
        """Check a client's Gram matrix and sums."""
        expected = SumFormat(self.width, self.shape[0])
        return FeatureStatistics.from_arrays(reply.arrays(), expected, reply.num_examples)

    def solution(
        self, sums: Sequence[FeatureStatistics], *, bias: bool = False
    ) -> NDArray[np.float64]:
        """Return the joint problem's solution (C, p), or (C, p + 1) with a bias."""
        identity = Normaliser.identity(self.shape[1])
        joint = FeatureStatistics.join(sums)
        equations = NormalEquations.of(joint, identity, bias=bias, centred=False)
        linear = equations.solve(self.ridge) if self.ridge else equations.least_norm()
        return linear.T.numpy()


def unit_rows(weight: NDArray[np.float64], bias: NDArray[np.float64] | float = 0.0) -> Layer:
    """Return each class's weights and bias, divided by the weights' norm; zeros stay."""
    norm = np.linalg.norm(weight, axis=1)
    norm[norm == 0] = 1.0
    return weight / norm[:, None], bias / norm
