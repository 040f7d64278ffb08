"""Runs that are killed, or lose what clients keep, end with the same bits or say what is gone."""

import os
import sys

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config

from . import crashes
from .conftest import ROOT, output_of

QUICK = "d-psgd"  # keeps weights and a key on each client's disk, and seals parcels


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param("|".join(crashes.CASES), marks=pytest.mark.slow)]
)
def test_killed_runs_have_the_same_bits_and_lost_stores_are_said(cases, tmp_path):
    """In a process of its own, as threads do not survive a fork."""
    options = "--troubles", "kill,loss", "--cases", cases, "--out", tmp_path / "found.csv"
    count = len(cases.split("|"))
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    command = sys.executable, "-m", "tests.crashes", count, 7, *options
    output_of(*command, env=one_thread, cwd=ROOT)
    found = pd.read_csv(tmp_path / "found.csv").fillna("")
    killed, lost = (found[found.trouble == trouble] for trouble in ("kill", "loss"))
    assert len(killed) == count
    assert (killed["same-bits"] == killed.runs).all()
    assert ((lost["same-bits"] == lost.runs) | lost.said.str.contains("lost")).all()


def test_other_bits_without_a_word_are_noticed(tmp_path, monkeypatch):
    """The program that disturbs runs, with runs that are none."""
    monkeypatch.setattr(crashes, "attempt", lambda *_, **__: ("finished", ["warned before"]))
    monkeypatch.setattr(crashes, "everything", lambda _: ("other bits",))
    monkeypatch.setattr("shutil.rmtree", lambda _: None)
    left_alone = crashes.Straight(("bits",), {"warned before"}, 1.0, 1, ["cache"])
    arguments = Config(), left_alone, "loss", 2, tmp_path, np.random.default_rng(0)
    found = crashes.disturb(*arguments)
    assert found == {"disturbed": 2, "runs": 2, "same-bits": 0, "said": "nothing"}
