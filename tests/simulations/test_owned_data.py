"""Examples with owners: FEMNIST in the hub's form, LEAF's JSON form and its network, in small."""

import json
import string

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.models import CharLSTM

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


SPEECHES = {"ROMEO": "but soft what light through yonder", "NURSE": "now by my maidenhead at"}
LENGTH = 6


def cut(text):
    """Cut a text into strings and the character after each."""
    count = len(text) - LENGTH
    return {"x": [text[i : i + LENGTH] for i in range(count)], "y": list(text[LENGTH:])}


def write(folder, part, user_data, name="all_data"):
    (folder / part).mkdir(parents=True, exist_ok=True)
    content = {"users": list(user_data), "user_data": user_data}
    (folder / part / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_text_is_read_as_it_was_written_and_owned_by_its_users(tmp_path):
    for user, text in SPEECHES.items():  # a file each, as LEAF writes large sets
        write(tmp_path, "train", {user: cut(2 * text)}, name=user)
    write(tmp_path, "test", {user: cut(text[:20]) for user, text in SPEECHES.items()})
    data = load_data(Config(dataset=f"leaf:{tmp_path}"))
    letters = sorted(set("".join(SPEECHES.values())))
    assert data.num_classes == len(letters)
    for user, text in SPEECHES.items():
        for (x, y), ids, whole in (
            (data.train(slice(None)), data.natural_ids, 2 * text),
            (data.test(), data.natural_ids_test, text[:20]),
        ):
            examples = torch.cat([x, y[:, None]], 1)[ids == user].int().tolist()
            found = ["".join(letters[i] for i in row) for row in examples]
            assert found == [whole[i : i + LENGTH + 1] for i in range(len(whole) - LENGTH)]


def test_scores_are_those_of_the_last_state():
    model = CharLSTM((5,), 7, width=4)
    x = torch.randint(0, 7, (3, 5))
    _, (last, _) = model.lstm(model.embedding(x))
    assert torch.equal(model(x.float()), model.head(last[1]))


def test_femnist_is_read_as_images(tmp_path):
    images = np.random.default_rng(0).random((4, 784)).round(3)
    write(tmp_path, "train", {"f0": {"x": images[:3].tolist(), "y": [0, 61, 5]}})
    write(tmp_path, "test", {"f1": {"x": images[3:].tolist(), "y": [2]}})
    data = load_data(Config(dataset=f"leaf:{tmp_path}"))
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
def test_what_is_not_in_its_form_is_refused(train, message, tmp_path):
    if train is not None:
        write(tmp_path, "train", train)
    write(tmp_path, "test", {"a": {"x": ["abc"], "y": ["d"]}})
    with pytest.raises(ConfigError, match=message):
        load_data(Config(dataset=f"leaf:{tmp_path}"))
