"""Real data sets from their original files, a user's own arrays, and clear refusals."""

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import load_data


def test_digits_are_scikit_learns_with_every_fifth_for_testing():
    from sklearn.datasets import load_digits

    data, raw = load_data(Config(dataset="digits")), load_digits()
    assert (data.input_shape, data.num_classes) == ((1, 8, 8), 10)
    np.testing.assert_array_equal(data.x_test[:, 0], raw.images[::5])
    assert len(data.y_train) + len(data.y_test) == 1797


def test_training_set_is_standardised_and_the_test_set_by_the_same_numbers():
    data = load_data(Config(dataset="digits"))
    x, _ = data.train(np.arange(len(data.y_train)))
    assert abs(float(x.double().mean())) < 1e-6
    assert float(x.double().std(correction=0)) == pytest.approx(1, abs=1e-6)
    x_test, y_test = data.test()
    raw = (data.x_test - data.x_train.mean(dtype=float)) / data.x_train.std(dtype=float)
    np.testing.assert_allclose(x_test.numpy(), raw, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y_test.numpy(), data.y_test)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_original_gzip_files_are_unpacked_into_the_cache(name, shared_data):
    folder = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[name]
    data = load_data(Config(dataset=name, data_dir=str(shared_data)))
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    with gzip.open(shared_data / folder / "raw" / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    np.testing.assert_array_equal(data.y_test, labels)
    with gzip.open(shared_data / folder / "raw" / "t10k-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    np.testing.assert_array_equal(data.x_test[:, 0], pixels)


def test_unpacked_files_are_read_as_torchvision_reads_them(tmp_path):
    """And without importing it, which takes as long as importing torch."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, count in (("train", 7), ("t10k", 3)):
        pixels = generator.integers(0, 256, (count, 5, 4), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    data = load_data(Config(dataset="mnist", data_dir=str(tmp_path)))
    for train, x, y in ((True, data.x_train, data.y_train), (False, data.x_test, data.y_test)):
        theirs = torchvision.datasets.MNIST(str(tmp_path), train=train)
        np.testing.assert_array_equal(x[:, 0], theirs.data.numpy())
        np.testing.assert_array_equal(y, theirs.targets.numpy())
        assert (x.dtype, y.dtype) == (np.uint8, np.int64)
    assert data.num_classes == len(theirs.classes)
    code = (
        "import sys; from fedntk.simulations.data.load import load_data; "
        "from fedntk.simulations import Config; "
        f"load_data(Config(dataset='mnist', data_dir={str(tmp_path)!r})); "
        "assert 'torchvision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"1" + raw[1:]])
def test_a_damaged_file_of_pictures_is_refused(damage, tmp_path, shared_data):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (shared_data / "MNIST" / "raw").glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match="dataset = mnist: cannot be read: ValueError"):
        load_data(Config(dataset="mnist", data_dir=str(tmp_path)))


def _cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """CIFAR-10's layout with 3 + 2 pictures; torchvision's checksums made to match."""
    import hashlib

    root = folder / "cifar-10-batches-py"
    root.mkdir()
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    contents = {
        "data_batch_1": {"data": pixels[:3].reshape(3, -1), "labels": [0, 9, 3]},
        "test_batch": {"data": pixels[3:].reshape(2, -1), "labels": [1, 2]},
        "batches.meta": {"label_names": [str(i) for i in range(10)]},
    }
    sums = {}
    for name, content in contents.items():
        (root / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((root / name).read_bytes()).hexdigest()  # noqa: S324
    kind = torchvision.datasets.CIFAR10
    monkeypatch.setattr(kind, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(kind, "test_list", [["test_batch", sums["test_batch"]]])
    meta = kind.meta | {"md5": sums["batches.meta"]}
    monkeypatch.setattr(kind, "meta", meta)
    return pixels


@pytest.mark.filterwarnings("ignore:dtype")  # NumPy's, about pickles of torchvision's layout
def test_cifar10_in_torchvisions_layout(tmp_path, monkeypatch):
    pixels = _cifar(tmp_path, monkeypatch)
    data = load_data(Config(dataset="cifar10", data_dir=str(tmp_path)))
    np.testing.assert_array_equal(data.x_train, pixels[:3])
    np.testing.assert_array_equal(data.x_test, pixels[3:])
    assert data.y_train.tolist() == [0, 9, 3]
    assert data.num_classes == 10


def test_a_set_that_is_nowhere_is_refused_with_the_cure(tmp_path, monkeypatch):
    def no_network(*_: object, **__: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", no_network)
    with pytest.raises(ConfigError, match=r"MNIST is not in .*no route to host.*set data-dir"):
        load_data(Config(dataset="mnist", data_dir=str(tmp_path)))


def test_hugging_face_set_from_a_folder_of_real_files(shared_data):
    folder = shared_data / "CIFAR10-jpeg"
    data = load_data(Config(dataset=f"hf:{folder}"))
    assert data.x_train.shape == (10_000, 3, 32, 32)
    assert data.x_test.shape == (2_000, 3, 32, 32)
    assert data.num_classes == 10
    assert np.bincount(data.y_train).tolist() == [1000] * 10


def _hugging_face_folder(folder: Path) -> str:
    import datasets

    for part, n in (("train", 6), ("test", 2)):
        pictures = [Image.fromarray(np.full((8, 8), i, np.uint8)) for i in range(n)]
        columns = {
            "picture": pictures,
            "digit": [i % 3 for i in range(n)],
            "writer": list("aabbcc")[:n],
        }
        features = datasets.Features(
            {
                "picture": datasets.Image(),
                "digit": datasets.Value("int64"),
                "writer": datasets.Value("string"),
            }
        )
        datasets.Dataset.from_dict(columns, features=features).to_parquet(
            folder / f"{part}.parquet"
        )
    return f"hf:{folder}"


def test_hugging_face_columns_by_name_and_natural_ids(tmp_path):
    name = _hugging_face_folder(tmp_path)
    data = load_data(Config(dataset=name, label_column="digit", natural_column="writer"))
    assert data.x_train[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.natural_ids is not None
    assert data.natural_ids.tolist() == list("aabbcc")
    assert data.natural_ids_test.tolist() == list("aa")
    for options, message in (
        ({}, "label-column: .* has the columns picture, digit, writer, got 'label'"),
        ({"label_column": "digit", "image_column": "img"}, "image-column: .* got 'img'"),
        ({"label_column": "digit", "natural_column": "who"}, "natural-column: .* got 'who'"),
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


def test_own_arrays(tmp_path):
    data = load_data(Config(dataset=_npz(tmp_path / "own.npz")))
    assert (data.input_shape, data.num_classes) == ((4,), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "must hold x_train, y_train, x_test and y_test"),
        ({"y_train": np.arange(5) % 3}, "expected examples and one label each"),
        ({"y_train": np.arange(6) - 1}, r"expected labels 0 ... 4, got -1 ... 4"),
        (
            {"y_train": np.arange(6) / 2},
            "train set in .*expected whole numbers as labels, got float",
        ),
        ({"x_test": np.ones((2, 5))}, "expected examples of shape"),
        ({"x_train": np.full((6, 4), np.nan)}, "train set in .*expected finite numbers"),
        ({"x_test": np.ones((0, 4)), "y_test": np.arange(0)}, "test set: expected examples"),
        ({"x_train": np.array(list("abcdef"))}, "cannot be read|expected numbers"),
        ({"x_train": np.arange(6.0)}, r"expected numbers of shape \(n, ...\), got float64"),
        ({"x_train": np.array(3.0)}, "expected numbers of shape"),
        ({"y_test": np.array([0, 10**9])}, "labels up to 1000000000 and 6 training examples"),
    ],
)
def test_own_arrays_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_data(Config(dataset=_npz(tmp_path / "own.npz", **changes)))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("npz:/nowhere.npz", "no file at /nowhere.npz"),
        (
            "emnist",
            "digits-five:<folder>, femnist:<folder>, hf:<name or folder>, leaf:<folder>, npz",
        ),
    ],
)
def test_unknown_sets_are_refused(dataset, message):
    with pytest.raises(ConfigError, match=message):
        load_data(Config(dataset=dataset))


def test_damaged_files_are_refused_in_one_line(tmp_path, shared_data):
    own = Path(_npz(tmp_path / "own.npz").removeprefix("npz:"))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "half.npz").write_bytes(own.read_bytes()[:300])
    np.save(tmp_path / "one.npy", np.zeros(3))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (shared_data / "MNIST" / "raw").glob("t10k*.gz"):
        (raw / path.name).write_bytes(path.read_bytes()[:2000])
        (raw / path.name.replace("t10k", "train")).write_bytes(path.read_bytes()[:2000])
    for config in (
        Config(dataset=f"npz:{tmp_path / 'text.npz'}"),
        Config(dataset=f"npz:{tmp_path / 'half.npz'}"),
        Config(dataset=f"npz:{tmp_path / 'one.npy'}"),
        Config(dataset="mnist", data_dir=str(tmp_path)),
    ):
        with pytest.raises(ConfigError) as caught:
            load_data(config)
        assert "\n" not in str(caught.value)


def test_a_file_that_changed_is_read_again(tmp_path):
    config = Config(dataset=_npz(tmp_path / "own.npz"))
    assert load_data(config) is load_data(config)
    first = load_data(config)
    _npz(tmp_path / "own.npz", x_test=np.zeros((2, 4)))
    os.utime(tmp_path / "own.npz", (1, 1))
    assert first.x_test.any()
    assert not load_data(config).x_test.any()
