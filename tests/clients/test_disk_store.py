"""DiskStore: files are whole or not there, whatever went wrong while they were written or since."""

import contextlib
import errno
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fedntk.clients import DiskStore
from fedntk.clients.core.disk_store import data_digest
from fedntk.ntk import NotEnoughMemory

from ..conftest import refused

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
    found = again(store).load("small")
    kept = [(name, array.dtype, array.tobytes()) for name, array in found.items()]
    assert kept == [(name, array.dtype, array.tobytes()) for name, array in ARRAYS.items()]
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
    for name, found, end, least in (
        ("small.npz", small, None, 500),
        ("large.npy", large, -24, 150),
    ):
        path = store.folder / name
        content, missing = path.read_bytes(), 0
        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert not found(), (name, length)
            assert not path.exists()
        for position, old in enumerate(content[:end]):
            for new in {0, 65} - {old}:
                path.write_bytes(content[:position] + bytes([new]) + content[position + 1 :])
                missing += not found()
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
