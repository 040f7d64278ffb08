"""Data from Python in the forms in which people have them: taken rightly, or refused."""

import datetime

import datasets
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from PIL import Image

from fedntk.clients import SGDClient
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.simulations import Config, OwnData
from fedntk.simulations.data.load import load_data

from .outcomes import refused
from .test_own_data import Pairs

N = 30
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 4)), np.arange(N) % 3
PIXELS = RNG.integers(0, 256, (N, 5, 6, 3), np.uint8)
PICTURES = [Image.fromarray(own) for own in PIXELS]
FEATURES = datasets.Features(
    image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b", "c"])
)


def image_set(**columns: object) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"image": PICTURES, "label": Y.tolist()} | columns, FEATURES)


IMAGES = image_set()


def frame(**columns: object) -> pd.DataFrame:
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": Y, **columns})


def in_turn(*values: object) -> np.ndarray:
    array = np.empty(N, object)
    array[:] = [values[i % len(values)] for i in range(N)]
    return array


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (Y[:, None], ()),
        (Y.astype(float), ()),
        (Y.astype(object) + 1, (1, 2, 3)),
        (2 * (Y > 0) - 1, (-1, 1)),
        (Y > 0, ("False", "True")),
        (in_turn(b"oak", b"elm").astype("S3"), ("elm", "oak")),
        (in_turn("oak", "elm").astype(np.dtypes.StringDType()), ("elm", "oak")),
        ([torch.tensor(int(k)) for k in Y], ()),
        (np.ma.array(Y), ()),
        (pd.Series(Y, index=[0] * N), ()),
        (pd.Categorical(in_turn("oak", "elm"), categories=["elm", "fir", "oak"]), ("elm", "oak")),
        (pd.array(Y, dtype="Int64"), ()),
    ],
)
def test_labels_of_any_kind_are_the_same_classes(labels, classes):
    own = OwnData((X, labels)).read()
    assert own.classes == classes
    array = np.asarray(list(labels)).ravel()
    for x, y in ((own.x_train, own.y_train), (own.x_test, own.y_test)):
        rows = [int(np.flatnonzero((row == X).all(1))[0]) for row in x]
        np.testing.assert_array_equal(y, np.unique(array, return_inverse=True)[1][rows])


HIDDEN = np.ma.array(Y, mask=np.arange(N) == 7)


def test_a_frame_beside_its_labels_keeps_its_columns():
    """Whatever its index; a predictor then takes them in any order."""
    table = frame().drop(columns="label").set_axis([3] * N)
    own, whole = OwnData((table, pd.Series(Y))).read(), OwnData(frame()).read()
    np.testing.assert_array_equal(own.x_train, whole.x_train)
    assert torch.equal(own.inputs(table[["b", "a"]]), own.inputs(table.to_numpy()))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.ma.array(X, mask=np.eye(N, 4) == 1), Y), "got 4 that are masked; fill"),
        ((list(np.ma.array(X, mask=X > 1)), Y), "masked"),
        ((X, HIDDEN), "got 1 that are masked"),
        (list(zip(X, HIDDEN, strict=True)), "masked"),
        ((X, np.eye(3)[Y]), r"one-hot rows, give y.argmax\(1\)"),
        ((X, np.eye(3, dtype=int)[Y].tolist()), "one of the labels for each example"),
        ((X, [[0, 1], [2]] * 15), "one of the labels for each example, got several"),
        ((X, [{0, 1}] * N), "one of the labels for each example, got several"),
        ((X, [0, "1", 1] * 10), "labels of one kind, all words or all numbers, got both"),
        ((X, in_turn("a", None)), "15 of 30 labels are NaN"),
        ((X, np.where(Y == 1, np.inf, Y)), "whole numbers or words as labels, got float64"),
        (frame(label=in_turn(1, "1", "A")), "labels of one kind"),
        (OwnData(frame(who=in_turn(1, "1")), client_column="who"), "owners of one kind"),
        (frame(label=pd.array([None, *Y[1:]], dtype="Int64")), r"gaps \(rows\): label \(1\)"),
        (frame(a=10**18 + np.arange(N)), r"float64 tells apart, got 10+ \.\.\. 10+29 in a"),
        (frame(a=in_turn(1, "2.5")), r"others in a \('2.5'\)"),
        (frame(a=in_turn([1.0, 2.0])), r"others in a \(\[1.0, 2.0\]\).* numpy.stack"),
        ((scipy.sparse.csr_array(X), Y), r"give data.toarray\(\)"),
        ((X.astype("m8[s]"), Y), "expected numbers of shape"),
        ([(x, y, 0) for x, y in zip(X, Y, strict=True)], "example 0 is a tuple of 3, not a pair"),
        ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], "is a dict of 2, not a pair"),
        ((PIXELS, Y), r"\(n, channels, height, width\), got 5 x 6 x 3; give x.transpose"),
        (([None, *PICTURES[1:]], Y), "pictures of PIL, got NoneType at position 0"),
        (([*PICTURES[1:], PICTURES[0].convert("RGBA")], Y), "of one size and mode"),
        (IMAGES.with_transform(lambda batch: batch), "a set with a transform; apply it with"),
        ({"train": IMAGES.to_iterable_dataset()}, "expected a dataset of known length"),
        ({"train": IMAGES, "Training": IMAGES}, "one part for each of train"),
        (
            image_set(image=[*PICTURES[1:], None]),
            "got NoneType at position 29; leave out examples without a picture",
        ),
        (
            image_set(label=[-1, *Y[1:].tolist()]),
            r"expected labels 0 ... 2, got -1 ... 2",
        ),
        (
            datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}),
            "others in x .* lists with numpy.stack",
        ),
    ],
)  # fmt: skip
def test_what_is_no_set_of_examples_with_a_label_each_is_refused(data, message):
    own = data if isinstance(data, OwnData) else OwnData(data)
    refused(message, own.read)


def test_amounts_are_no_classes(tmp_path):
    """Above a tenth of the examples, or a half of words; a set that was taken stays taken."""
    n = 300
    x = np.random.default_rng(0).normal(size=(n, 2))
    for count, kind in ((31, int), (31, float), (151, str)):
        y = (np.arange(n) % count).astype(kind)
        refused(f"got {count} different .* in {n} examples", OwnData((x, y)).read)
    np.savez(tmp_path / "t.npz", x_train=x, y_train=np.arange(n) % 200)
    refused("got 200 different numbers", load_data, Config(dataset=f"npz:{tmp_path}/t.npz"))
    for y in (np.arange(n) % 30, (np.arange(n) % 150).astype(str)):
        own = OwnData((x, y)).read()
        again = load_data(Config(**own.keep()))
        assert again.num_classes == len(np.unique(y))
        np.testing.assert_array_equal(again.y_train, own.y_train)


def test_formats_of_hugging_face_change_nothing():
    """Of rows as tensors or frames, pictures as bytes; the columns that are shown stay."""
    expected = OwnData(IMAGES).read()
    first = IMAGES.add_column("z", Y.tolist()).with_format("torch", columns=["image", "label"])
    forms = [IMAGES.with_format(kind) for kind in ("torch", "numpy", "pandas", "arrow")]
    for form in (*forms, first, IMAGES.cast_column("image", datasets.Image(decode=False))):
        np.testing.assert_array_equal(OwnData(form).read().x_train, expected.x_train)
    table = datasets.Dataset.from_pandas(frame()).with_format("torch", columns=["b", "label"])
    assert OwnData(table).read().columns == ("b",)
    named = {"TRAIN": IMAGES, "Testing": IMAGES.select(range(9))}
    assert len(OwnData(datasets.DatasetDict(named)).read().y_test) == 9


def test_words_in_one_set_and_numbers_in_the_other_are_words_in_both():
    own = {"label": ["1", "2", "A"] * 10, "who": [*"12A"] * 10}
    other = {"label": [1, 2, 1] * 10, "who": [2, 1, 2] * 10}
    both = {"train": frame(**own), "test": frame(**other)}
    data = OwnData(both, client_column="who").read()
    assert data.classes == ("1", "2", "A")
    np.testing.assert_array_equal(data.y_test, [0, 1, 0] * 10)
    assert {*data.natural_ids_test} == {"1", "2"}
    dates = [datetime.date(2020, 1, day) for day in (1, 2, 3)]
    data = OwnData(frame(who=in_turn(*dates)), client_column="who").read()
    assert load_data(Config(**data.keep())).natural_ids.tolist() == data.natural_ids.tolist()


def test_pictures_of_pil_have_channels_first_in_any_list():
    """As a list, a tuple, pairs, a dataset of pairs, or a column; in all modes as colours."""
    first = PIXELS.transpose(0, 3, 1, 2)
    lists = [(PICTURES, Y), (tuple(PICTURES), Y.tolist()), list(zip(PICTURES, Y, strict=True))]
    for data in (*lists, Pairs(first, Y), IMAGES):
        own = OwnData(data).read()
        expected = OwnData((first, Y)).read()
        np.testing.assert_array_equal(own.x_train, expected.x_train)
    for mode, channels in (("CMYK", 3), ("P", 3), ("LAB", 3), ("1", 1), ("LA", 2), ("PA", 4)):
        other = [own.convert("P").convert(mode) for own in PICTURES]
        data = OwnData((other, Y)).read()
        assert data.input_shape == (channels, 5, 6)
        if channels == 3:  # no numbers of colours in a palette, or of inks
            want = np.asarray(other[0].convert("RGB")).transpose(2, 0, 1)
            np.testing.assert_array_equal(data.inputs(other[0]), data.inputs(want[None]))


# ------------------------------------------------------------------- far from zero


@pytest.mark.parametrize("shape", [(6,), (5, 3), (1, 6, 6), (2, 3, 3, 3)])
@pytest.mark.parametrize(
    ("offset", "dtype"),
    [
        (1e8, np.float64), (-1e8, np.float64), (1e6, np.float32), (1.7e9, np.int64),
        (2**31, np.uint32), (1.7e18, np.int64), (0, np.float64), (60_000, np.uint16),
    ],
)  # fmt: skip
def test_inputs_far_from_zero_are_standardised_as_by_hand(tmp_path, shape, offset, dtype):
    """To (x - mean) / std of exact numbers; a saved transform does the same."""
    rng = np.random.default_rng(0)
    scale = 1e9 if offset > 1e18 else 100 if np.dtype(dtype).kind in "iu" else 1
    start = np.array(offset, dtype) if offset else np.zeros((), dtype)
    differences = (scale * rng.normal(size=(60, *shape))).round(2 if scale == 1 else 0)
    x = (start + differences.astype(np.int64 if scale > 1 else dtype)).astype(dtype)
    exact = (x.astype(object) - start.item()).astype(np.float64)  # before any rounding
    axes = {4: (0, 2, 3), 2: 0}.get(x.ndim)
    mean, std = (own(axis=axes, keepdims=True) for own in (exact.mean, exact.std))
    inputs = InputTransform.fit(x)
    tolerance = 3e-5 if offset == 1.7e18 else 2e-6
    np.testing.assert_allclose(inputs(x), (exact - mean) / std, rtol=0, atol=tolerance)
    inputs.save(tmp_path)
    again = InputTransform.load(tmp_path)
    assert again.mean.dtype == inputs.mean.dtype
    assert torch.equal(again(x), inputs(x))


@pytest.mark.parametrize(
    ("x", "standardise"),
    [
        (1e8 + X, False),
        (1e8 + X.reshape(N, 1, 2, 2), False),
        (2**40 + np.arange(N)[:, None], False),
        (1e15 + X, True),
        (10**17 + np.arange(2 * N).reshape(N, 2) % 3, True),
        (1e200 * X, True),
        (np.stack([1e12 + X, X], 1), True),  # a sequence whose one mean and scale fit neither
    ],
)
def test_differences_that_float32_loses_are_refused(x, standardise):
    with pytest.raises(ValueError, match=r"whose differences float32 can hold, got .*subtract"):
        InputTransform.fit(x, standardise=standardise)


def test_constant_inputs_and_positions_in_a_vocabulary_are_no_lost_differences():
    constant = np.c_[np.full(N, 0.1), np.full(N, 1e8), 1 + 1e-16 * X[:, 0], X[:, 0]]
    assert not InputTransform.fit(constant)(constant)[:, :2].any()
    assert InputTransform.fit(constant)(constant)[:, 2].abs().max() < 1e-15
    tokens = 49_999 + np.arange(2 * N).reshape(N, 2) % 2
    np.testing.assert_array_equal(InputTransform.fit(tokens, standardise=False)(tokens), tokens)
    noise = np.where(np.arange(16) < 4, 1e-17, 1) * RNG.random((N, 16))  # at a picture's border
    InputTransform.fit(noise.reshape(N, 1, 4, 4))


def test_a_client_refuses_what_its_networks_dtype_would_lose():
    y = torch.from_numpy(Y)
    network = torch.nn.Linear(4, 3)
    for x in (1e8 + X, torch.from_numpy(1e8 + X)):
        refused("differences float32 can hold", SGDClient, network, x, y, error=ValueError)
    SGDClient(torch.nn.Linear(4, 3).double(), 1e8 + X, y)
    noise = np.c_[X[:, :2], 1 + 1e-16 * RNG.random(N), np.full(N, 1e8 + 0.3)]
    for x in (X, noise):  # rounding and constants are no differences
        SGDClient(network, x, y)
    refused("1 that are masked", SGDClient, network, np.ma.array(X, mask=X[2, 2] == X), y,
            error=ValueError)  # fmt: skip
    refused("masked", SGDClient, network, X, HIDDEN, error=ValueError)
    inputs = InputTransform.fit(X, classes=(0, 1, 2))
    refused("masked", inputs, np.ma.array(X, mask=X > 1), error=ValueError)
    refused("expected labels", inputs.labels, np.eye(3)[Y], error=ValueError)
