"""What stays with a client: by round, whole or missing, and not without end."""

import os
import time

import numpy as np
import pytest

from fedntk.clients import cache_dir
from fedntk.clients.core import disk_store
from fedntk.clients.core.disk_store import PersonalStore

from ..strategies.federation import bits

ARRAYS = {
    "0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "0.counter": np.array(7),
    "file": np.zeros(0, np.float64),  # as an argument of numpy's own is called
}


def store_of(cache, run="a", client="3"):
    return PersonalStore(cache, {"personal-run": run, "client-id": client})


def rounds(store):
    return sorted(int(path.stem.removeprefix("round-")) for path in store.folder.glob("round-*"))


@pytest.fixture
def store(tmp_path):
    return store_of(tmp_path)


def test_a_round_is_read_as_it_was_written_and_any_other_is_missing(store):
    assert store.load(1) is None
    assert not store.folder.exists()  # nothing is made by looking
    store.save(5, ARRAYS)
    kept = store_of(store.folder.parents[1]).load(5)  # by another process
    assert list(kept) == list(ARRAYS)
    assert [a.shape for a in kept.values()] == [a.shape for a in ARRAYS.values()]
    assert bits(kept) == bits(ARRAYS)
    assert store.load(2) is None


def test_a_round_that_is_run_again_removes_those_after_it(store):
    """A run went on from a checkpoint of round 2: what was kept of 3 and 4 is of no run."""
    for number in (1, 2, 3, 4, 3):
        store.save(number, ARRAYS)
    assert rounds(store) == [1, 2, 3]


@pytest.mark.parametrize(("numbers", "left"), [(1, 20), (25, 10), (150, 2)])
def test_the_newest_rounds_are_kept_as_far_as_they_are_small(store, monkeypatch, numbers, left):
    """1,000 bytes in all: of 4-byte numbers, 20 rounds of 1, 10 of 25; two of any size."""
    monkeypatch.setattr(disk_store, "KEPT_BYTES", 1000)
    for number in range(1, 31):
        store.save(number, {"w": np.zeros(numbers, np.float32)})
    assert rounds(store) == list(range(31 - left, 31))


def test_the_round_that_is_gone_on_from_stays_however_old_it_is(store, monkeypatch):
    """Replies of rounds 3 to 9 were refused: what was kept of round 2 is still the client's."""
    monkeypatch.setattr(disk_store, "KEPT_BYTES", 0)
    for number in range(1, 10):
        store.save(number, ARRAYS, needed=min(number - 1, 2))
    assert rounds(store) == [2, 8, 9]
    store.save(10, ARRAYS, needed=9)
    assert rounds(store) == [9, 10]


def test_folders_of_other_runs_go_when_nobody_has_used_them_for_a_day(tmp_path):
    names = [("a", "3"), ("b", "3"), ("c", "4"), ("d", "33")]
    old, recent, others, alike = (store_of(tmp_path, *own) for own in names)
    for store in (old, recent, others, alike):
        store.save(1, ARRAYS)
    then = time.time() - 25 * 3600
    for store in (old, others, alike):
        os.utime(store.folder / "key.json", (then, then))
    store_of(tmp_path, "d").save(1, ARRAYS)
    there = [store.folder.exists() for store in (old, recent, others, alike)]
    assert there == [False, True, True, True]  # the last two are other clients'
    assert store_of(None).folder.parents[1] == cache_dir() / "personal"
