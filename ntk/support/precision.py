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

Undo = list[Callable[[], Any]]
_LOCK = threading.Lock()
_OPEN: list[Undo] = []


@contextmanager
def process_wide(open_blocks: list[Undo], switch: Callable[[], Undo]) -> Iterator[None]:
    """Switch something of the whole process while any block is open, in any thread."""
    with _LOCK:
        open_blocks.append([] if open_blocks else switch())
    try:
        yield
    finally:
        with _LOCK:
            if len(open_blocks) == 1:
                for undo in open_blocks[0]:
                    undo()
            open_blocks.pop()


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch off TF32, and bfloat16 on CPUs, while a kernel or a solution is formed."""
    with process_wide(_OPEN, _switch_off):
        yield


def _switch_off() -> Undo:
    # by the names that a program may have used
    undo: Undo = []
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
