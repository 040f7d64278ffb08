"""The options of TCT's convex problem, and what one message asks of a client."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..features.feature_map import FeatureKind, FeatureMap
from ..losses import Loss
from ..options import Declared, shared
from .feature_statistics import SumStep
from .sum_task import SumOptions

ConvexOptimizer = Literal["scaffold", "fedavg", "gd"]
Solve = Literal["clients", "statistics"]
Step = Literal["bootstrap", "moments", "counts", "statistics", "linear", SumStep]


class ConvexOptions(Declared):
    """Options of stage 2 that server and clients share."""

    features: FeatureKind = shared(
        "tangent features: coordinates, or a sketch of them all; or the last layer's inputs "
        "(Table 12), or random Fourier features of these: see fedntk.ntk.FeatureMap",
        default="entk",
    )
    num_features: int = shared(
        "p; 0: all, except for entk-sketch and fourier, which need a number",
        default=100_000,
        at_least=0,
    )
    feature_seed: int = shared(
        "seed of the new last layer, and of the coordinates, the sketch or the frequencies",
        default=123,
        at_least=0,
    )
    head: str = shared("name of the last linear layer; the last nn.Linear by default", default="")
    bias: bool = shared(
        "whether the linear model has a bias (algorithm 2's b; eq. (1) has none). With normalise "
        "it starts at the classes' shares, else at 0; the ridge does not count it",
        default=True,
    )
    loss: Loss = shared(
        "loss of stage 2; cross-entropy: TCT-CE (Table 11). Targets of least squares are one-hot "
        "minus 1/C",
        default="mse",
    )
    optimizer: ConvexOptimizer = shared(
        "optimizer of stage 2: SCAFFOLD; the same without a correction; gradient descent, one "
        "step a round",
        default="scaffold",
    )
    learning_rate: float = shared(
        "eta of stage 2, of L_k = ||Z W - Y||^2 / (2 n_k); steps diverge if eta times the largest "
        "eigenvalue of Z Z^T / n_k, the metric rate-times-lambda, is above 2",
        default=5e-5,
        above=0,
    )
    local_steps: int = shared("M, full-batch steps of a client a round", default=500, at_least=1)
    balanced: bool = shared(
        "whether all classes weigh the same in sums; takes one more round, for counts",
        default=False,
    )

    @property
    def feature_map(self) -> FeatureMap:
        """What turns examples into features."""
        return FeatureMap(self.features, self.num_features, self.feature_seed, self.head)

    @property
    def num_steps(self) -> int:
        """Steps of a client a round: M, or 1 of gradient descent."""
        return 1 if self.optimizer == "gd" else self.local_steps

    @property
    def span(self) -> float:
        """Steps times learning rate, M eta."""
        return self.num_steps * self.learning_rate

    @property
    def corrected(self) -> bool:
        """Whether steps are corrected by h_k = c_k - c (SCAFFOLD)."""
        return self.optimizer == "scaffold"


class SolveOptions(SumOptions):
    """How the convex problem is solved, as clients are told."""

    solve: Solve = shared(
        "clients: rounds of local steps; statistics: clients send sums over their features, from "
        "which the server solves in one round",
        default="clients",
    )


class MessageTask(Declared):
    """What one message asks for; the arrays that it takes come in records of their own.

    The records are ``"network"`` (its state dict), ``"normaliser"``, ``"linear"``, ``"control"``,
    ``"steps"``, ``"class-weights"`` and ``"secure-sum"``, those of them that the client lacks.
    """

    step: Step = shared(
        "local training of the network (bootstrap); moments of the features; the number of "
        "examples of each class (counts); the sums from which least squares are solved "
        "(statistics); a round on the linear model, or its evaluation; or an exchange of a secure "
        "sum"
    )
    network_key: str = shared(
        "digest of the bootstrapped network and the feature map: what a client keeps is good for "
        "one key",
        default="",
    )
    run_key: str = shared(
        "name of the training run; a client uses what it keeps only in that run", default=""
    )
    state_round: int = shared("round from which c_k counts; 0: c_k is zero", default=0, at_least=0)
    control: Literal["zero", "last", "sent"] = shared(
        "source of c: zero; the difference of the models of the last round and this one over "
        "M eta; or the message",
        default="zero",
    )


class ConvexTask(ConvexOptions, SolveOptions, MessageTask):
    """What a client reads from a message of TCT: options and task."""

    @staticmethod
    def key_of(feature_map: FeatureMap, network: Sequence[NDArray[Any]]) -> str:
        """Return the key of a network's arrays, in the order of its state dict, and a map."""
        digest = blake2b(repr(feature_map).encode(), digest_size=16)
        for array in network:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
