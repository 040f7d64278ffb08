"""Threads wait passively wherever fedntk comes before torch; own settings win."""

import json
import logging
import os
import runpy
import sys

import pytest

from fedntk.ntk.support import threads

from ..conftest import output_of

BEFORE_TORCH = """
import json, os, sys
class Stop:
    def find_spec(self, name, *_):
        if name == "torch":
            late = sys.modules["fedntk.ntk.support.threads"].TOO_LATE
            print(json.dumps([os.environ.get("OMP_WAIT_POLICY"), late]), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import fedntk.ntk", "import fedntk.clients", "import fedntk.strategies",
        "from fedntk.simulations import run", "from fedntk.simulations import fedntk_app",
        "from fedntk.simulations.cli import app; app(['settings'])",
    ],
)  # fmt: skip
def test_passive_waiting_is_set_before_torch_is_loaded(code):
    """OpenMP reads the variable as torch loads it; the process ends just before that."""
    plain = {k: v for k, v in os.environ.items() if k not in threads.OWN_SETTINGS}
    said = output_of(sys.executable, "-c", f"{BEFORE_TORCH}{code}", env=plain)
    assert json.loads(said) == ["PASSIVE", False]


@pytest.mark.parametrize("name", ["", *threads.OWN_SETTINGS])
def test_own_settings_win_and_after_torch_it_is_set_for_new_processes(name, monkeypatch):
    """Without settings it is too late for this process, where torch is loaded already."""
    for setting in threads.OWN_SETTINGS:
        monkeypatch.setenv(setting, "100")
        if setting != name:
            monkeypatch.delenv(setting)
    assert runpy.run_path(threads.__file__)["TOO_LATE"] == (name == "")
    expected = {"": "PASSIVE", "OMP_WAIT_POLICY": "100"}
    assert os.environ.get("OMP_WAIT_POLICY") == expected.get(name)


@pytest.mark.parametrize(
    ("change", "count", "warnings"),
    [({}, 8, 1), ({}, 1, 0), ({"TOO_LATE": False}, 8, 0), ({"load": 0.0}, 8, 0)],
)
def test_spinning_is_reported_once_if_busy(change, count, warnings, monkeypatch, caplog):
    monkeypatch.setattr(threads, "TOO_LATE", change.get("TOO_LATE", True))
    monkeypatch.setattr(threads, "_cores", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (change.get("load", 99.0),) * 3)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    threads.warn_of_spinning.cache_clear()
    for _ in range(2):
        threads.warn_of_spinning(count)
    threads.warn_of_spinning.cache_clear()
    assert ["before torch" in message for message in caplog.messages] == [True] * warnings
