"""Examples, weights and messages that tests of clients share."""

import numpy as np
import torch
from torch import nn

from fedntk.clients import NamedArrays, get_weights

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Copies of a model's arrays, by name."""
    return dict(zip(model.state_dict(), get_weights(model), strict=True))


def named(**records: dict[str, np.ndarray]) -> NamedArrays:
    """Arrays as a client is given them: record -> name -> array."""
    return NamedArrays({name.replace("_", "-"): record for name, record in records.items()})


def raw(arrays: list[np.ndarray]) -> list[bytes]:
    """Their bits."""
    return [array.tobytes() for array in arrays]
