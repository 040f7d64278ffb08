"""Feature skew: digits in five domains, made here or read as five sets, and who gets which."""

import math
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.domains import DIGIT_SETS, DOMAINS, blur, enlarge, invert, rotate
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

from .data_files import write_mnist, write_parquet

EACH, EACH_TEST = 6, 3  # of a class, in each domain of the small sets here
NATURAL = {"partition": "natural", "num_clients": 5, "clients_per_round": 5, "private_test": True}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Noise in MNIST's form; each class as often as the smallest of four times the digits' is."""
    return Config(
        dataset="digit-domains", data_dir=write_mnist(tmp_path, 4 * 133, 4 * 26),
        examples_per_domain=10 * EACH, test_examples_per_domain=10 * EACH_TEST, **NATURAL,
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
    assert np.array_equal(np.unique(enlarge(small)[0, 0, :12]), [255])
    assert np.array_equal(np.unique(enlarge(small)[0, 0, -12:]), [0])


def test_domains_are_of_one_size_balanced_and_share_no_picture(config):
    """By default of the size of scikit-learn's digits: 133 of a class, and 26 for testing."""
    data = load_data(config)
    original = load_data(Config(dataset="mnist", data_dir=config.data_dir))
    assert DOMAINS == ("mnist", "inverted", "rotated", "blurred", "enlarged")
    for part, ids, each in (
        ("train", data.natural_ids, EACH), ("test", data.natural_ids_test, EACH_TEST),
    ):  # fmt: skip
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        all_x, all_y = getattr(original, f"x_{part}"), getattr(original, f"y_{part}")
        assert np.bincount(10 * ids + y).tolist() == [each] * 50
        for number, change in enumerate((lambda x: x, invert, rotate, blur)):
            for k in range(10):
                source = all_x[all_y == k][number * each : (number + 1) * each]
                np.testing.assert_array_equal(x[(ids == number) & (y == k)], change(source))
    whole = load_data(Config(dataset="digit-domains", data_dir=config.data_dir))
    assert (len(whole.y_train), len(whole.y_test)) == (5 * 1330, 5 * 260)
    for number, message in ((55, "a multiple of 10, .* got 55"), (1340, "at most 1330, as MNIST")):
        with pytest.raises(ConfigError, match=f"examples-per-domain: expected {message}"):
            load_data(replace(config, examples_per_domain=number))


def test_several_clients_share_a_domain_evenly(config):
    config = replace(config, num_clients=20)
    data, split = load_data(config), load_split(config)
    for client, (own, test) in enumerate(zip(split.clients, split.tests, strict=True)):
        ids = {*data.natural_ids[own], *data.natural_ids_test[test]}
        assert (ids, len(own)) == ({client // 4}, 10 * EACH // 4)
    for parts, count in ((split.clients, 50 * EACH), (split.tests, 50 * EACH_TEST)):
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    with pytest.raises(ConfigError, match="num-clients: owners has 5 values, got 12; expected as"):
        load_split(replace(config, num_clients=12))


FORMS = {  # image column, label column, class labels or numbers, mode, size
    "mnist": ("image", "label", True, "L", (28, 28)),
    "svhn": ("picture", "digit", False, "RGB", (32, 32)),
    "usps": ("img", "y", True, "L", (16, 16)),
    "synth-digits": ("x", "number", False, "RGBA", (32, 30)),
    "mnist-m": ("image", "class", False, "P", (32, 32)),
}
LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 3))


def picture(seed: int, mode: str, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_set(folder: Path, name: str, y: np.ndarray) -> None:
    """Write a tiny set in its form."""
    image, label, named, mode, size = FORMS[name]
    kind = datasets.ClassLabel(10) if named else datasets.Value("int64")
    pictures = [picture(i, mode, size) for i in range(len(y))]
    features = {image: datasets.Image(), label: kind}
    for part in ("train", "test"):
        write_parquet(folder / name, part, features, **{image: pictures, label: y.tolist()})


def test_five_sets_of_other_columns_sizes_and_modes_are_one(tmp_path):
    """Fewer examples are the first of each class."""
    for name in FORMS:
        write_set(tmp_path, name, LABELS + (name == "svhn"))
    config = Config(dataset=f"digits-five:{tmp_path}", **NATURAL)
    with pytest.raises(ConfigError, match=r"got 0 \.\.\. 10"):
        load_data(config)
    write_set(tmp_path, "svhn", LABELS)
    data, split = load_data(config), load_split(config)
    fewer = load_data(replace(config, examples_per_domain=20))
    assert tuple(DIGIT_SETS) == ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
    for number, name in enumerate(DIGIT_SETS):
        x, y = (part[data.natural_ids == number] for part in (data.x_train, data.y_train))
        raw = picture(7, *FORMS[name][3:]).convert("RGB")
        expected = raw.resize((28, 28), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(x[7].transpose(1, 2, 0), np.asarray(expected))
        np.testing.assert_array_equal(y, LABELS)
        assert set(data.natural_ids[split.clients[number]]) == {number}
        assert set(data.natural_ids_test[split.tests[number]]) == {number}
        for k in range(10):
            own = (fewer.natural_ids == number) & (fewer.y_train == k)
            np.testing.assert_array_equal(fewer.x_train[own], x[y == k][:2])
    with pytest.raises(ConfigError, match=r"synth-digits is on no hub .*; set dataset = digits-fi"):
        load_data(Config(dataset="digits-five"))
