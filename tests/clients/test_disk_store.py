"""DiskStore: files are whole or not there, whatever went wrong while they were written or since."""

import errno
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from fedntk.clients import DiskStore
from fedntk.clients.core.disk_store import data_digest
from fedntk.ntk import NotEnoughMemory

from .damage import WAYS, damaged

SHAPE = (4, 3)
ARRAYS = {"x": np.arange(3.0), "y": np.array(5, np.int64)}


@pytest.fixture
def store(tmp_path):
    """A folder with some arrays under ``small`` and one under ``large``."""
    store = DiskStore(tmp_path / "client", ["key", 1])
    store.save("small", **ARRAYS)
    with store.fill("large", SHAPE, "float16") as array:
        array[:] = 7
    return store


def again(store):
    """The store as the next message's client opens it."""
    return DiskStore(store.folder, ["key", 1])


def files(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_what_is_kept_comes_back_bit_for_bit_and_is_replaced_when_saved_again(store):
    """What was never kept, or has another shape, is missing."""
    found = again(store).load("small")
    kept = [(name, array.dtype, array.tobytes()) for name, array in found.items()]
    assert kept == [(name, array.dtype, array.tobytes()) for name, array in ARRAYS.items()]
    large = again(store).mapped("large", SHAPE)
    assert large.dtype == np.float16
    large += 1  # of the mapped array, not of the file
    assert (store.mapped("large", SHAPE) == 7).all()
    assert files(store) == ["key.json", "large.npy", "small.npz"]
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


# ---------------------------------------------------------------- whole or nothing


class Stopped(BaseException):
    """As an interrupt: no Exception."""


@pytest.mark.parametrize("before", [True, False])
def test_an_array_is_seen_once_it_is_filled_and_not_kept_otherwise(store, before):
    """Neither its half nor, where there was one, another in the place of the old."""
    name = "large" if before else "new"

    def seen():
        found = again(store).mapped(name, SHAPE)
        return (found == 7).all() if before else found is None and name not in store.names()

    def stop():
        with store.fill(name, SHAPE, "float16") as array:
            array[:2] = 1
            assert seen()
            raise Stopped

    with pytest.raises(Stopped):
        stop()
    assert seen()
    assert files(store) == ["key.json", "large.npy", "small.npz"]


@pytest.mark.parametrize("error", [Stopped(), OSError(28, "No space left on device")])
def test_a_save_that_is_broken_off_leaves_the_old_and_no_half(store, monkeypatch, error):
    """It has written some bytes when the disk is full, or when it is interrupted."""

    def broken(file, **arrays):
        file.write(b"PK half of it")
        raise error

    monkeypatch.setattr(np, "savez", broken)
    for name in ("small", "new"):
        with pytest.raises(type(error)):
            store.save(name, x=np.zeros(3))
    assert files(store) == ["key.json", "large.npy", "small.npz"]
    assert list(again(store).load("small")) == ["x", "y"]


# ------------------------------------------------------------------------- damage


@pytest.mark.parametrize("how", WAYS)
def test_damaged_files_count_as_missing_and_can_be_made_again(store, how):
    damaged(store.folder / "small.npz", how)
    damaged(store.folder / "large.npy", how)
    opened = again(store)
    assert (opened.load("small"), opened.mapped("large", SHAPE)) == ({}, None)
    assert files(store) == ["key.json"]
    opened.save("small", **ARRAYS)
    assert list(opened.load("small")) == ["x", "y"]


def test_no_cut_and_no_changed_byte_of_a_file_raises(store):
    """And of small arrays, which have checksums, none comes back changed: some may be missing.

    Among these are numpy's NotImplementedError, RuntimeError and TokenError.
    """
    for name, end, least in (("small.npz", None, 1000), ("large.npy", -24, 300)):
        path = store.folder / name
        content, missing = path.read_bytes(), 0

        def found(path=path):
            if path.suffix == ".npy":
                return store.mapped("large", SHAPE) is not None
            arrays = store.load("small")
            assert all(np.array_equal(arrays[k], ARRAYS[k]) for k in arrays.keys() & ARRAYS.keys())
            return bool(arrays)

        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert not found(), (name, length)
        for position, old in enumerate(content[:end]):  # the large array's last 24 are its numbers
            for new in {0, 65, old ^ 1, old ^ 128} - {old}:
                path.write_bytes(content[:position] + bytes([new]) + content[position + 1 :])
                missing += not found()
        assert missing > least


def test_a_file_that_cannot_be_read_for_now_is_kept(store, monkeypatch):
    """Too many files are open: what is lost with it could not be made again."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(np, "load", refused)
        for read in (lambda: store.load("small"), lambda: store.mapped("large", SHAPE)):
            with pytest.raises(OSError, match="not now"):
                read()
    assert store.names() == ["large", "small"]


@pytest.mark.parametrize("key", [b'["key", 2]', b"", b'["key"', b"\xff\xfe\x00"])
def test_another_or_a_damaged_key_empties_the_folder(store, key):
    """Bytes that are no UTF-8 among them: the client must not fail for ever."""
    (store.folder / "left.part").touch()
    assert again(store).names() == ["large", "small"]
    (store.folder / "key.json").write_bytes(key)
    assert files(again(store)) == ["key.json"]


# -------------------------------------------------------------- sizes, where, and of what


def test_what_does_not_fit_on_the_disk_is_refused_with_the_cure(tmp_path, monkeypatch):
    """4 x 3 numbers of 4 bytes are 48."""
    free = 47
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free))
    store = DiskStore(tmp_path, "key", cure="buy a disk")
    refused = pytest.raises(NotEnoughMemory, match=r"4 rows need 0\.0 GB.*; buy a disk")
    with refused, store.fill("large", SHAPE, "f4", what="4 rows"):
        pytest.fail("it has been made")
    assert files(store) == ["key.json"]
    free = 48
    with store.fill("large", SHAPE, "float32") as array:
        array[:] = 1
    assert (store.mapped("large", SHAPE) == 1).all()


def test_a_digest_is_of_values_shapes_and_dtypes():
    x = torch.arange(6.0)
    digest = data_digest(x, x)
    assert data_digest(x.clone(), torch.stack([x, x], 1)[:, 0]) == digest
    others = [(x,), (x, x + 1), (x, x.reshape(2, 3)), (x, x.view(torch.int32))]
    assert len({digest, *(data_digest(*other) for other in others)}) == 5
