"""FEMNIST in the hub's form, by writer, in small: columns, classes and pictures made here."""

import string
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from fedntk.simulations import Config
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

from .data_files import write_parquet

NAMES = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
WRITERS = [f"f{k:04}_{k % 7:02}" for k in range(6)]
EACH = 40  # of a writer: half of them are digits
ORDER = np.random.default_rng(0).permutation(6 * EACH)
OWNERS = np.repeat(WRITERS, EACH)[ORDER]
LABELS = np.where(ORDER % 2, ORDER % 10, 10 + ORDER % 52)


def picture(writer: str, label: int) -> Image.Image:
    pixels = np.full((28, 28), WRITERS.index(writer), np.uint8)
    pixels[label // 10, label % 10] = 255
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One split, with the columns of the set on the hub."""
    place = tmp_path_factory.mktemp("femnist")
    features = {
        "image": datasets.Image(),
        "writer_id": datasets.Value("string"),
        "character": datasets.ClassLabel(names=NAMES),
    }
    write_parquet(
        place, "train", features, writer_id=OWNERS.tolist(), character=LABELS.tolist(),
        image=[picture(w, int(k)) for w, k in zip(OWNERS, LABELS, strict=True)],
    )  # fmt: skip
    return place


@pytest.mark.parametrize(("name", "classes"), [("femnist", 62), ("femnist-digits", 10)])
def test_each_client_has_the_pictures_and_classes_of_one_writer(folder, name, classes):
    """Every tenth example of a writer is for testing; of the digits, that of its digits."""
    config = Config(
        dataset=f"{name}:{folder}", partition="natural", num_clients=6, clients_per_round=6,
        private_test=True,
    )  # fmt: skip
    data, split = load_data(config), load_split(config)
    assert data.num_classes == classes
    found = set()
    for own, own_test in zip(split.clients, split.tests, strict=True):
        (writer,) = {*data.natural_ids[own], *data.natural_ids_test[own_test]}
        found.add(writer)
        labels = LABELS[(classes > LABELS) & (writer == OWNERS)]
        test = np.arange(len(labels)) % 10 == 9
        for x, y, ids, expected in (
            (data.x_train, data.y_train, np.sort(own), labels[~test]),
            (data.x_test, data.y_test, np.sort(own_test), labels[test]),
        ):
            np.testing.assert_array_equal(y[ids], expected)
            pictures = np.stack([picture(writer, int(label)) for label in expected])
            np.testing.assert_array_equal(x[ids], pictures[:, None])
    assert found == set(WRITERS)


def test_some_writers_are_drawn_by_the_seed(folder):
    drawn = set()
    for seed in range(5):
        config = Config(
            dataset=f"femnist-digits:{folder}", partition="natural", owners=2, num_clients=2,
            clients_per_round=2, seed=seed,
        )  # fmt: skip
        data, split = load_data(config), load_split(config)
        found = frozenset(data.natural_ids[np.concatenate(split.clients)])
        assert len(found) == 2
        assert sum(map(len, split.clients)) == sum(np.isin(data.natural_ids, list(found)))
        drawn.add(found)
    assert len(drawn) > 1
    with pytest.raises(ConfigError, match="owners: expected at most the 6 that have training"):
        load_split(config.replace(owners=7))


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ConfigError, match="femnist: expected a folder, got /nowhere"):
        load_data(Config(dataset="femnist:/nowhere"))
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(3)}
    write_parquet(tmp_path, "train", features, image=[Image.new("L", (28, 28))], label=[0])
    with pytest.raises(ConfigError, match="has the columns image, label, got 'writer_id'"):
        load_data(Config(dataset=f"femnist:{tmp_path}"))
