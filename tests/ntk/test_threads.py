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


@pytest.fixture
def late(monkeypatch):
    """Torch was loaded first, on 8 cores that are busy; idle teams are counted, not made."""
    made = []
    monkeypatch.setattr(threads, "TOO_LATE", True)
    monkeypatch.setattr(threads, "_cores", lambda: 8)
    monkeypatch.setattr(threads, "_has_gnu_openmp", lambda: True)
    monkeypatch.setattr(threads, "_keep_idle_team", made.append)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    threads.stop_spinning.cache_clear()
    yield made
    threads.stop_spinning.cache_clear()


@pytest.mark.parametrize(
    ("count", "teams"), [(1, 0), (16, 0), (9, 0), (8, 1), (5, 1), (4, 2), (3, 3)]
)
def test_idle_teams_make_more_threads_than_cores(count, teams, late):
    """The first team has the main thread in it, and each other one a thread of its own.

    OpenMP counts 1 + (teams + 1) (count - 1) threads: more than 8, and not with a team less.
    """
    for _ in range(2):  # the second call adds none
        threads.stop_spinning(count)
    assert len(late) == teams
    if teams:
        assert 1 + teams * (count - 1) <= 8 < 1 + (teams + 1) * (count - 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, 1),
        ({"TOO_LATE": False}, 0),
        ({"load": 0.0}, 0),
    ],
)
def test_what_cannot_be_mended_is_said_once_on_a_busy_machine(
    change, said, late, monkeypatch, caplog
):
    monkeypatch.setattr(threads, "_has_gnu_openmp", lambda: False)
    if "load" in change:
        monkeypatch.setattr(os, "getloadavg", lambda: (change["load"],) * 3)
    else:
        for name, value in change.items():
            monkeypatch.setattr(threads, name, value)
    for _ in range(2):
        threads.stop_spinning(8)
    assert not late
    assert len(caplog.messages) == said
    assert all("before torch" in message for message in caplog.messages)


@pytest.mark.skipif(threads._cores() < 2, reason="one core: nothing waits")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by Linux")
def test_an_idle_team_is_as_large_as_torchs_and_computes_nothing_else():
    code = (
        "import os, json, torch; from fedntk.ntk.support.threads import stop_spinning; "
        "torch.zeros(2**23).add_(1); count = lambda: len(os.listdir('/proc/self/task')); "
        "before, threads = count(), torch.get_num_threads(); stop_spinning(threads); "
        "print(json.dumps([count() - before, threads, torch.get_num_threads()]))"
    )
    cores = threads._cores()
    more, before, after = in_new_process(code, OMP_NUM_THREADS=str(cores))
    assert (more, before, after) == (cores, cores, cores)
