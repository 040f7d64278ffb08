"""What travels in TCT's second stage, as frozen dataclasses of named arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compression import UNQUANTISED, Encoded, compress
from .convexify import FeatureMap
from .errors import BadReply
from .losses import Loss
from .memory import require_memory
from .payloads import DECODING_BYTES, Asked, require_asked

__all__ = ["ConvexTask", "FeatureUpload"]

PREFIX = "tct-"
LARGEST = 1e38  # scale: features up to it, and a little over, are float32
Step = Literal["bootstrap", "statistics", "features", "linear"]


@dataclass(frozen=True)
class ConvexTask:
    """What the server asks of a client in stage 2; travels in a message's configuration.

    Attributes
    ----------
    step : {"bootstrap", "statistics", "features", "linear"}
        What the message is for: local training of the network (the rest tells what will come), the
        moments of the features, the features themselves, or a round on the linear model.
        To evaluate it is ``"linear"``, too.
    key : str
        Names the bootstrapped network and the feature map: what a client keeps is good for one key.
    feature_map : FeatureMap
        Which features.
    bias : bool
        Whether the linear model has one.
    loss : {"mse", "cross-entropy"}
        Of the linear model.
    learning_rate, steps : float, int
        eta and M.
    corrected : bool
        Whether steps are corrected by h_k = c_k - c (SCAFFOLD), or not.
    state_round : int
        The round whose c_k counts; 0: c_k is zero.
    control : {"zero", "last", "sent"}
        Where c comes from: it is zero; the difference of the models of the last round and of this
        one, over M eta; or it came with the message.
    parts : tuple of str
        What came, in this order: ``"network"`` (its state dict), ``"normaliser"`` (mean and scale),
        ``"linear"`` and ``"control"``.
    sparsity, bits : float, int
        Of features that are sent; 0 and 32: float16.
    """

    step: Step
    key: str
    feature_map: FeatureMap
    bias: bool = False
    loss: Loss = "mse"
    learning_rate: float = 5e-5
    steps: int = 500
    corrected: bool = True
    state_round: int = 0
    control: Literal["zero", "last", "sent"] = "zero"
    parts: tuple[str, ...] = ()
    sparsity: float = 0.0
    bits: int = UNQUANTISED

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
        own["parts"] = ",".join(self.parts)
        own |= own.pop("feature_map").to_config()
        return {PREFIX + name.replace("_", "-"): value for name, value in own.items()}

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
        parts = tuple(part for part in values.pop("parts").split(",") if part)
        return cls(**values, parts=parts, feature_map=FeatureMap.from_config(own))

    def split(self, arrays: Sequence[NDArray[Any]]) -> dict[str, list[NDArray[Any]]]:
        """Name the arrays of a message by its parts.

        Raises
        ------
        ValueError
            If they are fewer than the parts need.
        """
        sizes = {"normaliser": 2, "linear": 1, "control": 1}
        rest = len(arrays) - sum(sizes.get(part, 0) for part in self.parts)
        if rest < 0 or ("network" in self.parts) != (rest > 0):
            raise ValueError(f"expected {', '.join(self.parts)}, got {len(arrays)} arrays")
        split, position = {}, 0
        for part in self.parts:
            size = sizes.get(part, rest)
            split[part] = list(arrays[position : position + size])
            position += size
        return split


@dataclass(frozen=True, eq=False)
class FeatureUpload:
    """A client's features and labels, for the server to solve the convex problem itself.

    Attributes
    ----------
    features : float16 or float32, shape (n, p)
        z over `scale`: numbers in [-1, 1].
    scale : float32, shape (p,)
        The largest magnitude of each feature among the client's examples, so that small features
        are not lost in float16.
    labels : unsigned int, shape (n,)
        0 ... C - 1.
    """

    features: NDArray[Any]
    scale: NDArray[np.float32]
    labels: NDArray[Any]

    @classmethod
    def of(cls, features: Tensor, targets: Tensor) -> Self:
        """Make it from features (n, p) in float32, which are overwritten, and one-hot targets."""
        low, high = features.aminmax(dim=0)
        scale = torch.maximum(-low, high)
        features /= torch.where(scale > 0, scale, torch.ones_like(scale))
        labels = targets.argmax(1).numpy()
        return cls(
            features.half().numpy(),
            scale.numpy(),
            labels.astype(np.min_scalar_type(targets.shape[1] - 1)),
        )

    def to_arrays(self, *, sparsity: float = 0.0, bits: int = UNQUANTISED) -> list[NDArray[Any]]:
        """Wire format: features, scale, labels; the features compressed row by row if asked."""
        features = self.features
        if (sparsity, bits) != (0.0, UNQUANTISED):
            numbers = features.astype(np.float32)
            features = compress(numbers, sparsity=sparsity, bits=bits, by_row=True)
        return [features, self.scale, self.labels]

    @classmethod
    def parse(
        cls, arrays: Sequence[NDArray[Any]], asked: Asked, *, width: int, num_outputs: int
    ) -> Self:
        """Check what :meth:`to_arrays` made against what was asked for, and decode it.

        Raises
        ------
        BadReply
            With the reason ``"arrays"``, ``"shape"``, ``"dtype"``, ``"non-finite"``, ``"range"``,
            ``"labels"`` or ``"compression"``.
        NotEnoughMemory
            If the decoded features would not fit.
        """
        if len(arrays) != 3:
            raise BadReply("arrays", f"expected features, scale and labels, got {len(arrays)}")
        features, scale, labels = arrays
        compressed = (asked.sparsity, asked.bits) != (0.0, UNQUANTISED)
        if features.dtype != (np.uint8 if compressed else np.float16):
            raise BadReply("dtype", f"features: got {features.dtype}")
        if labels.ndim != 1 or not 0 < len(labels) <= asked.max_examples:
            raise BadReply("shape", f"labels: got {labels.shape}")
        if labels.dtype.kind != "u":
            raise BadReply("dtype", f"labels: expected unsigned integers, got {labels.dtype}")
        if labels.max() >= num_outputs:
            raise BadReply("labels", f"expected 0 ... {num_outputs - 1}, got {labels.max()}")
        if scale.shape != (width,):
            raise BadReply("shape", f"scale: expected {(width,)}, got {scale.shape}")
        if scale.dtype != np.float32:
            raise BadReply("dtype", f"scale: expected float32, got {scale.dtype}")
        if not np.isfinite(scale).all():
            raise BadReply("non-finite", "scale holds NaN or infinity")
        if not (scale.min() >= 0 and scale.max() <= LARGEST):
            raise BadReply(
                "range", f"scale: expected 0 ... {LARGEST}, got {scale.min()} ... {scale.max()}"
            )
        shape = (len(labels), width)
        if compressed:
            code = Encoded.parse(features)
            require_asked(code, len(labels), asked)
            if code.shape != shape or code.dtype != np.float32:
                raise BadReply("shape", f"expected float32 of {shape}, got {code.shape}")
            require_memory(DECODING_BYTES * code.count + 4 * code.size, "a client's features")
            features = code.decode()
        if features.shape != shape:
            raise BadReply("shape", f"features: expected {shape}, got {features.shape}")
        low, high = features.min(), features.max()
        if not (np.isfinite(low) and np.isfinite(high)):  # NaN spreads
            raise BadReply("non-finite", "features hold NaN or infinity")
        if not (low >= -1.01 and high <= 1.01):
            raise BadReply("range", f"features: expected -1 ... 1, got {low} ... {high}")
        return cls(features, scale, labels)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return z of some examples, float32."""
        rows = self.features[start:stop].astype(np.float32)  # a copy: what came is read-only
        rows *= self.scale
        return torch.from_numpy(rows)
