"""Real data sets from their original files, a user's own arrays, and clear refusals."""

import gzip
import os
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torchvision
from PIL import Image
from sklearn.datasets import load_digits

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

from .data_files import write_mnist, write_parquet


def test_digits_are_scikit_learns_with_every_fifth_for_testing_standardised_by_the_others():
    data = load_data(Config(dataset="digits"))
    assert (data.num_classes, len(data.y_train) + len(data.y_test)) == (10, 1797)
    np.testing.assert_array_equal(data.x_test[:, 0], load_digits().images[::5])
    x, _ = data.train(np.arange(len(data.y_train)))
    assert abs(float(x.double().mean())) < 1e-6
    assert float(x.double().std(correction=0)) == pytest.approx(1, abs=1e-6)
    x_test, y_test = data.test()
    raw = (data.x_test - data.x_train.mean(dtype=float)) / data.x_train.std(dtype=float)
    np.testing.assert_allclose(x_test.numpy(), raw, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y_test.numpy(), data.y_test)


def test_original_gzip_files_are_unpacked_into_the_cache(shared_data):
    data = load_data(Config(dataset="fashion-mnist", data_dir=str(shared_data)))
    assert (len(data.x_train), data.x_test.shape) == (60_000, (10_000, 1, 28, 28))
    raw = shared_data / "FashionMNIST" / "raw"
    labels = gzip.decompress((raw / "t10k-labels-idx1-ubyte.gz").read_bytes())
    np.testing.assert_array_equal(data.y_test, np.frombuffer(labels, np.uint8, offset=8))
    pixels = gzip.decompress((raw / "t10k-images-idx3-ubyte.gz").read_bytes())
    np.testing.assert_array_equal(data.x_test.ravel(), np.frombuffer(pixels, np.uint8, offset=16))


def test_unpacked_files_are_read_as_torchvision_reads_them(tmp_path, monkeypatch):
    """And without importing it, which takes as long as importing torch."""
    write_mnist(tmp_path, 3, 1, (5, 4))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        data = load_data(Config(dataset="mnist", data_dir=str(tmp_path)))
    for train, x, y in ((True, data.x_train, data.y_train), (False, data.x_test, data.y_test)):
        theirs = torchvision.datasets.MNIST(str(tmp_path), train=train)
        np.testing.assert_array_equal(x[:, 0], theirs.data.numpy())
        np.testing.assert_array_equal(y, theirs.targets.numpy())
    assert data.num_classes == len(theirs.classes)


def test_a_damaged_or_missing_file_is_refused_in_one_line(tmp_path, monkeypatch):
    """A cut npz, MNIST's pictures with another header or dimension, and none of them."""
    whole = Path(_npz(tmp_path / "own.npz").removeprefix("npz:")).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[:300])
    mnist = {"dataset": "mnist", "data_dir": str(tmp_path)}
    file = write_mnist(tmp_path, 1, 1) / "MNIST" / "raw" / "train-images-idx3-ubyte"
    raw = file.read_bytes()

    def refused(message: str, **options: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load_data(Config(**options))
        assert "\n" not in str(caught.value)

    refused("half.npz", dataset=f"npz:{tmp_path}/half.npz")
    refused("no file at /nowhere", dataset="npz:/nowhere.npz")
    refused("digits-five:<folder>, femnist:<folder>, hf:<name or fol", dataset="emnist")
    for damaged in (raw[:-1], b"1" + raw[1:]):
        file.write_bytes(damaged)
        refused("dataset = mnist: cannot be read: ValueError", **mnist)
    file.write_bytes(raw[:7] + b"\x02" + raw[8 : 16 + 2 * 784])
    refused("examples and one label each", **mnist)
    file.unlink()

    def no_network(*_: object, **__: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", no_network)
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


def test_real_files_in_hugging_faces_form_with_private_test_data(shared_data):
    """The split of Huang et al. 2024; clients' test examples are of the classes they train on."""
    config = Config(
        dataset=f"hf:{shared_data / 'CIFAR10-jpeg'}", num_clients=10, private_test=True,
        partition="pathological", classes_per_client=8,
    )  # fmt: skip
    data, split = load_data(config), load_split(config)
    assert (data.x_train.shape, len(data.x_test)) == ((10_000, 3, 32, 32), 2_000)
    held, tested = (
        np.stack([np.bincount(y[own], minlength=10) for own in parts])
        for y, parts in ((data.y_train, split.clients), (data.y_test, split.tests))
    )
    assert held.sum(0).tolist() == [1000] * 10
    assert ((held > 0).sum(1) == 8).all()
    assert np.all(np.abs(tested - 200 * held / held.sum(0)) < 1)
    assert not tested[held == 0].any()


def test_hugging_face_columns_by_name_and_natural_ids(tmp_path):
    kinds = {"digit": datasets.Value("int64"), "writer": datasets.Value("string")}
    for part, n in (("train", 6), ("test", 2)):
        write_parquet(
            tmp_path, part, {"picture": datasets.Image(), **kinds},
            picture=[Image.fromarray(np.full((8, 8), i, np.uint8)) for i in range(n)],
            digit=[i % 3 for i in range(n)], writer=list("aabbcc")[:n],
        )  # fmt: skip
    name = f"hf:{tmp_path}"
    data = load_data(Config(dataset=name, label_column="digit", natural_column="writer"))
    assert data.x_train[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.num_classes == 3
    assert data.natural_ids.tolist() == list("aabbcc")
    assert data.natural_ids_test.tolist() == list("aa")
    for options, message in (
        ({}, "label-column: .* has the columns picture, digit, writer, got 'label'"),
        ({"label_column": "digit", "image_column": "img"}, "image-column: .* got 'img'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_data(Config(dataset=name, **options))


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
        ({"y_test": None}, "must hold x_train, y_train, x_test and y_test"),
        ({"y_train": np.arange(5) % 3}, "expected examples and one label each"),
        ({"y_train": np.arange(6) - 1}, r"expected labels 0 ... 4, got -1 ... 4"),
        ({"y_train": np.arange(6) / 2}, "train set in .*expected whole numbers as labels, got flo"),
        ({"x_test": np.ones((2, 5))}, "expected examples of shape"),
        ({"x_train": np.full((6, 4), np.nan)}, "train set in .*expected finite numbers"),
        ({"x_test": np.ones((0, 4)), "y_test": np.arange(0)}, "test set: expected examples"),
        ({"x_train": np.arange(6.0)}, r"expected numbers of shape \(n, ...\), got float64"),
        ({"y_test": np.array([0, 10**9])}, "labels up to 1000000000 and 6 training examples"),
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
