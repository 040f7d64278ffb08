"""DiskStore: files are whole or not there, whatever went wrong while they were written or since."""

import errno
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from fedntk.clients import DiskStore, cache_dir
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


def again(store, key=("key", 1)):
    """The store as the next message's client opens it."""
    return DiskStore(store.folder, list(key))


def files(store):
    return sorted(path.name for path in store.folder.iterdir())


# ------------------------------------------------------------------- what is kept


def test_what_is_kept_comes_back_bit_for_bit(store):
    found = again(store).load("small")
    assert list(found) == ["x", "y"]
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].tobytes()) == (array.dtype, array.tobytes())
    large = again(store).mapped("large", SHAPE)
    assert large.dtype == np.float16
    assert (large == 7).all()
    assert files(store) == ["key.json", "large.npy", "small.npz"]


def test_what_was_never_kept_or_has_another_shape_is_missing_and_saving_again_replaces(store):
    assert store.load("other") == {}
    assert store.mapped("other", SHAPE) is None
    assert store.mapped("large", (3, 4)) is None
    assert store.mapped("large", SHAPE) is not None
    store.save("small", z=np.ones(1))
    assert list(again(store).load("small")) == ["z"]


def test_writing_to_a_mapped_array_does_not_change_the_file(store):
    store.mapped("large", SHAPE)[:] = 8
    assert (store.mapped("large", SHAPE) == 7).all()


def test_names_and_removal_by_pattern(store):
    for number in (2, 10, 1):
        store.save(f"state-{number:06}", a=np.zeros(1))
    (store.folder / "left.part").touch()
    assert store.names() == ["large", "small", "state-000001", "state-000002", "state-000010"]
    assert store.names("state-*.npz") == ["state-000001", "state-000002", "state-000010"]
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


def test_halves_that_a_killed_process_left_are_not_read_and_are_replaced(store):
    """Files are written under another name first."""
    for name in ("large", "small", "new"):
        (store.folder / f"{name}.part").write_bytes(b"half")
    opened = again(store)
    assert (opened.mapped("large", SHAPE) == 7).all()
    assert list(opened.load("small")) == ["x", "y"]
    assert opened.mapped("new", SHAPE) is None
    assert opened.load("new") == {}
    opened.save("small", x=np.ones(2))
    with opened.fill("large", SHAPE, "float16") as array:
        array[:] = 9
    assert (opened.load("small")["x"] == 1).all()
    assert (opened.mapped("large", SHAPE) == 9).all()
    opened.remove()
    assert files(store) == ["key.json"]


# ------------------------------------------------------------------------- damage


@pytest.mark.parametrize("how", WAYS)
def test_damaged_files_count_as_missing_and_can_be_made_again(store, how):
    damaged(store.folder / "small.npz", how)
    damaged(store.folder / "large.npy", how)
    opened = again(store)
    assert opened.load("small") == {}
    assert opened.mapped("large", SHAPE) is None
    assert files(store) == ["key.json"]
    opened.save("small", **ARRAYS)
    assert list(opened.load("small")) == ["x", "y"]


def test_a_file_cut_off_at_any_byte_counts_as_missing(store):
    for name, read in (
        ("small.npz", lambda: store.load("small") or None),
        ("large.npy", lambda: store.mapped("large", SHAPE)),
    ):
        path = store.folder / name
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert read() is None, (name, length)
        path.write_bytes(content)
        assert read() is not None


def test_no_changed_byte_of_a_file_raises(store):
    """And of small arrays, which have checksums, none comes back changed: some may be missing.

    Among these are numpy's NotImplementedError, RuntimeError and TokenError.
    """
    path = store.folder / "small.npz"
    content = path.read_bytes()
    missing = 0
    for position, old in enumerate(content):
        for new in {0, 65, old ^ 1, old ^ 128} - {old}:
            path.write_bytes(content[:position] + bytes([new]) + content[position + 1 :])
            found = store.load("small")
            assert all(np.array_equal(found[k], ARRAYS[k]) for k in found.keys() & ARRAYS.keys())
            missing += not found
    assert missing > 1000
    path = store.folder / "large.npy"
    content = path.read_bytes()
    missing = 0
    for position, old in enumerate(content[:-24]):  # the rest is its numbers
        for new in {0, 65, old ^ 1, old ^ 128} - {old}:
            path.write_bytes(content[:position] + bytes([new]) + content[position + 1 :])
            missing += store.mapped("large", SHAPE) is None
    assert missing > 300


# ---------------------------------------------------------------------------- keys


def test_another_key_empties_the_folder(store):
    (store.folder / "left.part").touch()
    assert again(store).names() == ["large", "small"]
    other = again(store, ("key", 2))
    assert files(other) == ["key.json"]
    assert other.load("small") == {}
    assert files(again(store)) == ["key.json"]  # it is gone under its own key, too


@pytest.mark.parametrize("content", [None, b"", b'["key"', b"\xff\xfe\x00", b"[]"])
def test_a_damaged_key_empties_the_folder(store, content):
    """Bytes that are no UTF-8 among them: the client must not fail for ever."""
    path = store.folder / "key.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert files(again(store)) == ["key.json"]
    again(store).save("small", **ARRAYS)
    assert again(store).names() == ["small"]


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({}, r"large of shape \(4, 3\) need 0\.0 GB.*; buy a disk"),
        ({"what": "4 rows"}, "4 rows need"),
    ],
)
def test_what_does_not_fit_on_the_disk_is_refused_with_the_cure(
    tmp_path, monkeypatch, what, message
):
    """4 x 3 numbers of 4 bytes are 48."""
    free = 47
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free))
    store = DiskStore(tmp_path, "key", cure="buy a disk")
    with pytest.raises(NotEnoughMemory, match=message), store.fill("large", SHAPE, "f4", **what):
        pytest.fail("it has been made")
    assert files(store) == ["key.json"]
    free = 48
    with store.fill("large", SHAPE, "float32") as array:
        array[:] = 1
    assert (store.mapped("large", SHAPE) == 1).all()


# -------------------------------------------------------------- where, and of what


def test_the_cache_is_where_the_system_keeps_such_things(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fedntk"
    for unset in (lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""),
                  lambda: monkeypatch.delenv("XDG_CACHE_HOME")):  # fmt: skip
        unset()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_dir() == tmp_path / "home" / ".cache" / "fedntk"


def test_a_digest_is_of_values_shapes_and_dtypes():
    x = torch.arange(6.0)
    digest = data_digest(x, x)
    assert data_digest(x.clone(), torch.stack([x, x], 1)[:, 0]) == digest
    others = [(x,), (x, x + 1), (x, x.reshape(2, 3)), (x, x.view(torch.int32))]
    assert len({digest, *(data_digest(*other) for other in others)}) == 5


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_read_for_now_is_kept(store, monkeypatch, number):
    """Too many open files, or no permission: what is lost with it could not be made again."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(np, "load", refused)
        for read in (lambda: store.load("small"), lambda: store.mapped("large", SHAPE)):
            with pytest.raises(OSError, match="not now"):
                read()
    assert store.names() == ["large", "small"]
