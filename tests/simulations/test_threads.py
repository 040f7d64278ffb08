"""Threads wait passively wherever fedntk.simulations comes before torch; own settings win."""

import json
import logging
import os
import subprocess
import sys

import pytest

from fedntk.simulations import threads

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


def test_passive_waiting_is_set_before_torch_is_loaded():
    """OpenMP reads the variable as it is loaded, by torch: a later setting would do nothing."""
    loaded = "'torch' in sys.modules"
    assert in_new_process(f"import fedntk.simulations; {SHOW.format(loaded)}") == ["PASSIVE", False]
    both = "import sys, fedntk.simulations; sys.argv = ['fedntk']; import fedntk.simulations.cli; "
    too_late = "fedntk.simulations.threads.TOO_LATE"
    assert in_new_process(both + SHOW.format(too_late)) == ["PASSIVE", False]
    late = f"import torch, fedntk.simulations; {SHOW.format(too_late)}"
    assert in_new_process(late) == ["PASSIVE", True]  # for the processes that it starts


@pytest.mark.parametrize("name", threads.OWN_SETTINGS)
def test_own_settings_win(name):
    code = f"import torch, fedntk.simulations; {SHOW.format('fedntk.simulations.threads.TOO_LATE')}"
    expected = "ACTIVE" if name == "OMP_WAIT_POLICY" else None
    value = expected or "100"
    assert in_new_process(code, **{name: value}) == [expected, False]


@pytest.mark.parametrize(
    ("too_late", "count", "load", "said"),
    [(True, 2, 99.0, 1), (False, 2, 99.0, 0), (True, 1, 99.0, 0), (True, 2, 0.0, 0)],
)
def test_spinning_threads_on_a_busy_machine_are_told_of_once(
    too_late, count, load, said, monkeypatch, caplog
):
    monkeypatch.setattr(threads, "TOO_LATE", too_late)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    threads.warn_if_spinning.cache_clear()
    for _ in range(2):
        threads.warn_if_spinning(count)
    threads.warn_if_spinning.cache_clear()
    assert [r for r in caplog.messages if "before torch" in r] == caplog.messages
    assert len(caplog.messages) == said
