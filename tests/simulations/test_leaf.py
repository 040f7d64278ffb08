"""LEAF's JSON form, on a small text that the test makes, and the network that reads it."""

import json

import numpy as np
import pytest
import torch

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import load_data
from fedntk.simulations.models import CharLSTM

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
