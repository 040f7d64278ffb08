"""FEMNIST in the hub's form, by writer, in small: columns, classes and pictures made here."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from fedntk.simulations import Config, run
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

NAMES = [str(k) for k in range(10)] + [chr(ord("A") + k) for k in range(26)]
NAMES += [chr(ord("a") + k) for k in range(26)]
WRITERS = [f"f{k:04}_{k % 7:02}" for k in range(6)]
EACH = 40  # of a writer


def labels() -> tuple[np.ndarray, np.ndarray]:
    """Writers and characters, mixed: half of each writer's are digits."""
    generator = np.random.default_rng(0)
    y = np.where(np.arange(6 * EACH) % 2, np.arange(6 * EACH) % 10, 10 + np.arange(6 * EACH) % 52)
    order = generator.permutation(6 * EACH)
    return np.repeat(WRITERS, EACH)[order], y[order]


def picture(writer: str, label: int) -> Image.Image:
    pixels = np.full((28, 28), WRITERS.index(writer), np.uint8)
    pixels[label // 10, label % 10] = 255
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One split, with the columns of the set on the hub."""
    place = tmp_path_factory.mktemp("femnist")
    writers, y = labels()
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "hsf_id": datasets.Value("int64"),
            "character": datasets.ClassLabel(names=NAMES),
        }
    )
    columns = {
        "image": [picture(w, int(k)) for w, k in zip(writers, y, strict=True)],
        "writer_id": writers.tolist(), "hsf_id": [0] * len(y), "character": y.tolist(),
    }  # fmt: skip
    made = datasets.Dataset.from_dict(columns, features=features)
    made.to_parquet(place / "train-00000-of-00001.parquet")
    return place


@pytest.mark.parametrize(("name", "classes"), [("femnist", 62), ("femnist-digits", 10)])
def test_pictures_classes_and_writers_are_those_of_the_files(folder, name, classes):
    """Every tenth example of a writer is for testing; of the digits, that of its digits."""
    data = load_data(Config(dataset=f"{name}:{folder}"))
    writers, y = labels()
    wanted = y < classes
    assert data.num_classes == classes
    assert data.x_train.shape[1:] == (1, 28, 28)
    for writer in WRITERS:
        own = y[wanted & (writers == writer)]
        test = np.arange(len(own)) % 10 == 9
        parts = (
            (data.x_train, data.y_train, data.natural_ids, own[~test]),
            (data.x_test, data.y_test, data.natural_ids_test, own[test]),
        )
        for x, found, ids, expected in parts:
            assert ids is not None
            np.testing.assert_array_equal(found[ids == writer], expected)
            for image, label in zip(x[ids == writer], expected, strict=True):
                np.testing.assert_array_equal(image[0], np.asarray(picture(writer, int(label))))


def test_a_client_has_one_writer_and_its_test_examples(folder):
    config = Config(
        dataset=f"femnist:{folder}", partition="natural", num_clients=6, clients_per_round=6,
        private_test=True,
    )  # fmt: skip
    data, split = load_data(config), load_split(config)
    assert data.natural_ids is not None
    assert data.natural_ids_test is not None
    owners = [set(data.natural_ids[own]) for own in split.clients]
    assert [len(own) for own in owners] == [1] * 6
    assert set().union(*owners) == set(WRITERS)
    for own, test in zip(owners, split.tests, strict=True):
        assert set(data.natural_ids_test[test]) == own
        assert len(test) == 4


def test_some_writers_are_drawn_by_the_seed(folder):
    drawn = set()
    for seed in range(5):
        config = Config(
            dataset=f"femnist-digits:{folder}", partition="natural", owners=2, num_clients=2,
            clients_per_round=2, seed=seed,
        )  # fmt: skip
        data, split = load_data(config), load_split(config)
        assert data.natural_ids is not None
        found = frozenset(data.natural_ids[np.concatenate(split.clients)])
        assert len(found) == 2
        assert sum(map(len, split.clients)) == sum(np.isin(data.natural_ids, list(found)))
        drawn.add(found)
    assert len(drawn) > 1
    with pytest.raises(ConfigError, match="owners: expected at most the 6 that have training"):
        load_split(config.replace(owners=7))
    with pytest.raises(ConfigError, match="owners = 2 needs partition = natural, got dirichlet"):
        config.replace(partition="dirichlet")


def test_a_run_by_writer_learns(folder, tmp_path):
    """Pixels tell each digit."""
    config = Config(
        method="dfedavg", dataset=f"femnist-digits:{folder}", partition="natural", num_clients=6,
        clients_per_round=6, clients_per_evaluation=0, rounds=5, learning_rate=0.1, local_epochs=5,
        dfedavg={"degree": 3}, out=tmp_path,
    )  # fmt: skip
    assert run(config, progress=False).curve().iloc[-1] > 0.5


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ConfigError, match="femnist: expected a folder, got /nowhere"):
        load_data(Config(dataset="femnist:/nowhere"))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(3)})
    columns = {"image": [Image.new("L", (28, 28))], "label": [0]}
    made = datasets.Dataset.from_dict(columns, features=features)
    made.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match="has the columns image, label, got 'writer_id'"):
        load_data(Config(dataset=f"femnist:{tmp_path}"))
