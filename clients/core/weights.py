"""Weights as the list of arrays that NumPyClients pass around, and the names of these arrays."""

from collections.abc import Mapping, Sequence
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
Record = Mapping[str, NDArray[Any]]


class NamedArrays(list[NDArray[Any]]):
    """A list of arrays that also knows the records and names under which they travel.

    :func:`~fedntk.clients.client_app` hands it to ``fit``, ``evaluate`` and ``query``. A client
    that returns one from ``fit`` names the records of its reply.

    Parameters
    ----------
    records : mapping of str to mapping of str to ndarray
        Record -> name -> array.
    unreadable : mapping of str to str, optional
        Record -> why it could not be read. Only records that come from other clients are left out
        so; any other one fails the message.
    """

    def __init__(
        self, records: Mapping[str, Record], unreadable: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(array for record in records.values() for array in record.values())
        self.records = {name: dict(record) for name, record in records.items()}
        self.unreadable = dict(unreadable or {})


def records_of(
    parameters: Sequence[NDArray[Any]], *names: str, strategy: str
) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the records of what ``fit`` was given; `strategy` sends those that must be there."""
    if not isinstance(parameters, NamedArrays):
        raise ValueError(
            f"expected NamedArrays with the records of the strategy {strategy}, as client_app "
            f"hands on, got a {type(parameters).__name__} without names"
        )
    records = parameters.records
    if missing := [name for name in names if name not in records]:
        raise ValueError(
            f"expected the records {', '.join(names)}, got {', '.join(records) or 'none'}; "
            f"{', '.join(missing)} comes from the strategy {strategy}"
        )
    return records


def get_weights(model: nn.Module) -> list[NDArray[Any]]:
    """Return copies of all parameters and buffers, in the order of ``model.state_dict()``."""
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def set_weights(model: nn.Module, arrays: Sequence[NDArray[Any]]) -> None:
    """Load what :func:`get_weights` returned, in the model's dtypes; of tied weights the first."""
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
