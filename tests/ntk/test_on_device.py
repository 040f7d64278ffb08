"""The program that a GPU machine runs, on the CPU, so that it still works where there is one."""

import sys

import pytest
import torch

from fedntk.ntk import Jacobian

from . import on_device

NAMES = ["lstm", "single-output", "narrow-maps", "gpt", "no-outputs-axis", "convex problem"]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # LSTM by vmap
def test_float32_is_within_the_bound_of_float64(capsys):
    assert on_device.report("cpu", NAMES)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == NAMES


def test_factors_of_ten_bits_are_found_out(monkeypatch, capsys):
    """As TF32 rounds them: to 2^-11, ten times the bound."""
    exact = on_device.jacobian

    def rounded(*arguments, **options):
        made = exact(*arguments, **options)
        if made.dtype == torch.float64:
            return made
        blocks = [b.with_arrays([a.half().float() for a in b.arrays]) for b in made.blocks]
        return Jacobian(tuple(blocks))

    monkeypatch.setattr(on_device, "jacobian", rounded)
    assert not on_device.report("cpu", ["mlp"])
    assert "more than 5e-05" in capsys.readouterr().out


def test_the_program_says_if_there_is_no_gpu(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program("gpu").main()
    assert capsys.readouterr().out == "torch finds no GPU here: nothing was run\n"
