"""Real data sets from their original files, a user's own arrays, and clear refusals."""

import gzip
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torchvision
from PIL import Image
from sklearn.datasets import load_digits

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import load_data

from .data_files import write_mnist, write_parquet


def test_digits_are_scikit_learns_with_every_fifth_for_testing_standardised_by_the_others():
    data, digits = load_data(Config(dataset="digits")), load_digits()
    assert (data.num_classes, len(data.y_train) + len(data.y_test)) == (10, 1797)
    test, images = np.arange(1797) % 5 == 0, digits.images
    mean, std = images[~test].mean(), images[~test].std()
    for (x, y), own in ((data.train(np.arange(1437)), ~test), (data.test(), test)):
        np.testing.assert_allclose(x[:, 0], (images[own] - mean) / std, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(y, digits.target[own])


@pytest.mark.parametrize("packed", [False, True])
def test_original_files_are_read_as_torchvision_reads_them(tmp_path, monkeypatch, packed):
    """And without importing it, which takes as long as importing torch."""
    raw = write_mnist(tmp_path, 3, 1, (5, 4)) / "MNIST" / "raw"
    expected = [torchvision.datasets.MNIST(str(tmp_path), train=own) for own in (True, False)]
    for path in list(raw.iterdir()) if packed else []:
        (raw / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        data = load_data(Config(dataset="mnist", data_dir=str(tmp_path)))
    for theirs, part in zip(expected, ("train", "test"), strict=True):
        np.testing.assert_array_equal(getattr(data, f"x_{part}")[:, 0], theirs.data.numpy())
        np.testing.assert_array_equal(getattr(data, f"y_{part}"), theirs.targets.numpy())
    assert data.num_classes == len(theirs.classes)


def test_a_damaged_or_missing_file_is_refused_in_one_line(tmp_path, monkeypatch):
    """A cut npz, MNIST's pictures with another header or dimension, and none of them."""
    mnist = {"dataset": "mnist", "data_dir": str(tmp_path)}
    file = write_mnist(tmp_path, 1, 1) / "MNIST" / "raw" / "train-images-idx3-ubyte"
    raw = file.read_bytes()
    whole = Path(_npz(tmp_path / "own.npz").removeprefix("npz:")).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[:300])

    def refused(message: str, **options: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load_data(Config(**options))
        assert "\n" not in str(caught.value)

    refused("half.npz", dataset=f"npz:{tmp_path}/half.npz")
    refused("no file or folder at /nowhere", dataset="npz:/nowhere.npz")
    refused("or your own: csv:<file>", dataset="emnist")
    for damaged in (raw[:-1], b"1" + raw[1:]):
        file.write_bytes(damaged)
        refused("dataset = mnist: cannot be read: ValueError", **mnist)
    file.write_bytes(raw[:7] + b"\x02" + raw[8 : 16 + 2 * 784])
    refused("examples and one label each", **mnist)
    file.unlink()
    failing = Mock(side_effect=RuntimeError("no route to host"))
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", failing)
    refused(r"MNIST is not in .*no route to host.*set data-dir", **mnist)


def test_coloured_pictures_of_torchvision_get_their_channels_first(tmp_path, monkeypatch):
    """With 3 + 2 pictures in a class of torchvision's form."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)

    class Small:
        def __init__(self, *, root: str, train: bool, download: bool) -> None:
            assert (root, download) == (str(tmp_path), True)  # nothing is loaded that is there
            self.classes = range(10)
            self.data, self.targets = (pixels[:3], [0, 9, 3]) if train else (pixels[3:], [1, 2])

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Small)
    data = load_data(Config(dataset="cifar10", data_dir=str(tmp_path)))
    np.testing.assert_array_equal(data.x_train, pixels[:3].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.x_test, pixels[3:].transpose(0, 3, 1, 2))
    assert (data.y_train.tolist(), data.num_classes) == ([0, 9, 3], 10)


def test_hugging_face_columns_by_name_and_natural_ids(tmp_path):
    kinds = {"digit": datasets.Value("int64"), "writer": datasets.Value("string")}
    for part, n in (("train", 6), ("test", 2)):
        write_parquet(
            tmp_path, part, {"picture": datasets.Image(), **kinds},
            picture=[Image.new("RGB", (8, 9), (i, 7, 7)) for i in range(n)],
            digit=[i % 3 for i in range(n)], writer=list("aabbcc")[:n],
        )  # fmt: skip
    name = f"hf:{tmp_path}"
    own = {"client_column": "writer", "partition": "natural"}
    data = load_data(Config(dataset=name, target="digit", **own))
    assert (data.x_train.shape, data.num_classes) == ((6, 3, 9, 8), 3)
    assert data.x_train[:, 0, 0, 0].tolist() == data.x_train[:, 0, 8, 7].tolist() == [*range(6)]
    assert data.natural_ids.tolist() == list("aabbcc")
    assert data.natural_ids_test.tolist() == list("aa")
    message = "target: .* has the columns picture, digit, writer, got 'label'"
    with pytest.raises(ConfigError, match=message):
        load_data(Config(dataset=name))


def _npz(path: Path, **changes: np.ndarray) -> str:
    arrays = {
        "x_train": np.arange(24.0).reshape(6, 4),
        "y_train": np.arange(6) % 3,
        "x_test": np.ones((2, 4)),
        "y_test": np.array([0, 2]),
    }
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return f"npz:{path}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "must hold both x_test and y_test, or neither"),
        ({"y_train": None}, "must hold x_train and y_train; it lacks y_train and has x_train, x_"),
        ({"y_train": np.arange(6) / 2}, "expected whole numbers or words as labels, got float64"),
        ({"x_test": np.ones((2, 5))}, "expected examples of shape"),
        ({"x_train": np.full((6, 4), np.nan)}, "train set: expected finite numbers"),
        (
            {"y_test": np.array([0, 10**9])},
            "test set: no training example has the labels 1000000000",
        ),
    ],
)
def test_own_arrays_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_data(Config(dataset=_npz(tmp_path / "own.npz", **changes)))


def test_own_arrays_are_read_again_when_the_file_has_changed(tmp_path):
    config = Config(dataset=_npz(tmp_path / "own.npz"))
    first = load_data(config)
    assert (first.input_shape, first.num_classes) == ((4,), 3)
    assert load_data(config) is first
    _npz(tmp_path / "own.npz", x_test=np.zeros((2, 4)))
    os.utime(tmp_path / "own.npz", (1, 1))
    assert first.x_test.any()
    assert not load_data(config).x_test.any()
