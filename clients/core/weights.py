"""Weights as the list of arrays that Flower's NumPyClient passes around."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk.support.shared_arrays import first_names

Scalar = bool | bytes | float | int | str  # what a message's configuration holds
Parameters = list[NDArray[Any]]  # the arrays of a message, or of a reply
Config = dict[str, Scalar]  # a message's configuration
Fit = tuple[Parameters, int, dict[str, Scalar]]  # arrays, number of examples, metrics
Evaluation = tuple[float, int, dict[str, Scalar]]  # loss, number of examples, metrics


def get_weights(model: nn.Module) -> list[NDArray[Any]]:
    """Return copies of all parameters and buffers, in the order of ``model.state_dict()``."""
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def set_weights(model: nn.Module, arrays: Sequence[NDArray[Any]]) -> None:
    """Load what :func:`get_weights` returned, cast to the model's own dtypes.

    Of an array with several names, such as tied weights, what comes under the first name counts.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    names = state if len({*state.values()}) == len(state) else {*first_names(model).values()}
    if len(arrays) != len(state):
        raise ValueError(f"weights: the model has {len(state)} arrays, got {len(arrays)}")
    for (name, tensor), array in zip(state.items(), arrays, strict=True):
        if tuple(tensor.shape) != array.shape:
            raise ValueError(
                f"weights: {name} has the shape {tuple(tensor.shape)}, got {array.shape}"
            )
        if name in names:
            tensor.detach().copy_(torch.from_numpy(array.copy()))
