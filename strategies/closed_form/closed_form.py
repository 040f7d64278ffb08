"""A network's last layer in closed form, from sums over all clients' features, in one exchange.

All but the last layer stays as it was, clients send sums over what it is given, and the server
computes the layer's weights. The methods' files say how, and after whom.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import FeatureMap, Normaliser, require_memory
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.ntk.support.shared_arrays import require_whole

from ..core.averaging import cast_like
from ..core.channel import Rounds
from ..core.replies import Reply, accuracy_of, result_of, screen_accuracies, screen_own_sizes
from ..core.round import Round
from ..core.strategy import Strategy
from ..core.uploads import Update, Uploads

Layer = tuple[NDArray[np.float64], NDArray[np.float64]]  # weights (C, p) and bias (C,)


class ClosedFormStrategy(Strategy):
    """Compute the last layer from sums; clients are :class:`~fedntk.clients.ClosedFormClient`.

    Features are those of the initial arrays. All clients that are not held out are asked, for any
    ``fraction_train``, in the first round. If fewer than ``min_completed`` replies are good, or
    there is no solution, the next round asks again. Once the layer is `solved` for, rounds only
    evaluate. With three clients or more, features of over 100 times the median client's size are
    dropped. Other valid-looking malicious replies are not detected: one can prevent any solution.

    Attributes
    ----------
    feature_map : FeatureMap
        What clients make of an example.
    shape : tuple of int
        (C, p), of the last layer's weights.
    weight, bias : str
        Names of the layer's arrays; `bias` is empty if there is none.
    """

    client = "ClosedFormClient"
    replies = "sums of features"
    learns_only_head = True
    nests = "with everyone"
    # what clients send: Gram matrices of features and sums by class, or the classes' means
    statistics: ClassVar[type[FeatureStatistics] | type[Prototypes]] = FeatureStatistics

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    head: str = option("layer that is computed; the last linear one by default", default="")
    solved: bool = state(bool)

    def prepare(self) -> None:
        """Find the layer."""
        self.feature_map = FeatureMap("last-layer", head=self.head)
        name, last = self.feature_map.last_layer(self.network)
        self.shape = (last.out_features, last.in_features)
        prefix = f"{name}." if name else ""
        self.weight, self.bias = f"{prefix}weight", "" if last.bias is None else f"{prefix}bias"
        require_whole(self.network, (self.weight, self.bias), "be computed")
        num_classes, weights = self.shape[0], self.example_weights
        if weights is not None and len(weights) != num_classes:
            raise ValueError(
                f"class_weights: expected one for each of {num_classes} classes, got {len(weights)}"
            )
        self.prepare_method()

    def prepare_method(self) -> None:
        """Do what follows from a method's options, once the layer is known."""

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Refuse initial arrays that lack the layer."""
        array = initial_arrays.get(self.weight)
        shape = None if array is None else tuple(array.shape)
        if shape != self.shape:
            raise ValueError(
                f"initial_arrays: expected {self.weight} of shape {self.shape}, got {shape}; give "
                "the strategy the network to which they belong"
            )
        return self.first_arrays(initial_arrays)

    def first_arrays(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays that a run begins with."""
        return arrays

    def require_memory(self) -> None:
        """Refuse a Gram matrix that the server lacks the memory to solve for."""
        if self.statistics is FeatureStatistics:
            width, clients = self.width, self.min_available_nodes
            require_memory(  # an upload is half of p^2 in float64, as it came, and as an array
                (36 + 8 * clients) * width**2,
                f"{width} features from {clients} clients",
                cure="use a smaller last layer",
            )

    @property
    def num_targets(self) -> int:
        """Number C of real targets, which are the last features in sums; 0 if there are classes."""
        return 0

    @property
    def example_weights(self) -> NDArray[np.float64] | None:
        """Weights w_c of the classes' examples (C,); None: 1, as without the option."""
        weights = getattr(self, "class_weights", ())
        return np.array(weights) if weights else None

    @property
    def width(self) -> int:
        """Number of features that clients add up."""
        return self.feature_map.width(self.network)

    @abstractmethod
    def last_layer(self, sums: Sequence[Any]) -> Layer:
        """Return the layer, from what :meth:`parse` made of the replies, in the clients' order.

        If there is no solution: ArithmeticError, RuntimeError, ValueError or MemoryError.
        """

    # ------------------------------------------------------------------------ rounds

    def train_round(self, r: Round) -> Rounds[Update]:
        """Ask all clients for their sums, and compute the last layer."""
        if self.solved:
            return Update(None)
        uploads = yield from self.ask_sums(r)
        if not self.enough(uploads):
            return Update(uploads)
        arrays = result_of(lambda: self.with_layer(r.arrays, self.last_layer(uploads.values)))
        self.solved = arrays is not None
        return Update(uploads, arrays)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate the network."""
        uploads = yield from r.ask(accuracy_of, config=self.task())
        return self.screening.drop(uploads, screen_accuracies)

    def ask_sums(self, r: Round, arrays: ArrayRecord | None = None) -> Rounds[Uploads[Any]]:
        """Ask all clients for their sums, and drop those of another size than most.

        They are of the features of `arrays`, by default the global ones.
        """
        clients, task = r.everyone(), self.task()
        uploads = yield from r.ask(self.parse, clients=clients, arrays=arrays, config=task)
        return self.screening.drop(uploads, screen_own_sizes)

    def task(self) -> dict[str, Any]:
        """Return what messages tell: where features are taken, and what clients send."""
        place = self.feature_map.to_config()
        if self.statistics is not FeatureStatistics:
            return place
        weights = () if self.example_weights is None else tuple(self.example_weights)
        return {**place, **SumTask(class_weights=weights).to_config()}

    def parse(self, reply: Reply) -> Any:
        """Check a client's sums, which must be of as many examples as it reports."""
        arrays, num_classes, targets = reply.arrays(), self.shape[0], self.num_targets
        if self.statistics is FeatureStatistics:
            classes = 1 if targets else num_classes
            expected = SumFormat(self.width + targets, classes, self.example_weights)
            return FeatureStatistics.from_arrays(arrays, expected, reply.num_examples)
        return Prototypes.from_arrays(
            arrays,
            num_classes=num_classes,
            width=self.width,
            max_examples=self.max_examples,
            num_examples=reply.num_examples,
        )

    def with_layer(self, arrays: ArrayRecord, layer: Layer) -> ArrayRecord:
        """Return arrays with the last layer in its place; ArithmeticError if it is not finite."""
        new = {self.weight: layer[0]}
        if self.bias:
            new[self.bias] = layer[1]
        changed = cast_like(new, {name: arrays[name].numpy() for name in new})
        if not all(np.isfinite(array.numpy()).all() for array in changed.values()):
            raise ArithmeticError("the layer is not finite")
        return ArrayRecord({**arrays, **changed})


def least_squares(
    joint: FeatureStatistics, ridge: float, *, bias: bool = False, num_targets: int = 0
) -> NDArray[np.float64]:
    """Return the solution (C, p), or (C, p + 1) with a bias, of the sums over all clients.

    Features are as they are, neither centred nor scaled, and labels one-hot; with `num_targets` the
    last C features are real targets. The ridge is over the examples' mean squared norm; 0: least
    squares of least norm.
    """
    identity = Normaliser.identity(joint.width - num_targets)
    equations = NormalEquations.of(
        joint, identity, bias=bias, centred=False, num_targets=num_targets
    )
    linear = equations.solve(ridge) if ridge else equations.least_norm()
    return linear.T.numpy()


def unit_rows(weight: NDArray[np.float64], bias: NDArray[np.float64] | float = 0.0) -> Layer:
    """Return each class's weights and bias, divided by the weights' norm; zeros stay."""
    norm = np.linalg.norm(weight, axis=1)
    norm[norm == 0] = 1.0
    return weight / norm[:, None], bias / norm
