"""What stays with a client: whole or not there, whatever went wrong, and not without end."""

import contextlib
import errno
import os
import shutil
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fedntk.clients import DiskStore, cache_dir
from fedntk.clients.core import disk_store
from fedntk.clients.core.disk_store import PersonalStore, data_digest
from fedntk.ntk import NotEnoughMemory

from ..conftest import refused
from ..strategies.federation import bits

SHAPE = (4, 3)
ARRAYS = {"x": np.arange(3.0), "y": np.array(5, np.int64)}
FILES = ["key.json", "large.npy", "small.npz"]


@pytest.fixture
def store(tmp_path):
    store = DiskStore(tmp_path / "client", ["key", 1])
    store.save("small", **ARRAYS)
    with store.fill("large", SHAPE, "float16", what="") as array:
        array[:] = 7
    return store


def again(store):
    """The store as the next message's client opens it."""
    return DiskStore(store.folder, ["key", 1])


def files(store):
    return sorted(path.name for path in store.folder.iterdir())


def assert_untouched(store):
    assert files(store) == FILES
    assert list(again(store).load("small")) == ["x", "y"]
    assert (again(store).mapped("large", SHAPE) == 7).all()


def test_what_is_kept_comes_back_bit_for_bit_and_is_replaced_when_saved_again(store):
    """What was never kept, or has another shape, is missing."""
    assert list(again(store).load("small")) == list(ARRAYS)
    assert bits(again(store).load("small")) == bits(ARRAYS)
    large = again(store).mapped("large", SHAPE)
    assert large.dtype == np.float16
    large += 1  # of the mapped array, not of the file
    assert_untouched(store)
    assert store.load("other") == {}
    assert store.mapped("other", SHAPE) is store.mapped("large", (3, 4)) is None
    store.save("small", z=np.ones(1))
    assert list(again(store).load("small")) == ["z"]


def test_names_and_removal_by_pattern(store):
    for number in (2, 10, 1):
        store.save(f"state-{number:06}", a=np.zeros(1))
    (store.folder / "left.part").touch()
    assert store.names() == ["large", "small", "state-000001", "state-000002", "state-000010"]
    store.remove(pattern="state-*.npz", all_but=["state-000002"])
    assert store.names() == ["large", "small", "state-000002"]
    store.remove(all_but=["small"])
    assert files(store) == ["key.json", "small.npz"]


@pytest.mark.parametrize("name", ["large", "small", "new"])
def test_what_is_broken_off_leaves_the_old_and_no_half(store, monkeypatch, name):
    """An array is seen once it is filled; smaller ones once all are saved."""

    def save(file, **arrays):
        file.write(b"PK half of it")
        raise OSError(28, "No space left on device")

    with (
        contextlib.suppress(KeyboardInterrupt),
        store.fill(name, SHAPE, "float16", what="") as array,
    ):
        array[:2] = 1
        assert (again(store).mapped("large", SHAPE) == 7).all()
        assert again(store).names() == ["large", "small"]
        raise KeyboardInterrupt
    monkeypatch.setattr(np, "savez", save)
    refused("No space", store.save, name, x=np.zeros(3), error=OSError)
    assert_untouched(store)


def test_no_cut_and_no_changed_byte_of_a_file_raises(store):
    """The file counts as missing, and is removed. Small arrays, which have checksums, come back
    as they were, or not at all. Among numpy's errors are NotImplementedError and TokenError.
    """

    def small():
        arrays = store.load("small")
        assert all(np.array_equal(array, ARRAYS[k]) for k, array in arrays.items() if k in ARRAYS)
        return arrays

    def large():
        return store.mapped("large", SHAPE) is not None

    # the large array's last 24 bytes are its numbers
    for name, read_back, end, least in (
        ("small.npz", small, None, 500),
        ("large.npy", large, -24, 150),
    ):
        path = store.folder / name
        content, missing = path.read_bytes(), 0
        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert not read_back(), (name, length)
            assert not path.exists()
        for position, old in enumerate(content[:end]):
            for new in {0, 65} - {old}:
                path.write_bytes(content[:position] + bytes([new]) + content[position + 1 :])
                missing += not read_back()
        assert missing > least


def test_a_file_that_cannot_be_read_for_now_is_kept(store, monkeypatch):
    """Too many files are open: what is lost with it could not be made again."""
    with monkeypatch.context() as patch:
        fails = Mock(side_effect=OSError(errno.EMFILE, "not now"))
        patch.setattr(np, "load", fails)
        patch.setattr("zipfile.ZipFile", fails)
        for read in (lambda: store.load("small"), lambda: store.mapped("large", SHAPE)):
            refused("not now", read, error=OSError)
    assert_untouched(store)


@pytest.mark.parametrize("key", [b'["key", 2]', b"", b"\xff\xfe\x00"])
def test_another_or_a_damaged_key_empties_the_folder(store, key):
    (store.folder / "left.part").touch()
    assert again(store).names() == ["large", "small"]
    (store.folder / "key.json").write_bytes(key)
    assert files(again(store)) == ["key.json"]


def test_what_does_not_fit_on_the_disk_is_refused_with_the_cure(tmp_path, monkeypatch):
    """4 x 3 numbers of 4 bytes are 48."""
    monkeypatch.setattr(shutil, "disk_usage", usage := Mock(return_value=Mock(free=47)))
    store = DiskStore(tmp_path, "key", cure="buy a disk")
    refused = pytest.raises(NotEnoughMemory, match=r"4 rows need 0\.0 GB.*; buy a disk")
    with refused, store.fill("large", SHAPE, "f4", what="4 rows"):
        pytest.fail("it has been made")
    assert files(store) == ["key.json"]
    usage.return_value.free = 48
    with store.fill("large", SHAPE, "f4", what="4 rows") as array:
        array[:] = 1
    assert (store.mapped("large", SHAPE) == 1).all()


def test_a_digest_is_of_values_shapes_and_dtypes():
    x = torch.arange(6.0)
    digest = data_digest(x, x)
    assert data_digest(x.clone(), torch.stack([x, x], 1)[:, 0]) == digest
    others = [(x,), (x, x + 1), (x, x.reshape(2, 3)), (x, x.view(torch.int32))]
    assert len({digest, *(data_digest(*other) for other in others)}) == 5


# ------------------------------------------------------------------ PersonalStore

PERSONAL = {
    "0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "0.counter": np.array(7),
    "file": np.zeros(0, np.float64),  # as an argument of numpy's own is called
}


def store_of(cache, run="a", client="3"):
    return PersonalStore(cache, {"personal-run": run, "client-id": client})


def rounds(store):
    return sorted(int(path.stem.removeprefix("round-")) for path in store.folder.glob("round-*"))


@pytest.fixture
def personal(tmp_path):
    return store_of(tmp_path)


def test_a_round_is_read_as_it_was_written_and_any_other_is_missing(personal):
    assert personal.load(1) is None
    assert not personal.folder.exists()  # nothing is made by looking
    personal.save(5, PERSONAL)
    loaded = store_of(personal.folder.parents[1]).load(5)  # by another process
    assert list(loaded) == list(PERSONAL)
    assert [a.shape for a in loaded.values()] == [a.shape for a in PERSONAL.values()]
    assert bits(loaded) == bits(PERSONAL)
    assert personal.load(2) is None


def test_a_round_that_is_run_again_removes_those_after_it(personal):
    """A run went on from a checkpoint of round 2: what was kept of 3 and 4 is of no run."""
    for number in (1, 2, 3, 4, 3):
        personal.save(number, PERSONAL)
    assert rounds(personal) == [1, 2, 3]


@pytest.mark.parametrize(("numbers", "left"), [(1, 20), (25, 10), (150, 2)])
def test_the_newest_rounds_are_kept_as_far_as_they_are_small(personal, monkeypatch, numbers, left):
    """1,000 bytes in all: of 4-byte numbers, 20 rounds of 1, 10 of 25; two of any size."""
    monkeypatch.setattr(disk_store, "KEPT_BYTES", 1000)
    for number in range(1, 31):
        personal.save(number, {"w": np.zeros(numbers, np.float32)})
    assert rounds(personal) == list(range(31 - left, 31))


def test_the_round_that_is_gone_on_from_stays_however_old_it_is(personal, monkeypatch):
    """Replies of rounds 3 to 9 were refused: what was kept of round 2 is still the client's."""
    monkeypatch.setattr(disk_store, "KEPT_BYTES", 0)
    for number in range(1, 10):
        personal.save(number, PERSONAL, needed=min(number - 1, 2))
    assert rounds(personal) == [2, 8, 9]
    personal.save(10, PERSONAL, needed=9)
    assert rounds(personal) == [9, 10]


def test_folders_of_other_runs_go_when_nobody_has_used_them_for_a_day(tmp_path):
    names = [("a", "3"), ("b", "3"), ("c", "4"), ("d", "33")]
    old, recent, others, alike = stores = [store_of(tmp_path, *name) for name in names]
    for store in stores:
        store.save(1, PERSONAL)
    then = time.time() - 25 * 3600
    for store in (old, others, alike):
        os.utime(store.folder / "key.json", (then, then))
    store_of(tmp_path, "d").save(1, PERSONAL)
    there = [store.folder.exists() for store in (old, recent, others, alike)]
    assert there == [False, True, True, True]  # the last two are other clients'
    assert store_of(None).folder.parents[1] == cache_dir() / "personal"
