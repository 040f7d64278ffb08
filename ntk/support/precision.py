"""Products in full float32: a GPU's TF32 keeps 10 bits of each factor, too few for a kernel.

PyTorch has one switch for matrix products, off unless a program turns it on, and one for
convolutions, which is on by default.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

# the switches are the process's; threads that need them off at the same time share the change
_LOCK = threading.Lock()
_UNDO: list[list[Callable[[], Any]]] = []


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch off TF32, and bfloat16 on CPUs, while a kernel or a solution is formed.

    It may be nested, and used by several threads: the last restores the caller's own choice.
    """
    with _LOCK:
        _UNDO.append([] if _UNDO else _switch_off())
    try:
        yield
    finally:
        with _LOCK:
            if len(_UNDO) == 1:
                for undo in _UNDO[0]:
                    undo()
            _UNDO.pop()


def _switch_off() -> list[Callable[[], Any]]:
    """Switch off, by the names that a program may have used; return what undoes it."""
    undo: list[Callable[[], Any]] = []
    backends: Any = torch.backends
    every = [getattr(owner, "matmul", None) for owner in (backends.cuda, backends.mkldnn)]
    every += [getattr(backends.cudnn, name, None) for name in ("conv", "rnn")]
    owners: list[Any] = [owner for owner in every if hasattr(owner, "fp32_precision")]  # torch 2.9
    before = [owner.fp32_precision for owner in owners]
    with suppress(RuntimeError):  # it was chosen by `fp32_precision`, and these refuse to be read
        precision = torch.get_float32_matmul_precision()
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            undo.append(partial(torch.set_float32_matmul_precision, precision))
    with suppress(RuntimeError):
        if torch.backends.cudnn.allow_tf32:
            torch.backends.cudnn.allow_tf32 = False
            undo.append(partial(setattr, torch.backends.cudnn, "allow_tf32", True))
    for owner, value in zip(owners, before, strict=True):
        if owner.fp32_precision not in ("none", "ieee"):
            owner.fp32_precision = "ieee"
        undo.append(partial(_restore, owner, value))
    return undo


def _restore(owner: Any, value: str) -> None:
    if owner.fp32_precision != value:
        owner.fp32_precision = value
