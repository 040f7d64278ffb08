"""Named data sets from small files in their forms, arrays of one's own, and clear refusals."""

import gzip
import json
import math
import os
import string
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.domains import DIGIT_SETS, DOMAINS, blur, enlarge, invert, rotate
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

from .outcomes import refused


def load(dataset: str, **options: Any) -> Data:
    return load_data(Config(dataset=dataset, **options))


def halves(data: Data) -> list[tuple[np.ndarray, ...]]:
    """Examples, labels and owners for training, and for testing."""
    train = data.x_train, data.y_train, data.natural_ids
    return [train, (data.x_test, data.y_test, data.natural_ids_test)]


def write_mnist(folder: Path, train: int, test: int, shape: tuple[int, int] = (28, 28)) -> Path:
    """Write noise in MNIST's form, so many pictures of each class, in mixed order."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, each in (("train", train), ("t10k", test)):
        labels = generator.permutation(np.repeat(np.arange(10, dtype=np.uint8), each))
        pixels = generator.integers(0, 256, (10 * each, *shape), dtype=np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


def write_parquet(folder: Path, part: str, features: dict[str, Any], **columns: Any) -> None:
    """Write one split in Hugging Face's form."""
    folder.mkdir(parents=True, exist_ok=True)
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    made.to_parquet(folder / f"{part}-00000-of-00001.parquet")


def write_npz(path: Path, **changes: np.ndarray | None) -> str:
    arrays = {
        "x_train": np.arange(24.0).reshape(6, 4), "y_train": np.arange(6) % 3,
        "x_test": np.ones((2, 4)), "y_test": np.array([0, 2]),
    }  # fmt: skip
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return f"npz:{path}"


def test_digits_are_scikit_learns_with_every_fifth_for_testing_standardised_by_the_others():
    data, digits = load("digits"), load_digits()
    assert (data.num_classes, len(data.y_train) + len(data.y_test)) == (10, 1797)
    test, images = np.arange(1797) % 5 == 0, digits.images
    mean, std = images[~test].mean(), images[~test].std()
    for (x, y), rows in ((data.train(np.arange(1437)), ~test), (data.test(), test)):
        np.testing.assert_allclose(x[:, 0], (images[rows] - mean) / std, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(y, digits.target[rows])


@pytest.mark.parametrize("packed", [False, True])
def test_original_files_are_read_as_torchvision_reads_them(tmp_path, monkeypatch, packed):
    """And without importing it, which takes as long as importing torch."""
    raw = write_mnist(tmp_path, 3, 1, (5, 4)) / "MNIST" / "raw"
    expected = [torchvision.datasets.MNIST(str(tmp_path), train=half) for half in (True, False)]
    for path in list(raw.iterdir()) if packed else []:
        (raw / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        data = load("mnist", data_dir=str(tmp_path))
    for theirs, (x, y, _) in zip(expected, halves(data), strict=True):
        np.testing.assert_array_equal(x[:, 0], theirs.data.numpy())
        np.testing.assert_array_equal(y, theirs.targets.numpy())
    assert data.num_classes == len(theirs.classes)


def test_a_damaged_or_missing_file_is_refused_in_one_line(tmp_path, monkeypatch):
    """A cut npz, MNIST's pictures with another header or dimension, and none of them."""
    file = write_mnist(tmp_path, 1, 1) / "MNIST" / "raw" / "train-images-idx3-ubyte"
    raw = file.read_bytes()
    whole = Path(write_npz(tmp_path / "own.npz").removeprefix("npz:")).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[:300])

    def refuse(message: str, dataset: str = "mnist") -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            load(dataset, data_dir=str(tmp_path))
        assert "\n" not in str(caught.value)

    refuse("half.npz", f"npz:{tmp_path}/half.npz")
    refuse("no file or folder at /nowhere", "npz:/nowhere.npz")
    refuse("or your own: csv:<file>", "emnist")
    for damaged in (raw[:-1], b"1" + raw[1:]):
        file.write_bytes(damaged)
        refuse("dataset = mnist: cannot be read: ValueError")
    file.write_bytes(raw[:7] + b"\x02" + raw[8 : 16 + 2 * 784])
    refuse("examples and one label each")
    file.unlink()
    failing = Mock(side_effect=RuntimeError("no route to host"))
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", failing)
    refuse(r"MNIST is not in .*no route to host.*set data-dir")


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_coloured_pictures_of_torchvision_get_their_channels_first(
    tmp_path, monkeypatch, name, classes
):
    """With 3 + 2 pictures in a class of torchvision's form."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)

    class Small:
        def __init__(self, *, root: str, train: bool, download: bool) -> None:
            assert (root, download) == (str(tmp_path), True)  # nothing is loaded that is there
            self.data, self.targets = (pixels[:3], [0, 9, 3]) if train else (pixels[3:], [1, 2])

    monkeypatch.setattr(torchvision.datasets, name.upper(), Small)
    data = load(name, data_dir=str(tmp_path))
    np.testing.assert_array_equal(data.x_train, pixels[:3].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.x_test, pixels[3:].transpose(0, 3, 1, 2))
    assert (data.y_train.tolist(), data.num_classes) == ([0, 9, 3], classes)


def test_hugging_face_columns_by_name_and_natural_ids(tmp_path):
    kinds = {"digit": datasets.Value("int64"), "writer": datasets.Value("string")}
    for part, n in (("train", 6), ("test", 2)):
        write_parquet(
            tmp_path, part, {"picture": datasets.Image(), **kinds},
            picture=[Image.new("RGB", (8, 9), (i, 7, 7)) for i in range(n)],
            digit=[i % 3 for i in range(n)], writer=list("aabbcc")[:n],
        )  # fmt: skip
    name = f"hf:{tmp_path}"
    data = load(name, target="digit", client_column="writer", partition="natural")
    assert (data.x_train.shape, data.num_classes) == ((6, 3, 9, 8), 3)
    assert data.x_train[:, 0, 0, 0].tolist() == data.x_train[:, 0, 8, 7].tolist() == [*range(6)]
    assert (*data.natural_ids, *data.natural_ids_test) == (*"aabbcc", *"aa")
    refused("target: .* has the columns picture, digit, writer, got 'label'", load, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "must hold both x_test and y_test, or neither"),
        ({"y_train": None}, "must hold x_train and y_train; it lacks y_train and has x_train, x_"),
        ({"y_train": np.arange(6) / 2}, "expected whole numbers or words as labels, got float64"),
        ({"x_test": np.ones((2, 5))}, "expected examples of shape"),
        ({"x_train": np.full((6, 4), np.nan)}, "train set: expected finite numbers"),
        ({"y_test": np.array([0, 10**9])}, "test set: no training example has the labels 10{9}"),
    ],
)
def test_own_arrays_that_do_not_fit_are_refused(tmp_path, changes, message):
    refused(message, load, write_npz(tmp_path / "own.npz", **changes))


def test_own_arrays_are_read_again_when_the_file_has_changed(tmp_path):
    name = write_npz(tmp_path / "own.npz")
    first = load(name)
    assert (first.input_shape, first.num_classes) == ((4,), 3)
    assert load(name) is first
    write_npz(tmp_path / "own.npz", x_test=np.zeros((2, 4)))
    os.utime(tmp_path / "own.npz", (1, 1))
    assert first.x_test.any()
    assert not load(name).x_test.any()


# ------------------------------------------------------------------------ domains

EACH = 6, 3  # of a class, in each domain of the small sets here
NATURAL = {"partition": "natural", "num_clients": 5, "clients_per_round": 5, "private_test": True}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Noise in MNIST's form; each class as often as the smallest of four times the digits' is."""
    return Config(
        dataset="digit-domains", data_dir=write_mnist(tmp_path, 4 * 133, 4 * 26),
        examples_per_domain=10 * EACH[0], test_examples_per_domain=10 * EACH[1], **NATURAL,
    )  # fmt: skip


def test_pictures_are_inverted_turned_blurred_and_enlarged():
    """By 90 degrees counter-clockwise, the pixel in row i and column j comes to row 27 - j and
    column i; a pixel is spread binomially, with a deviation of two pixels."""
    x = np.random.default_rng(0).integers(0, 256, (3, 1, 28, 28), dtype=np.uint8)
    i, j = np.meshgrid(range(28), range(28), indexing="ij")
    np.testing.assert_array_equal(rotate(x)[:, :, 27 - j, i], x[:, :, i, j])
    np.testing.assert_array_equal(invert(x), 255 - x.astype(int))
    point = np.zeros((1, 1, 28, 28), np.uint8)
    point[0, 0, 14, 12] = 255
    weights = np.array([math.comb(16, k) for k in range(17)]) / 2**16
    exact = np.zeros((28, 28))
    exact[6:23, 4:21] = 255 * np.outer(weights, weights)
    assert np.abs(blur(point)[0, 0] - exact).max() <= 0.5
    small = np.zeros((1, 1, 8, 8))
    small[..., :4, :] = 16  # white above, in 0 ... 16
    assert [np.unique(rows).tolist() for rows in np.split(enlarge(small)[0, 0], (12, 16))[::2]] == [
        [255], [0],
    ]  # fmt: skip


def test_domains_are_of_one_size_balanced_and_share_no_picture(config):
    """By default of the size of scikit-learn's digits: 133 of a class, and 26 for testing."""
    data, original = load_data(config), load("mnist", data_dir=config.data_dir)
    assert DOMAINS == ("mnist", "inverted", "rotated", "blurred", "enlarged")
    for (x, y, ids), (all_x, all_y, _), each in zip(
        halves(data), halves(original), EACH, strict=True
    ):
        assert np.bincount(10 * ids + y).tolist() == [each] * 50
        for number, change in enumerate((lambda x: x, invert, rotate, blur)):
            for k in range(10):
                source = all_x[all_y == k][number * each : (number + 1) * each]
                np.testing.assert_array_equal(x[(ids == number) & (y == k)], change(source))
    whole = load("digit-domains", data_dir=config.data_dir)
    assert (len(whole.y_train), len(whole.y_test)) == (5 * 1330, 5 * 260)
    for number, message in ((55, "a multiple of 10, .* got 55"), (1340, "at most 1330, as MNIST")):
        refused(f"examples-per-domain: expected {message}", load_data,
                config.replace(examples_per_domain=number))  # fmt: skip


def test_several_clients_share_a_domain_evenly(config):
    config = config.replace(num_clients=20)
    data, split = load_data(config), load_split(config)
    for client, (train, test) in enumerate(zip(split.clients, split.tests, strict=True)):
        ids = {*data.natural_ids[train], *data.natural_ids_test[test]}
        assert (ids, len(train)) == ({client // 4}, 10 * EACH[0] // 4)
    for parts, each in zip((split.clients, split.tests), EACH, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(50 * each))
    refused("num-clients: owners has 5 values, got 12; expected as", load_split,
            config.replace(num_clients=12))  # fmt: skip


FORMS = {  # image column, label column, class labels or numbers, mode, size
    "mnist": ("image", "label", True, "L", (28, 28)),
    "svhn": ("picture", "digit", False, "RGB", (32, 32)),
    "usps": ("img", "y", True, "L", (16, 16)),
    "synth-digits": ("x", "number", False, "RGBA", (32, 30)),
    "mnist-m": ("image", "class", False, "P", (32, 32)),
}
LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 3))


def random_picture(seed: int, mode: str, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_set(folder: Path, name: str, y: np.ndarray) -> None:
    """Write a tiny set in its form."""
    image, label, named, *form = FORMS[name]
    kind = datasets.ClassLabel(10) if named else datasets.Value("int64")
    pictures = [random_picture(i, *form) for i in range(len(y))]
    features = {image: datasets.Image(), label: kind}
    for part in ("train", "test"):
        write_parquet(folder / name, part, features, **{image: pictures, label: y.tolist()})


def test_five_sets_of_other_columns_sizes_and_modes_are_one(tmp_path):
    """Fewer examples are the first of each class."""
    for name in FORMS:
        write_set(tmp_path, name, LABELS + (name == "svhn"))
    config = Config(dataset=f"digits-five:{tmp_path}", **NATURAL)
    refused(r"got 0 \.\.\. 10", load_data, config)
    write_set(tmp_path, "svhn", LABELS)
    data, split = load_data(config), load_split(config)
    fewer = load_data(config.replace(examples_per_domain=20))
    assert tuple(DIGIT_SETS) == ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
    for number, name in enumerate(DIGIT_SETS):
        x, y = (part[data.natural_ids == number] for part in (data.x_train, data.y_train))
        raw = random_picture(7, *FORMS[name][3:]).convert("RGB")
        expected = raw.resize((28, 28), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(x[7].transpose(1, 2, 0), np.asarray(expected))
        np.testing.assert_array_equal(y, LABELS)
        assert set(data.natural_ids[split.clients[number]]) == {number}
        assert set(data.natural_ids_test[split.tests[number]]) == {number}
        for k in range(10):
            chosen = (fewer.natural_ids == number) & (fewer.y_train == k)
            np.testing.assert_array_equal(fewer.x_train[chosen], x[y == k][:2])
    refused(r"synth-digits is on no hub .*; set dataset = digits-fi", load, "digits-five")


# ------------------------------------------------------------------------ writers

NAMES = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
WRITERS = [f"f{k:04}_{k % 7:02}" for k in range(6)]
ORDER = np.random.default_rng(0).permutation(6 * 40)  # 40 of a writer: half of them are digits
OWNERS = np.repeat(WRITERS, 40)[ORDER]
CHARACTERS = np.where(ORDER % 2, ORDER % 10, 10 + ORDER % 52)


def character(writer, label):
    pixels = np.full((28, 28), WRITERS.index(writer), np.uint8)
    pixels[label // 10, label % 10] = 255
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def femnist(tmp_path_factory):
    """One split, with the columns of the set on the hub."""
    place = tmp_path_factory.mktemp("femnist")
    features = {
        "image": datasets.Image(), "writer_id": datasets.Value("string"),
        "character": datasets.ClassLabel(names=NAMES),
    }  # fmt: skip
    write_parquet(
        place, "train", features, writer_id=OWNERS.tolist(), character=CHARACTERS.tolist(),
        image=[character(w, int(k)) for w, k in zip(OWNERS, CHARACTERS, strict=True)],
    )  # fmt: skip
    return place


@pytest.mark.parametrize(("name", "classes"), [("femnist", 62), ("femnist-digits", 10)])
def test_every_tenth_example_of_each_writer_is_for_testing(femnist, name, classes):
    """If only digits are taken, of each writer's digits."""
    data = load(f"{name}:{femnist}")
    assert data.num_classes == classes
    for writer in WRITERS:
        labels = CHARACTERS[(classes > CHARACTERS) & (writer == OWNERS)]
        test = np.arange(len(labels)) % 10 == 9
        for (x, y, ids), rows in zip(halves(data), (~test, test), strict=True):
            np.testing.assert_array_equal(y[ids == writer], labels[rows])
            pictures = np.stack([character(writer, int(label)) for label in labels[rows]])
            np.testing.assert_array_equal(x[ids == writer], pictures[:, None])


def test_some_writers_are_drawn_by_the_seed(femnist):
    """Each client has the examples of one."""
    options = {"partition": "natural", "owners": 2, "num_clients": 2, "clients_per_round": 2}
    config, drawn = Config(dataset=f"femnist-digits:{femnist}", **options), set()
    ids = load_data(config).natural_ids
    for seed in range(5):
        clients = [ids[indices] for indices in load_split(config.replace(seed=seed)).clients]
        first, second = ({*owners} for owners in clients)
        assert (len(first), len(second), len(first | second)) == (1, 1, 2)
        assert sum(map(len, clients)) == np.isin(ids, [*first, *second]).sum()
        drawn.add(frozenset(first | second))
    assert len(drawn) > 1
    refused("owners: expected at most the 6 that have training", load_split,
            config.replace(owners=7))  # fmt: skip


SPEECHES = {"ROMEO": "but soft what light through yonder", "NURSE": "now by my maidenhead at"}
LENGTH = 6


def cut(text):
    """Cut a text into strings and the character after each."""
    count = len(text) - LENGTH
    return {"x": [text[i : i + LENGTH] for i in range(count)], "y": list(text[LENGTH:])}


def write_leaf(folder, part, user_data, name="all_data"):
    (folder / part).mkdir(parents=True, exist_ok=True)
    content = {"users": list(user_data), "user_data": user_data}
    (folder / part / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_text_is_read_as_it_was_written_and_owned_by_its_users(tmp_path):
    for user, text in SPEECHES.items():  # a file each, as LEAF writes large sets
        write_leaf(tmp_path, "train", {user: cut(2 * text)}, name=user)
    write_leaf(tmp_path, "test", {user: cut(text[:20]) for user, text in SPEECHES.items()})
    data = load(f"leaf:{tmp_path}")
    letters = sorted(set("".join(SPEECHES.values())))
    assert data.num_classes == len(letters)
    for user, text in SPEECHES.items():
        for (x, y), ids, whole in (
            (data.train(slice(None)), data.natural_ids, 2 * text),
            (data.test(), data.natural_ids_test, text[:20]),
        ):
            examples = torch.cat([x, y[:, None]], 1)[ids == user].int().tolist()
            read = ["".join(letters[i] for i in row) for row in examples]
            assert read == [whole[i : i + LENGTH + 1] for i in range(len(whole) - LENGTH)]


def test_femnist_of_leaf_is_read_as_images(tmp_path):
    images = np.random.default_rng(0).random((4, 784)).round(3)
    write_leaf(tmp_path, "train", {"f0": {"x": images[:3].tolist(), "y": [0, 61, 5]}})
    write_leaf(tmp_path, "test", {"f1": {"x": images[3:].tolist(), "y": [2]}})
    data = load(f"leaf:{tmp_path}")
    assert data.num_classes == 62
    np.testing.assert_allclose(data.x_train, images[:3].reshape(3, 1, 28, 28), rtol=1e-6)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, r"expected LEAF's files .*train/\*\.json, found none"),
        ({"a": {"x": ["abc", "de"], "y": ["f", "g"]}}, "examples of 2 lengths"),
        ({"a": {"x": ["abc", "abd"], "y": ["f"]}}, "is not in LEAF's form"),
    ],
)
def test_what_is_not_in_leafs_form_is_refused(train, message, tmp_path):
    if train is not None:
        write_leaf(tmp_path, "train", train)
    write_leaf(tmp_path, "test", {"a": {"x": ["abc"], "y": ["d"]}})
    refused(message, load, f"leaf:{tmp_path}")
