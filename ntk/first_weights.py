"""First weights of one's own, for each of several models of an architecture."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Initialisation", "drawn_weights"]

Initialisation = Literal["he", "xavier"]


def drawn_weights(
    arrays: Mapping[str, NDArray[Any]],
    init: Initialisation,
    generator: np.random.Generator,
    *,
    zero_biases: bool = False,
) -> dict[str, NDArray[Any]]:
    """Draw matrices and kernels anew, and keep all other arrays, such as those of BatchNorm.

    Sources: He et al., *Delving Deep into Rectifiers*, ICCV 2015, eq. (10): a normal distribution
    of variance 2 / fan_in. Glorot and Bengio, *Understanding the Difficulty of Training Deep
    Feedforward Neural Networks*, AISTATS 2010, eq. (16): a uniform one of variance
    2 / (fan_in + fan_out).

    With `zero_biases`, vectors become 0 if the last part of their name has "bias" in it.
    """
    drawn = {name: _matrix(array, init, generator) for name, array in arrays.items()}
    for name, array in drawn.items():
        if zero_biases and array.ndim == 1 and "bias" in name.rpartition(".")[2]:
            drawn[name] = np.zeros_like(array)
    return drawn


def _matrix(array: NDArray[Any], init: Initialisation, generator: np.random.Generator) -> Any:
    """Draw a matrix or a set of filters, shape (out, in, ...); other arrays stay as they are."""
    if array.ndim < 2 or not np.issubdtype(array.dtype, np.floating):
        return array
    area = int(np.prod(array.shape[2:]))
    fan_in, fan_out = array.shape[1] * area, array.shape[0] * area
    if init == "he":
        drawn = generator.normal(0.0, np.sqrt(2 / fan_in), array.shape)
    else:
        bound = np.sqrt(6 / (fan_in + fan_out))
        drawn = generator.uniform(-bound, bound, array.shape)
    return drawn.astype(array.dtype)
