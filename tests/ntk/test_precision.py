"""TF32, and bfloat16 on CPUs, are off where kernels and solutions are formed, and only there.

The program that a GPU machine runs would find them out.
"""

import operator
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedntk.ntk import Jacobian, evolve, jacobian, random_projection
from fedntk.ntk.features.rows import FeatureRows
from fedntk.ntk.support.precision import full_float32

from . import on_device
from .cases import make

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution", "convolution_backward"}


def chosen() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.fixture
def low() -> Iterator[None]:
    """A program that has switched TF32 on."""
    before = chosen()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


class Watched(TorchDispatchMode):
    """Notes with which precision each product of float32 is formed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::").rstrip("_")
        if name in PRODUCTS and args[0].dtype != torch.float64:
            self.seen.add(chosen())
        return func(*args, **(kwargs or {}))


ROWS, X, Y = FeatureRows(np.ones((6, 4), np.float32)), torch.ones(6, 4), torch.ones(6, 2)
W, F, TARGETS = torch.zeros(4, 2), torch.zeros(6, 3), torch.eye(3)[torch.arange(6) % 3]
FLOW = {"learning_rate": 0.1, "steps": [5]}
WORKS = {
    "products and features": lambda: on_device.products("cnn", torch.float32, "cpu"),
    "solver": lambda: evolve(torch.eye(6), F, TARGETS, loss="cross-entropy", **FLOW),
    "projection": lambda: random_projection(X, 3, 0),
    "rows": lambda: ROWS @ W,
    "transposed rows": lambda: ROWS.transposed_matmul(Y),
    "gram of rows": ROWS.gram,
}


@pytest.mark.usefixtures("low")
@pytest.mark.parametrize("name", WORKS)
def test_products_are_formed_in_full_precision(name):
    with Watched() as watched:
        WORKS[name]()
    assert watched.seen == {("highest", False)}
    assert chosen() == ("high", True)


def test_recurrent_layers_do_without_cudnn(monkeypatch):
    """Its backward pass refuses evaluation mode, in which Jacobians are taken."""
    seen = set()
    backward = torch.autograd.grad

    def grad(*arguments, **options):
        seen.add(torch.backends.cudnn.enabled)
        return backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for name, expected in (("lstm", False), ("mlp", True)):
        seen.clear()
        jacobian(*make(name))
        assert seen == {expected}
    assert torch.backends.cudnn.enabled


@pytest.mark.usefixtures("low")
def test_the_callers_choice_is_back_after_an_error_and_after_the_last_thread():
    with pytest.raises(ValueError, match="inside"), full_float32():
        raise ValueError("inside")
    assert chosen() == ("high", True)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_float32():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with full_float32():
        thread.start()
        assert entered.wait(60)
    assert chosen() == ("highest", False)  # the other thread is still at work
    leave.set()
    thread.join()
    assert chosen() == ("high", True)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 and newer"
)
@pytest.mark.parametrize("owner", ["", "cuda.matmul", "cudnn", "cudnn.conv"])
def test_the_newer_switches_are_heeded(owner):
    """Each can be set at its own level, and those below inherit it."""
    backend = operator.attrgetter(f"backends.{owner}".rstrip("."))(torch)

    def precisions() -> list[str]:
        return [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]

    old, state = backend.fp32_precision, chosen()
    try:
        backend.fp32_precision = "tf32"
        before = precisions()
        assert "tf32" in before
        with full_float32():
            assert "tf32" not in precisions()
        assert precisions() == before
    finally:
        backend.fp32_precision = old
    assert chosen() == state


NAMES = ["lstm", "single-output", "narrow-maps", "gpt", "no-outputs-axis", "convex problem"]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # LSTM by vmap
def test_float32_is_within_the_bound_of_float64(capsys):
    assert on_device.report("cpu", NAMES)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == NAMES


def test_factors_of_ten_bits_are_found_out(monkeypatch, capsys):
    """As TF32 rounds them: to 2^-11, ten times the bound."""
    exact = on_device.jacobian

    def rounded(*arguments: Any, **options: Any) -> Jacobian:
        jac = exact(*arguments, **options)
        return jac if jac.dtype == torch.float64 else jac.mapped(lambda a: a.half().float())

    monkeypatch.setattr(on_device, "jacobian", rounded)
    assert not on_device.report("cpu", ["mlp"])
    assert "more than 5e-05" in capsys.readouterr().out


def test_the_program_says_if_there_is_no_gpu(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speed.py", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program("speed").main()
    assert capsys.readouterr().out == "torch finds no GPU here: nothing was run\n"
