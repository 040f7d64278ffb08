"""Candidate weights of NTK-FL, one for each number of steps, and the choice among them.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, eq. (10) and
(11a).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["stack_candidates", "unstack_candidates"]


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
