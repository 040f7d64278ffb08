"""FEMNIST in the hub's form, by writer, in small: columns, classes and pictures made here."""

import string

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


def picture(writer, label):
    pixels = np.full((28, 28), WRITERS.index(writer), np.uint8)
    pixels[label // 10, label % 10] = 255
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One split, with the columns of the set on the hub."""
    place = tmp_path_factory.mktemp("femnist")
    characters = datasets.ClassLabel(names=NAMES)
    features = {
        "image": datasets.Image(), "writer_id": datasets.Value("string"), "character": characters,
    }  # fmt: skip
    write_parquet(
        place, "train", features, writer_id=OWNERS.tolist(), character=LABELS.tolist(),
        image=[picture(w, int(k)) for w, k in zip(OWNERS, LABELS, strict=True)],
    )  # fmt: skip
    return place


@pytest.mark.parametrize(("name", "classes"), [("femnist", 62), ("femnist-digits", 10)])
def test_every_tenth_example_of_each_writer_is_for_testing(folder, name, classes):
    """If only digits are taken, of each writer's digits."""
    data = load_data(Config(dataset=f"{name}:{folder}"))
    assert data.num_classes == classes
    for writer in WRITERS:
        labels = LABELS[(classes > LABELS) & (writer == OWNERS)]
        test = np.arange(len(labels)) % 10 == 9
        for x, y, ids, expected in (
            (data.x_train, data.y_train, data.natural_ids, labels[~test]),
            (data.x_test, data.y_test, data.natural_ids_test, labels[test]),
        ):
            np.testing.assert_array_equal(y[ids == writer], expected)
            pictures = np.stack([picture(writer, int(label)) for label in expected])
            np.testing.assert_array_equal(x[ids == writer], pictures[:, None])


def test_some_writers_are_drawn_by_the_seed(folder):
    """Each client has the examples of one."""
    own = {"partition": "natural", "owners": 2, "num_clients": 2, "clients_per_round": 2}
    config, drawn = Config(dataset=f"femnist-digits:{folder}", **own), set()
    ids = load_data(config).natural_ids
    for seed in range(5):
        found = [ids[indices] for indices in load_split(config.replace(seed=seed)).clients]
        first, second = ({*owners} for owners in found)
        assert (len(first), len(second), len(first | second)) == (1, 1, 2)
        assert sum(map(len, found)) == np.isin(ids, [*first, *second]).sum()
        drawn.add(frozenset(first | second))
    assert len(drawn) > 1
    with pytest.raises(ConfigError, match="owners: expected at most the 6 that have training"):
        load_split(config.replace(owners=7))
