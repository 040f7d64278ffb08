"""Arrays that a network has under several names, such as tied weights.

All names of an array move together: its first one counts, and the others have the same numbers.
"""

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .arrays import ArrayDict, Arrays


def first_names(network: nn.Module) -> dict[str, str]:
    """Map each name of a network's state dict to the first name of its array.

    The first name of a parameter is that in ``network.named_parameters()``.
    """
    first: dict[Tensor, str] = {p: name for name, p in network.named_parameters()}
    state: dict[str, Tensor] = network.state_dict(keep_vars=True)
    return {name: first.setdefault(tensor, name) for name, tensor in state.items()}


def other_names(network: nn.Module) -> dict[str, str]:
    """Map each further name of a parameter that is trained to its first one."""
    first = {p: name for name, p in network.named_parameters() if p.requires_grad}
    every = network.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in every if first.get(p, name) != name}


def unify(network: nn.Module, arrays: Arrays) -> ArrayDict:
    """Return a network's arrays, each with the numbers under its first name."""
    return {name: arrays[first] for name, first in first_names(network).items()}


def require_whole(network: nn.Module, names: Collection[str], use: str) -> None:
    """Refuse `names` that lack another name of one of their arrays; `use` is what they do."""
    for name, first in first_names(network).items():
        if (name in names) != (first in names):
            raise ValueError(
                f"network: expected all names of an array to {use}, or none; {first} and {name} "
                "are one array: choose both, or neither, or give the network two arrays"
            )


def require_separate(network: nn.Module) -> None:
    """Refuse different parameters or buffers that share memory."""
    of_storage = defaultdict[int, dict[Tensor, str]](dict)
    state: dict[str, Tensor] = network.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if not is_lazy(tensor) and tensor.device.type != "meta" and tensor.numel():
            of_storage[tensor.untyped_storage().data_ptr()].setdefault(tensor, name)
    for names in of_storage.values():
        if len(names) == 1:
            continue
        taken = torch.zeros(next(iter(names)).untyped_storage().nbytes(), dtype=torch.bool)
        for tensor, name in names.items():
            size = tensor.element_size()
            strides = [size * step for step in tensor.stride()]
            place = taken.as_strided(tensor.shape, strides, size * tensor.storage_offset())
            if place.any():
                others = ", ".join(other for other in names.values() if other != name)
                raise ValueError(
                    "model: expected parameters and buffers with memory of their own, but "
                    f"{name} shares memory with {others}, so that each has a part of the gradient; "
                    "register one nn.Parameter under both names, or compute one from the other"
                )
            place.fill_(True)
