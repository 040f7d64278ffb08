"""Your own examples and networks: all forms alike, raw rows to predictions, clear refusals."""

from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from flwr_datasets.partitioner import IidPartitioner
from PIL import Image
from torch import nn

from fedntk.ntk import NetworkPredictor
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.simulations import Config, OwnData, compare, load_model, load_predictor, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

from .outcomes import refused
from .test_data import write_leaf

NAMES = np.array(["ash", "birch", "oak"])
NATURAL = {"client_column": "site", "partition": "natural"}


def make_frame(n: int = 60, seed: int = 0) -> pd.DataFrame:
    """Three kinds of trees by columns of very different sizes, at four sites."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = (rng.normal(size=(n, 4)) + 3 * np.eye(4)[y]) * [1, 100, 1e-3, 1e4] + [0, 5, 1, -1e4]
    frame = pd.DataFrame(x.astype(np.float32), columns=["girth", "height", "ring", "weight"])
    return frame.assign(kind=NAMES[y], site=[f"site {i % 4}" for i in range(n)])


def small(**options: object) -> Config:
    base = {"method": "fedavg", "num_clients": 4, "rounds": 2, "partition": "iid", "width": 8}
    return Config(**{**base, "learning_rate": 0.1, **options})


def test_a_run_says_in_one_line_what_it_read(tmp_path, capsys):
    data = OwnData(make_frame(), target="kind", client_column="site")
    run(small(rounds=0, partition="natural"), data=data, out=tmp_path)
    said = "rows 48 and 12 to test, columns 4, owners 4, classes ash 33.3%, birch 33.3%, oak 33.3%"
    assert capsys.readouterr().err.count(f": {said}\n") == 1


@pytest.mark.parametrize("method", ["fedavg", "tct", "fed-ensemble", "cp-ntk-fl"])
def test_a_predictor_takes_the_raw_rows_of_a_csv(tmp_path, method):
    """With the accuracy of the run, whatever the columns' order; also client 1's, and a saved one.

    A projection's seed is a secret of the run: such a predictor is not saved.
    """
    for name, frame in {"train": make_frame(), "test": make_frame(30, seed=1)}.items():
        frame.drop(columns="site").to_csv(tmp_path / f"{name}.csv", index=False)
    options = {
        "tct": {"rounds": 4, "tct": {"bootstrap_rounds": 1}},
        "fed-ensemble": {"fed_ensemble": {"num_models": 2}},
        "cp-ntk-fl": {"projection": 3},
    }.get(method, {})
    config = small(method=method, dataset=f"csv:{tmp_path}", target="kind", **options)
    finished = run(config, out=tmp_path / "run", progress=False)
    predictor = load_predictor(finished.folder)
    raw = pd.read_csv(tmp_path / "test.csv").sample(frac=1, axis=1, random_state=0)
    evaluated = predictor.evaluate(raw, raw.kind)
    assert evaluated.accuracy == finished.summary["accuracy"]
    assert evaluated.loss == pytest.approx(finished.summary["loss"], rel=1e-6)
    assert predictor.inputs.classes == tuple(NAMES)
    assert finished.summary["inputs"] == "standardised by column"
    assert load_predictor(finished.folder, client=1).predict(raw).shape == (30, 3)
    refused("missing: ring", predictor.predict, raw.drop(columns="ring"), error=ValueError)
    message = r"expected the classes 'ash', .*, 'oak', got 'elm'"
    refused(message, predictor.evaluate, raw, ["elm"] * 30, error=ValueError)
    if method == "fedavg":
        predictor.save(tmp_path / "saved")
        again = NetworkPredictor.load(tmp_path / "saved", predictor.network)
        torch.testing.assert_close(again.predict(raw), predictor.predict(raw), rtol=0, atol=0)
    if method == "cp-ntk-fl":
        refused("whose seed is a secret", predictor.save, tmp_path / "saved", error=ValueError)
        assert not (tmp_path / "saved").exists()


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i >= len(self):
            raise IndexError
        return torch.from_numpy(self.x[i]), int(self.y[i])


def test_all_forms_of_the_same_data_are_the_same_examples(tmp_path, monkeypatch):
    """Objects, files and a function in a file; a test set is drawn alike from each."""
    monkeypatch.chdir(tmp_path)
    frame = make_frame().drop(columns="site")
    x, y = frame.drop(columns="kind").to_numpy().copy(), np.arange(60) % 3
    frame.to_csv("t.csv", index=False)
    frame.to_parquet("t.parquet")
    np.savez("t.npz", x_train=x, y_train=y)
    code = "import pandas as pd\ndef load():\n    return pd.read_csv('t.csv')\n"
    Path("load_t.py").write_text(code)
    files = ["csv:t.csv", "parquet:t.parquet", "npz:t.npz", "load_t.py:load"]
    sets = [load_data(small(dataset=name, target="kind")) for name in files]
    table = datasets.Dataset.from_pandas(frame)
    forms = [frame, (x, y), (torch.from_numpy(x), torch.from_numpy(y)), Pairs(x, y), table]
    forms.append(datasets.DatasetDict(train=table))
    sets += [OwnData(form, target="kind").read() for form in forms]
    train, test = sets[0].x_train, sets[0].x_test
    np.testing.assert_array_equal(np.bincount(sets[0].y_test), [4, 4, 4])  # a fifth of each class
    assert len({row.tobytes() for row in [*train, *test]}) == 60  # all rows, each once
    for data in sets[1:]:
        np.testing.assert_allclose(data.x_train, train, rtol=1e-6)
        np.testing.assert_allclose(data.x_test, test, rtol=1e-6)


def test_splits_of_ones_own(tmp_path):
    """Index lists, a partitioner and a column; rows of no client are tested on."""
    frame = make_frame()
    lists = [[0, 1, 2, 5], [7, 8, 9], [5, 30]]
    rows = frame.drop(columns="site")
    by_lists, by_column, five = (
        OwnData(table, target="kind", **options)
        for table, options in (
            (rows, {"split": lists}), (frame, {"client_column": "site"}),
            (rows, {"split": IidPartitioner(5)}),
        )
    )  # fmt: skip
    base = small(rounds=1, clients_per_evaluation=0)
    config = run(base, data=by_lists, out=tmp_path / "lists", progress=False).config
    assert (config.num_clients, config.partition) == (3, "given")
    data, split = load_data(config), load_split(config)
    for indices, expected in zip(split.clients, lists, strict=True):
        np.testing.assert_array_equal(
            data.x_train[indices], rows.drop(columns="kind").iloc[expected]
        )
    assert len(data.x_test) == 60 - 8
    config = run(base, data=by_column, out=tmp_path / "column", progress=False).config
    assert (config.num_clients, config.partition) == (4, "natural")
    assert sorted(np.concatenate(five.read().split)) == [*range(48)]  # all not tested on


def test_a_predictor_takes_pictures_as_pil_and_others_have_them():
    """One or a list; channels last; a palette as its colours; grey with a channel or without."""
    raw = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), np.uint8)
    first, pictures = raw.transpose(0, 3, 1, 2), [*map(Image.fromarray, raw)]
    inputs, grey = InputTransform.fit(first), InputTransform.fit(first[:, :1])
    indexed = pictures[0].quantize(30)  # one of 30 colours for each pixel
    shades = [*map(Image.fromarray, raw[..., 0])]
    cases = [(form, first) for form in (pictures, raw, torch.from_numpy(raw))]
    for form, same in (*cases, (pictures[1], first[1:2]), (indexed, [indexed.convert("RGB")])):
        assert torch.equal(inputs(form), inputs(same))
    for form in (raw[..., :1], raw[..., 0], shades):
        assert torch.equal(grey(form), grey(first[:, :1]))
    for form, message in (
        (shades[0], r"\(n, 3, 5, 6\), got \(1, 1, 5, 6\); resize pictures"),
        (raw[:, :4], r"\(n, 3, 5, 6\), got \(4, 4, 6, 3\); resize pictures"),
        ([pictures[0], pictures[0].resize((5, 5))], "of one size and mode"),
    ):
        refused(message, inputs, form, error=ValueError)


def test_pictures_of_another_scale_than_in_training_are_said():
    """As torchvision's ToTensor makes them, or as files have them if training had these."""
    pictures = np.random.default_rng(0).integers(0, 256, (9, 3, 5, 5), dtype=np.uint8)
    for trained in (pictures, pictures / np.float32(255)):
        inputs = InputTransform.fit(trained)
        inputs(trained)  # a warning would be an error
        other = pictures / np.float32(255) if trained is pictures else pictures
        with pytest.warns(UserWarning, match=r"pass all as they were in training"):
            inputs(other)


def test_tables_whose_columns_have_numbers_or_no_name(tmp_path):
    """A frame's columns may be numbers; pandas' index, which csv files hold, is no input."""
    frame = pd.DataFrame(np.eye(9)).assign(kind=np.arange(9) % 3)
    inputs = OwnData(frame, target="kind").read().inputs
    np.testing.assert_array_equal(inputs(frame), inputs(np.eye(9)))
    frame.to_csv(tmp_path / "a.csv")
    data = load_data(small(dataset=f"csv:{tmp_path}/a.csv", target="kind"))
    assert data.columns == tuple("012345678")


def test_a_test_draw_leaves_each_client_an_example(caplog):
    """By index lists, which may overlap, or a column; a split that is not used is said."""
    x, y = np.eye(12), np.arange(12) % 3
    lists = [[0], [1], [0, 2], [*range(3, 12)]]
    for seed in range(8):
        data = OwnData((x, y), split=lists, test_share=0.4, test_seed=seed).read()
        assert all(map(len, data.split))
        frame = pd.DataFrame(x).assign(label=y, who=[*"abcd", *"eeeeeeee"])
        data = OwnData(frame, client_column="who", test_share=0.4, test_seed=seed).read()
        assert {*data.natural_ids} == {*"abcde"}
        assert len(data.y_train) + len(data.y_test) == 12
    OwnData({"train": (x, y), "validation": (x, y)}).read()
    assert "data: not used: validation; pass it as test=..." in caplog.text


def test_texts_are_encoded_by_the_predictor(tmp_path):
    """A run on LEAF's form: the predictor takes strings, and names the next character."""
    rows = {"x": ["abca", "bcab", "cabc"] * 4, "y": [*"bca"] * 4}
    for part in ("train", "test"):
        write_leaf(tmp_path, part, {"u": rows, "v": rows})
    config = small(dataset=f"leaf:{tmp_path}", model="char-lstm", num_clients=2, rounds=1)
    finished = run(config, out=tmp_path / "run", progress=False)
    predictor = load_predictor(finished.folder)
    assert predictor.inputs.classes == ("a", "b", "c")
    accuracy = predictor.evaluate(["abca", "bcab", "cabc"], ["b", "c", "a"]).accuracy
    assert accuracy == finished.summary["accuracy"]
    message = "expected characters of the training texts, got 'x'"
    refused(message, predictor.predict, ["abcx"], error=ValueError)


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Linear(*input_shape, num_classes)


def test_networks_of_ones_own(tmp_path, monkeypatch):
    """A module is where training starts; a function and a file build the same network."""
    monkeypatch.chdir(tmp_path)
    code = "from torch import nn\nbuild = lambda shape, classes: nn.Linear(*shape, classes)\n"
    Path("mynet.py").write_text(code)
    frame, base, network = make_frame().drop(columns="site"), small(rounds=0), nn.Linear(4, 3)
    options = {"data": OwnData(frame, target="kind"), "progress": False}

    def folder(name: str, model: object) -> Path:
        return run(base, model=model, out=tmp_path / name, **options).folder

    module = folder("module", network)
    np.testing.assert_array_equal(load_model(module)["weight"], network.weight.detach())
    assert load_predictor(module, model=network).predict(frame).shape == (60, 3)
    expected = load_model(folder("function", build))["weight"]
    for i, model in enumerate((lambda shape, c: build(shape, c), "mynet.py:build", "mynet:build")):
        np.testing.assert_array_equal(load_model(folder(f"{i}", model))["weight"], expected)
    table = compare({"a": base}, model=build, out=tmp_path / "c", **options)
    assert "accuracy" in set(table.metric)
    message = r"other processes .* cannot import it; put a function of"
    refused(message, run, base, model=network, engine="ray", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "hf:t.csv"}, "did you mean csv:.*t.csv"),
        ({"dataset": "t.csv"}, "did you mean 'csv:t.csv'"),
        ({"dataset": "csv:u.csv"}, "no file or folder at /"),
        ({"dataset": "csv:."}, "did you mean folder:"),
        ({"dataset": "hf:./no"}, "no folder at /"),
        ({"target": "kinds"}, "target: .* has the columns .* did you mean 'kind'"),
        ({"test_share": 0.0}, "test-share: the data have no test set"),
        ({"client_column": "where"}, "client-column: .* has the columns"),
        ({"dataset": "t.py:load"}, "t.py:load: there is no file /"),
        ({"model": "mlpp"}, "did you mean 'mlp'"),
        (
            {"partition": "given", "client_column": "", "dataset": "digits"},
            "expected given exactly if the data come with a split",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_cure(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    make_frame().to_csv("t.csv", index=False)
    options = {"dataset": "csv:t.csv", "target": "kind", **NATURAL, **options}
    refused(message, run, small(**options), progress=False, out=tmp_path / "run")


def split_by(split: object) -> OwnData:
    return OwnData((np.eye(4), np.arange(4) % 2), split=split, test_share=0.5)


GAPS = make_frame().astype({"kind": object}).drop(columns="site")
GAPS.loc[[3, 7], "kind"] = None
GAPS.loc[4, "height"] = np.nan


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_frame(), "target: .* has the columns"),
        (OwnData(make_frame(), target="kind"), r"got others in site \('site 0'\); say in a"),
        (OwnData((np.ones((4, 2)), np.ones(3, int))), r"one label each, got shapes \(4, 2\)"),
        (split_by([[0], [4]]), "3 for client 1.*index: 4"),
        (split_by([[True] * 4, [False] * 4]), "indices 0 ... 3 for client 0, .*got 4 of bool"),
        (split_by([[0, 0], [1]]), "each once, got 2 of int64, 1 repeated"),
        (split_by([[0.5], [1]]), "got 1 of float64, 0 repeated, 1 no such index: 0.5"),
        (split_by([[0], []]), "for client 1, each once, got 0"),
        (split_by([[0], [1], [2], [3]]), "as each client keeps one; give a test set"),
        (np.eye(4), r"train set: expected \(x, y\), a data frame"),
        ("csv:wine.csv", "or dataset='csv:...' instead of data, got str"),
        ((np.eye(4), np.ones(4)), "train set: expected two classes or more, got 1"),
        (OwnData(make_frame()[:0], target="kind", client_column="site"), "two classes or more, go"),
        (OwnData(make_frame()[["ring", *["ring", "kind"]]], target="kind"), "got twice ring"),
        ({"test": (np.eye(4), np.arange(4))}, "expected train among the splits, got test"),
        (OwnData(GAPS, target="kind"), r"gaps \(rows\): kind \(2\), height \(1\); say in a"),
        (OwnData(GAPS, target="height", client_column="kind"), r"height \(1\), kind \(2\); say"),
        (torch.utils.data.ChainDataset([]), "of known length, got Chain.* read its examples first"),
        (datasets.Dataset.from_dict({"x": [1.0]}).to_iterable_dataset(), "streaming=False"),
    ],
)
def test_objects_that_do_not_fit_are_refused(data, message):
    refused(message, run, small(), data=data, progress=False)


def test_labels_that_do_not_begin_at_0_are_as_many_classes():
    data = OwnData((np.eye(9, dtype=np.float32), np.arange(9) % 3 + 1)).read()
    assert (data.num_classes, data.classes) == (3, (1, 2, 3))
    assert sorted(set(data.y_train)) == [0, 1, 2]
    # these numbers are names; those that stand for other names are not
    inputs = load_data(small(**data.keep(), num_clients=2)).inputs
    assert inputs.labels([3, 1]).tolist() == [2, 0]
    digits = datasets.ClassLabel(names=["1", "10", "2"])
    features = datasets.Features({"x": datasets.Value("float32"), "label": digits})
    table = datasets.Dataset.from_dict({"x": np.arange(9.0), "label": [0, 1, 2] * 3}, features)
    inputs = load_data(small(**OwnData(table).read().keep(), num_clients=2)).inputs
    assert inputs.labels(["10", "2"]).tolist() == [1, 2]
    message = "expected the classes '1', '10', '2', got 1, 2; give na"
    refused(message, inputs.labels, [1, 2], error=ValueError)


def test_a_test_set_is_read_by_the_names_of_columns_and_classes():
    frame = make_frame().drop(columns="site")
    mixed = frame[["weight", "kind", "girth", "ring", "height"]]
    data = OwnData(frame, test=mixed, target="kind").read()
    np.testing.assert_array_equal(data.x_train, data.x_test)
    other = OwnData(frame, test=frame.rename(columns={"ring": "rings"}), target="kind")
    refused("test set: other columns than the train set: ring, rings", other.read)

    def table(names):
        kinds = {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
        rows = {"x": np.arange(3.0), "label": [names.index(name) for name in "abc"]}
        return datasets.Dataset.from_dict(rows, datasets.Features(kinds))

    data = OwnData(table(["a", "b", "c"]), test=table(["c", "b", "a"])).read()
    np.testing.assert_array_equal(data.y_train, data.y_test)
    assert data.classes == ("a", "b", "c")
