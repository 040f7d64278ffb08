"""Uploads of NTK-FL."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..errors import BadReply
from ..jacobian.operator import Jacobian
from ..support.arrays import ArrayDict, Arrays, require_array
from .jacobian_format import jacobian_from_arrays, jacobian_to_arrays


@dataclass(frozen=True, eq=False)
class JacobianUpload:
    """What one client sends up in a round of NTK-FL (Yue et al. 2022, section 4.1, step 2).

    The Jacobian J_m is of the client's n examples, at the received weights. Outputs f(X_m) there
    and one-hot targets Y_m are (n, C), in the Jacobian's dtype (float32, or float64).
    """

    jacobian: Jacobian
    outputs: Tensor
    targets: Tensor

    def to_arrays(self) -> ArrayDict:
        """Return outputs, targets and the Jacobian's arrays, by name."""
        rows = {"outputs": self.outputs.cpu().numpy(), "targets": self.targets.cpu().numpy()}
        return rows | jacobian_to_arrays(self.jacobian)

    @classmethod
    def from_arrays(
        cls,
        arrays: Arrays,
        *,
        parameters: Mapping[str, Sequence[int]],
        weights: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Check what :meth:`to_arrays` made, given the shape of each array of the global model.

        With `weights`, those that the client got, layers may be in the form that needs them.

        BadReply has the reason ``"labels"`` or one of :func:`jacobian_from_arrays`.
        """
        beside = ("outputs", "targets")
        jacobian = jacobian_from_arrays(arrays, *beside, parameters=parameters, weights=weights)
        shape = (jacobian.num_examples, jacobian.num_outputs)
        dtype = jacobian.blocks[-1].arrays[-1].numpy().dtype
        checked = []
        for name in beside:
            require_array(name, arrays[name], shape=shape, dtype=dtype)
            checked.append(torch.from_numpy(np.require(arrays[name], requirements=["C", "W"])))
        outputs, targets = checked
        if ((targets != 0) & (targets != 1)).any() or (targets.sum(1) != 1).any():
            raise BadReply("labels", "targets: expected one-hot rows")
        return cls(jacobian, outputs, targets)

    def claimed(self, num_examples: int) -> Self:
        """Return itself if its client claims as many examples; else BadReply."""
        if (sent := self.jacobian.num_examples) != num_examples:
            raise BadReply("num-examples", f"claims {num_examples} and sends {sent}")
        return self

    @staticmethod
    def concatenate(uploads: Sequence["JacobianUpload"]) -> "JacobianUpload":
        """Stack the rows of several uploads, in their order: eq. (8)."""
        return JacobianUpload(
            Jacobian.concatenate([upload.jacobian for upload in uploads]),
            torch.cat([upload.outputs for upload in uploads]),
            torch.cat([upload.targets for upload in uploads]),
        )

    def rows(self, indices: Tensor) -> "JacobianUpload":
        """Return rows of Jacobian, outputs and targets together, in the order of `indices`."""
        jacobian = self.jacobian.mapped(lambda array: array[indices])
        return JacobianUpload(jacobian, self.outputs[indices], self.targets[indices])

    def canonical(self) -> "JacobianUpload":
        """Sort the rows by their bytes, so that their order on arrival does not matter."""
        outputs, targets = self.outputs.cpu().numpy(), self.targets.cpu().numpy()
        keys = [(f.tobytes(), y.tobytes()) for f, y in zip(outputs, targets, strict=True)]
        counts = Counter(keys)
        arrays = [a.cpu().numpy() for b in self.jacobian.blocks for a in b.arrays]

        def key(i: int) -> tuple[bytes, ...]:
            if counts[keys[i]] == 1:
                return keys[i]
            row = b"".join(array[i].tobytes() for array in arrays)  # let the Jacobians decide
            return (*keys[i], hashlib.sha256(row).digest())

        return self.rows(torch.tensor(sorted(range(len(keys)), key=key)))
