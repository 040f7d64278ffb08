"""Threads wait passively wherever fedntk comes before torch; own settings win."""

import json
import logging
import os
import subprocess
import sys

import pytest

from fedntk.ntk.support import threads

SHOW = "import json, os, sys; print(json.dumps([os.environ.get('OMP_WAIT_POLICY'), {}]))"


def in_new_process(code: str, **variables: str) -> list[object]:
    kept = {k: v for k, v in os.environ.items() if k not in threads.OWN_SETTINGS}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


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


@pytest.mark.parametrize("room", ["ntk", "clients", "strategies", "simulations", "simulations.cli"])
def test_passive_waiting_is_set_before_torch_is_loaded(room):
    """OpenMP reads the variable as it is loaded, by torch: a later setting would do nothing.

    The process ends where it is about to load torch.
    """
    assert in_new_process(f"{BEFORE_TORCH}import fedntk.{room}") == ["PASSIVE", False]


def test_after_torch_it_is_set_for_the_processes_that_are_started():
    late = f"import torch, fedntk.ntk; {SHOW.format('fedntk.ntk.support.threads.TOO_LATE')}"
    assert in_new_process(late) == ["PASSIVE", True]


@pytest.mark.parametrize("name", threads.OWN_SETTINGS)
def test_own_settings_win(name):
    code = f"import torch, fedntk.ntk; {SHOW.format('fedntk.ntk.support.threads.TOO_LATE')}"
    expected = "ACTIVE" if name == "OMP_WAIT_POLICY" else None
    value = expected or "100"
    assert in_new_process(code, **{name: value}) == [expected, False]


@pytest.mark.parametrize(
    ("change", "count", "warnings"),
    [({}, 8, 1), ({}, 1, 0), ({"TOO_LATE": False}, 8, 0), ({"load": 0.0}, 8, 0)],
)
def test_spinning_threads_are_reported_once_on_a_busy_machine(
    change, count, warnings, monkeypatch, caplog
):
    monkeypatch.setattr(threads, "TOO_LATE", change.get("TOO_LATE", True))
    monkeypatch.setattr(threads, "_cores", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (change.get("load", 99.0),) * 3)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    threads.warn_of_spinning.cache_clear()
    for _ in range(2):
        threads.warn_of_spinning(count)
    threads.warn_of_spinning.cache_clear()
    assert ["before torch" in message for message in caplog.messages] == [True] * warnings
