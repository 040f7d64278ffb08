"""A device that no machine has: its tensors hold their numbers on the CPU but are kept apart.

As on a GPU, an operation on tensors of both devices is refused, random numbers need a generator of
the device, and nothing becomes an array of NumPy before it is back on the CPU. It goes by the name
"lazy", of a device that torch knows, looks up no driver for, and does not treat specially.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "lazy"
aten = torch.ops.aten
# what takes tensors of two devices on a GPU, too; indices of rows may stay on the CPU
TRANSFERS = {aten._to_copy, aten.copy_}
INDEXED = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class DeviceTensor(Tensor):
    """Says that it is on the device; `numbers` holds the numbers."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "DeviceTensor":
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=NAME, **place
        )
        made.numbers = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return _run(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """Has ``tensor.to("lazy")`` and ``device="lazy"`` make tensors of the device."""

    def __enter__(self) -> "FakeDevice":
        torch._C._set_only_lift_cpu_tensors(True)  # lists become tensors through the mode, too
        torch.__future__.set_swap_module_params_on_conversion(True)  # shared weights stay shared
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return _run(func, args, kwargs or {})


def _flat(value: Any) -> list[Any]:
    nested = isinstance(value, list | tuple)
    return [leaf for own in value for leaf in _flat(own)] if nested else [value]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, own) for own in value])
    return change(value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = _flat((args, *kwargs.values()))
    target = kwargs.get("device")
    there = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if target is None and not there:
        return func(*args, **kwargs)
    _refuse_two_devices(func, args, leaves, there)
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        on_device = torch.device(target).type == NAME
    elif func.overloadpacket is aten.copy_:
        on_device = isinstance(args[0], DeviceTensor)
    else:
        on_device = bool(there)
    own = {id(leaf.numbers): leaf for leaf in there}

    def inner(leaf: Any) -> Any:
        return leaf.numbers if isinstance(leaf, DeviceTensor) else leaf

    def outer(made: Any) -> Any:
        if not isinstance(made, Tensor) or isinstance(made, DeviceTensor):
            return made
        if id(made) in own:  # written in place
            return own[id(made)]
        return DeviceTensor(made) if on_device else made

    named = {name: _mapped(inner, value) for name, value in kwargs.items()}
    return _mapped(outer, func(*_mapped(inner, args), **named))


def _refuse_two_devices(func: Any, args: Any, leaves: list[Any], there: list[Any]) -> None:
    packet = func.overloadpacket
    here = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, DeviceTensor)]
    if packet in INDEXED:  # (self, indices, values)
        rows = [t for t in _flat(args[1]) if isinstance(t, Tensor)]
        if isinstance(args[0], DeviceTensor):
            here = [t for t in here if all(t is not row for row in rows)]
    if there and packet not in TRANSFERS and any(t.ndim for t in here):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    if there and generators:
        raise RuntimeError(f"{func}: expected a generator of the device")
