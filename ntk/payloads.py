"""What travels between clients and server, as frozen dataclasses of named arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import BadReply
from .jacobian import Jacobian

__all__ = ["JacobianUpload", "stack_candidates", "unstack_candidates"]


@dataclass(frozen=True, eq=False)
class JacobianUpload:
    """What one client sends up in a round of NTK-FL (Yue et al. 2022, section 4.1, step 2).

    Attributes
    ----------
    jacobian : Jacobian
        J_m of the client's n examples, at the received weights.
    outputs : Tensor, shape (n, C)
        f(X_m) at the received weights, in the Jacobian's dtype (float32, or float64).
    targets : Tensor, shape (n, C)
        Y_m, one-hot, in the same dtype.
    """

    jacobian: Jacobian
    outputs: Tensor
    targets: Tensor

    def to_arrays(self) -> list[NDArray[Any]]:
        """Wire format: outputs, targets, then the Jacobian's arrays."""
        return [self.outputs.cpu().numpy(), self.targets.cpu().numpy(), *self.jacobian.to_arrays()]

    @classmethod
    def from_arrays(
        cls, arrays: Sequence[NDArray[Any]], *, parameters: Mapping[str, Sequence[int]]
    ) -> Self:
        """Parse and check what :meth:`to_arrays` made.

        Parameters
        ----------
        arrays : sequence of ndarray
            As received.
        parameters : mapping of str to sequence of int
            Shape of each array of the global model.

        Raises
        ------
        BadReply
            With the reason ``"shape"``, ``"dtype"``, ``"non-finite"``, ``"scale"``, ``"labels"``
            or ``"layout"``.
        """
        if len(arrays) < 3:
            raise BadReply("shape", f"expected at least 3 arrays, got {len(arrays)}")
        jacobian = Jacobian.from_arrays(arrays[2:], parameters=parameters)
        shape = (jacobian.num_examples, jacobian.num_outputs)
        dtype = arrays[-1].dtype  # the Jacobian's
        checked = []
        for name, array in zip(("outputs", "targets"), arrays, strict=False):
            if array.shape != shape:
                raise BadReply("shape", f"{name}: expected {shape}, got {array.shape}")
            if array.dtype != dtype:
                raise BadReply("dtype", f"{name}: expected {dtype}, got {array.dtype}")
            if not np.isfinite(array).all():
                raise BadReply("non-finite", f"{name} hold NaN or infinity")
            checked.append(torch.from_numpy(np.require(array, requirements=["C", "W"])))
        outputs, targets = checked
        if ((targets != 0) & (targets != 1)).any() or (targets.sum(1) != 1).any():
            raise BadReply("labels", "targets: expected one-hot rows")
        return cls(jacobian, outputs, targets)


def stack_candidates(
    weights: Mapping[str, NDArray[Any]], updates: Sequence[Mapping[str, Tensor]]
) -> dict[str, NDArray[Any]]:
    """Candidate weights w + update for each of several updates, stacked by parameter.

    Parameters
    ----------
    weights : mapping of str to ndarray
        The global model, buffers included.
    updates : sequence of mapping of str to Tensor
        For each candidate, the change of the parameters; arrays that an update leaves out stay.

    Returns
    -------
    dict of str to ndarray of shape (number of candidates, *array shape)
        In the weights' order and dtypes.
    """
    stacked = {}
    for name, array in weights.items():
        rows = np.repeat(array[None], len(updates), axis=0)
        for row, update in enumerate(updates):
            if name in update:
                rows[row] += update[name].cpu().numpy().astype(array.dtype)
        stacked[name] = rows
    return stacked


def unstack_candidates(arrays: Sequence[NDArray[Any]]) -> list[list[NDArray[Any]]]:
    """Return lists of weights, one for each candidate, from arrays stacked as above.

    Raises
    ------
    ValueError
        If the arrays do not agree on the number of candidates.
    """
    counts = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"candidates: expected one number of rows, got {sorted(counts)}")
    return [[array[row, ...] for array in arrays] for row in range(counts.pop())]
