"""Separate first weights for each of several models of one architecture."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Initialisation = Literal["he", "xavier"]


def seed_for(seed: int, purpose: str) -> int:
    """Return a seed for one of several draws, so that no two have the same random numbers."""
    return int(np.random.default_rng([seed, *purpose.encode()]).integers(2**63))


def draw_weights(
    arrays: Mapping[str, NDArray[Any]],
    init: Initialisation,
    generator: np.random.Generator,
    *,
    zero_biases: bool = False,
) -> dict[str, NDArray[Any]]:
    """Draw matrices and filters (out, in, ...) anew, and keep all other arrays.

    Sources: He et al., *Delving Deep into Rectifiers*, ICCV 2015, eq. (10): normal, of variance
    2 / fan_in. Glorot and Bengio, *Understanding the Difficulty of Training Deep Feedforward Neural
    Networks*, AISTATS 2010, eq. (16): uniform, of variance 2 / (fan_in + fan_out). With
    `zero_biases`, vectors become 0 if the last part of their name has "bias" in it.
    """
    drawn = dict(arrays)
    for name, array in arrays.items():
        if array.ndim >= 2 and np.issubdtype(array.dtype, np.floating):
            area = int(np.prod(array.shape[2:]))
            fan_in, fan_out = array.shape[1] * area, array.shape[0] * area
            if init == "he":
                values = generator.normal(0.0, np.sqrt(2 / fan_in), array.shape)
            else:
                bound = np.sqrt(6 / (fan_in + fan_out))
                values = generator.uniform(-bound, bound, array.shape)
            drawn[name] = values.astype(array.dtype)
        elif zero_biases and array.ndim == 1 and "bias" in name.rpartition(".")[2]:
            drawn[name] = np.zeros_like(array)
    return drawn
