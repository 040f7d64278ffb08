"""Arrays that a network has under several names, such as tied weights.

All names of an array move together: its first one counts, and the others have the same numbers.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .arrays import ArrayDict, Arrays


def first_names(network: nn.Module) -> dict[str, str]:
    """Map each name of a network's state dict to the first name of its array.

    The first name of a parameter is that in ``network.named_parameters()``.
    """
    first = {parameter: name for name, parameter in network.named_parameters()}
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
                "are one array, and only one of them does. Choose both, or neither, or give the "
                "network two arrays"
            )


def require_separate(network: nn.Module) -> None:
    """Refuse different parameters or buffers that share memory."""
    of_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if is_lazy(tensor) or tensor.device.type == "meta" or not tensor.numel():
            continue
        others = of_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other, held in others:
            if held is not tensor and _overlap(held, tensor):
                raise ValueError(
                    f"model: expected parameters and buffers with memory of their own, but {other} "
                    f"and {name} share theirs and are two tensors, each with a part of the "
                    "gradient; register one nn.Parameter under both names, or only one of them, "
                    "and compute the other from it in forward"
                )
        others.append((name, tensor))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have a number in common."""
    parts = []
    for tensor in (one, other):
        size, start = tensor.element_size(), tensor.storage_offset()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + 1 + sum((length - 1) * step for length, step in steps)
        parts.append((tensor, size, start, stop))
    (_, a, start, stop), (_, b, begin, end) = parts
    if a * stop <= b * begin or b * end <= a * start:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    first, second = (
        torch.arange(stop).as_strided(t.shape, t.stride(), start).flatten() * size
        for t, size, start, stop in parts
    )
    return bool(torch.isin(first, second).any())
