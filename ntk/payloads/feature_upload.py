"""Uploads of TCT for a server that solves the convex problem itself."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..support.arrays import ArrayDict, Arrays, require_array, take_arrays
from ..support.memory import require_memory
from .compressed_upload import DECODING_BYTES
from .compression import UNQUANTISED, Encoded, compress
from .limits import UploadLimits, require_labels

LARGEST = 1e38  # scale: features up to it, and a little over, are float32


@dataclass(frozen=True, eq=False)
class FeatureUpload:
    """A client's features and labels, for the server to solve the convex problem itself."""

    features: NDArray[Any]  # z / scale, in [-1, 1]: float16 or float32 (n, p)
    scale: NDArray[np.float32]  # largest magnitudes (p,): small features are not lost in float16
    labels: NDArray[Any]  # 0 ... C - 1: unsigned (n,)

    @classmethod
    def of(cls, features: Tensor, targets: Tensor) -> Self:
        """Make it from features (n, p) in float32, which are overwritten, and one-hot targets."""
        low, high = features.aminmax(dim=0)
        scale = torch.maximum(-low, high)
        features /= torch.where(scale > 0, scale, torch.ones_like(scale))
        labels = targets.argmax(1).numpy().astype(np.min_scalar_type(targets.shape[1] - 1))
        return cls(features.half().numpy(), scale.numpy(), labels)

    def to_arrays(self, *, sparsity: float = 0.0, bits: int = UNQUANTISED) -> ArrayDict:
        """Return the arrays by name, the features compressed row by row if asked."""
        features = self.features
        if (sparsity, bits) != (0.0, UNQUANTISED):
            numbers = features.astype(np.float32)
            features = compress(numbers, sparsity=sparsity, bits=bits, by_row=True)
        return {"features": features, "scale": self.scale, "labels": self.labels}

    @classmethod
    def from_arrays(
        cls, arrays: Arrays, limits: UploadLimits, *, width: int, num_outputs: int
    ) -> Self:
        """Check what :meth:`to_arrays` made against the limits, or raise BadReply; decode it."""
        features, scale, labels = take_arrays(arrays, "features", "scale", "labels")
        compressed = (limits.sparsity, limits.bits) != (0.0, UNQUANTISED)
        if features.dtype != (np.uint8 if compressed else np.float16):
            raise BadReply("dtype", f"features: got {features.dtype}")
        require_labels(labels, -1, num_outputs)
        limits.require_examples(len(labels))
        require_array("scale", scale, shape=(width,), dtype=np.float32, low=0, high=LARGEST)
        shape = (len(labels), width)
        if compressed:
            code = Encoded.parse(features)
            limits.require(code, len(labels))
            if code.shape != shape or code.dtype != np.float32:
                raise BadReply("shape", f"expected float32 of {shape}, got {code.shape}")
            require_memory(DECODING_BYTES * code.count + 4 * code.size, "a client's features")
            features = code.decode()
        require_array("features", features, shape=shape, low=-1.01, high=1.01)
        return cls(features, scale, labels)

    @property
    def size(self) -> float:
        """Euclidean norm of `scale`, the size of the features."""
        return float(np.linalg.norm(self.scale.astype(np.float64)))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return z of some examples, float32."""
        rows = self.features[start:stop].astype(np.float32)  # a copy: what came is read-only
        rows *= self.scale
        return torch.from_numpy(rows)
