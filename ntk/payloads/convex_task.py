"""What the server asks of a client in the rounds of TCT on the linear model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ..features.feature_map import FeatureMap
from ..losses import Loss
from .compression import UNQUANTISED

__all__ = ["ConvexTask", "Solve"]

PREFIX = "tct-"
Step = Literal[
    "bootstrap", "moments", "features", "counts", "statistics", "linear",
    "public-key", "shares", "masked-statistics", "confirm", "reveal",
]  # fmt: skip
Solve = Literal["clients", "server", "statistics"]


@dataclass(frozen=True)
class ConvexTask:
    """What the server asks of a client in stage 2; travels in a message's configuration.

    The arrays that it takes come in records of their own: ``"network"`` (its state dict),
    ``"normaliser"``, ``"linear"``, ``"control"``, ``"steps"``, ``"class-weights"`` and
    ``"secure-sum"``, those of them that the client lacks.

    Attributes
    ----------
    step : str
        What the message is for: local training of the network (``"bootstrap"``, the rest tells what
        will come), the moments of the features, the ``"features"`` themselves, the number of
        examples of each class (``"counts"``), the sums that least squares are solved from
        (``"statistics"``), or a round on the ``"linear"`` model, which it is to evaluate, too. With
        secure aggregation the five exchanges for the sums are ``"public-key"``, ``"shares"``,
        ``"masked-statistics"``, ``"confirm"`` and ``"reveal"``.
    key : str
        Names the bootstrapped network and the feature map: what a client keeps is good for one key.
    feature_map : FeatureMap
        Which features.
    bias : bool
        Whether the linear model has one.
    loss : {"mse", "cross-entropy"}
        Of the linear model.
    learning_rate, local_steps : float, int
        eta and M.
    corrected : bool
        Whether steps are corrected by h_k = c_k - c (SCAFFOLD), or not.
    state_round : int
        The round whose c_k counts; 0: c_k is zero.
    control : {"zero", "last", "sent"}
        Where c comes from: it is zero; the difference of the models of the last round and of this
        one, over M eta; or it came with the message.
    solve : {"clients", "server", "statistics"}
        Who solves the problem, and from what.
    sparsity, bits : float, int
        Of features that are sent; 0 and 32: float16. `bits` are of the fixed-point numbers, too,
        that are summed up with ``solve="statistics"``; 32: features as they are.
    balanced : bool
        Whether sums are weighted by the class of their examples.
    validation_share : float
        Share of a client's examples whose sums it sends apart; 0: none.
    run : str
        Names the training run: what a client keeps for one is not another's.
    """

    step: Step
    key: str
    feature_map: FeatureMap
    bias: bool = False
    loss: Loss = "mse"
    learning_rate: float = 5e-5
    local_steps: int = 500
    corrected: bool = True
    state_round: int = 0
    control: Literal["zero", "last", "sent"] = "zero"
    solve: Solve = "clients"
    sparsity: float = 0.0
    bits: int = UNQUANTISED
    balanced: bool = False
    validation_share: float = 0.0
    run: str = ""

    @staticmethod
    def key_of(feature_map: FeatureMap, network: Sequence[NDArray[Any]]) -> str:
        """Return the key of a network's arrays, in the order of its state dict, and a map."""
        digest = blake2b(repr(feature_map).encode(), digest_size=16)
        for array in network:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def to_config(self) -> dict[str, str | int | float | bool]:
        """Return keys that begin with ``tct-`` and their values."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        own |= own.pop("feature_map").to_config()
        return {PREFIX + name.replace("_", "-"): value for name, value in own.items()}

    @staticmethod
    def owns(key: str) -> bool:
        """Whether a key of a configuration is one of these."""
        return key.startswith(PREFIX)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self | None:
        """Read what :meth:`to_config` returned among other keys; None where it is not there."""
        if PREFIX + "step" not in config:
            return None
        own = {k.removeprefix(PREFIX): v for k, v in config.items() if k.startswith(PREFIX)}
        values = {
            field.name: own[field.name.replace("_", "-")]
            for field in fields(cls)
            if field.name != "feature_map"
        }
        return cls(**values, feature_map=FeatureMap.from_config(own))
