"""A node's own file has the run's columns, units, kinds and classes, or is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from fedntk.clients import SGDClient, client_app
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.simulations import OwnData
from fedntk.simulations.config.data import DatasetSettings
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.load import load_own
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import SeededFedAvg

from .outcomes import refused

NAMES = ("age", "glucose", "weight", "smoker")
CLASSES = ("alive", "dead")


def patients(seed: int, n: int = 200) -> NDArray[np.float64]:
    """Whole years, mg/dl, kg, 0 or 1."""
    rng = np.random.default_rng(seed)
    age, smoker = rng.integers(20, 90, n), rng.random(n) < 0.05
    return np.column_stack([age, rng.normal(100, 30, n), rng.normal(75, 15, n), smoker])


def outcomes(x: NDArray[np.float64]) -> NDArray[np.str_]:
    return np.array(CLASSES)[(x[:, 0] > 60).astype(int)]


@pytest.fixture(scope="module")
def pooled() -> Data:
    x = patients(0, 1000)
    return OwnData(pd.DataFrame(x, columns=list(NAMES)).assign(label=outcomes(x))).read()


def load(data: Data, folder: Path, *, x: Any = None, check: bool = True, **arrays: Any) -> Any:
    x = patients(1) if x is None else x
    arrays = {"x": x, "y": outcomes(patients(1)), "columns": np.array(NAMES), **arrays}
    np.savez(folder / "own.npz", **{k: v for k, v in arrays.items() if v is not None})
    return load_own(str(folder / "own.npz"), data, 1000, check_ranges=check)


def test_columns_are_ordered_by_their_names(pooled, tmp_path):
    """The file's order plays no part: the client's tensors are equal to the bit."""
    x, y = load(pooled, tmp_path).train
    order = [2, 0, 3, 1]
    shuffled = patients(1)[:, order], np.array(NAMES)[order]
    x_too, y_too = load(pooled, tmp_path, x=shuffled[0], columns=shuffled[1]).train
    assert torch.equal(x, x_too)
    assert torch.equal(y, y_too)
    expected = (patients(1) - pooled.x_train.mean(0)) / pooled.x_train.std(0)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)


def changed(column: int, how: Any) -> NDArray[np.float64]:
    x = patients(1)
    x[:, column] = how(x[:, column])
    return x


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"columns": None}, "columns = age, glucose, weight, smoker, .* got no names of the col"),
        ({"columns": np.array(["age", "sugar", "weight", "smoker"])}, "missing: glucose; unknown"),
        ({"columns": np.array(["age", "age", "weight", "smoker"])}, "missing: glucose"),
        ({"columns": np.array(NAMES[:3])}, r"shape \(200, 4\); missing: smoker"),
        ({"x": patients(1)[:, :3], "columns": np.array(NAMES[:3])}, "missing: smoker"),
        # other units: mmol/l, pounds, grams, months, standardised by the node
        ({"x": changed(1, lambda c: c / 18)}, "glucose has mean 5.6"),
        ({"x": changed(2, lambda c: 2.2046 * c)}, "weight has mean 16"),
        ({"x": changed(2, lambda c: 1000 * c)}, "weight has mean 7.*e.04"),
        ({"x": changed(0, lambda c: 12 * c)}, "age has mean"),
        ({"x": changed(0, lambda c: (c - c.mean()) / c.std())}, "age has values such as -1"),
        ({"x": changed(1, lambda c: (c - c.mean()) / c.std())}, "glucose has mean"),
        # a code for gaps in one row, other codes, other kinds
        ({"x": changed(1, lambda c: np.where(np.arange(200) == 7, -9999, c))}, "glucose has mean"),
        ({"x": changed(3, lambda c: c + 1)}, "smoker has values such as 1, 2, and 0 and 1 in tr"),
        ({"x": changed(3, lambda c: c - 0.05)}, "smoker has values such as -0.05"),
        ({"x": changed(0, lambda c: c + 0.5)}, "age has values such as .*, and whole numbers"),
        ({"x_test": patients(2)[:, ::-1], "y_test": outcomes(patients(2))}, "age has mean"),
        # the hospital's own coding, in which 1 may stand for either
        ({"y": (patients(1)[:, 0] > 60).astype(int)}, "'alive', 'dead', got 0, 1; give"),
        ({"y": patients(1)[:, 0] > 60}, "the classes 'alive', 'dead', got 'False', 'True'"),
        ({"y": np.full(200, "Dead")}, "the classes 'alive', 'dead', got 'Dead'"),
    ],
)
def test_other_columns_units_kinds_and_classes_are_refused(pooled, tmp_path, arrays, message):
    refused(f"^data-path: .*{message}", load, pooled, tmp_path, **arrays)


def test_a_node_of_another_kind_of_patients_is_accepted(pooled, tmp_path):
    """Smokers only, of one age, all heavy: two deviations away, and columns that do not vary.

    The rounded deviation of a constant column may be above 0.
    """
    x = patients(1)
    x[:, 0], x[:, 3], x[:, 2] = 65, 1, x[:, 2] + 30
    for level in (162.1, 163.3, 164.7, 170.9):
        constant = np.column_stack([x[:, 0], np.full(200, level), x[:, 2:]])
        load(pooled, tmp_path, x=constant, y=np.full(200, "dead"))
    assert load(pooled, tmp_path, x=x, y=np.full(200, "dead")).train[0].shape == (200, 4)
    x[:, 0] *= 12
    refused("check-ranges=false", load, pooled, tmp_path, x=x)
    assert len(load(pooled, tmp_path, x=x, check=False).train[0]) == 200


def test_a_numbering_of_classes_is_that_of_the_file(pooled, tmp_path):
    """With classes = dead, alive the label 0 is dead."""
    expected = load(pooled, tmp_path).train[1]
    y = (outcomes(patients(1)) == "alive").astype(int)
    loaded = load(pooled, tmp_path, y=y, classes=np.array(CLASSES[::-1]))
    assert torch.equal(loaded.train[1], expected)


@pytest.mark.parametrize("change", [lambda x: x / 255, lambda x: x / 127.5 - 1, lambda x: x * 257])
def test_pictures_on_another_scale_are_refused(tmp_path, change):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 3, 8, 8)).astype(np.float64), np.arange(40) % 2
    data = OwnData((x, y)).read()
    assert len(load(data, tmp_path, x=x, y=y, columns=None).train[0]) == 40
    message = "pictures have values up to 1,|channel or column 0 has"
    refused(message, load, data, tmp_path, x=change(x), y=y, columns=None)


def test_a_predictor_warns_of_other_units(pooled):
    frame = pd.DataFrame(patients(1), columns=list(NAMES))
    pooled.inputs(frame)
    for changed_frame, message in (
        (frame.assign(weight=frame.weight * 2.2046), r"weight has mean 16\d\.\d"),
        (frame.assign(smoker=frame.smoker + 1), "smoker has values such as 1, 2"),
    ):
        with pytest.warns(UserWarning, match=message):
            pooled.inputs(changed_frame)


def test_the_schema_is_saved_with_the_model(pooled, tmp_path):
    pooled.inputs.save(tmp_path)
    loaded = InputTransform.load(tmp_path)
    assert loaded is not None
    assert loaded.kinds == ("whole", "real", "real", "0 or 1")
    assert loaded.digest == pooled.inputs.digest


def replies(kind: str, schema: str, stated: str) -> Any:
    """Replies of clients with one schema to a strategy that states another."""
    x, y, network = torch.eye(3), torch.arange(3), torch.nn.Linear(3, 3)
    app = client_app(lambda context: SGDClient(torch.nn.Linear(3, 3), x, y, schema=schema))
    strategy = SeededFedAvg(schema=stated, min_available_nodes=2)
    grid, arrays = LocalGrid(app, 2, {}), ArrayRecord(network.state_dict())
    configure = strategy.configure_train if kind == "train" else strategy.configure_evaluate
    return list(grid.send_and_receive(configure(1, arrays, ConfigRecord(), grid)))


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_client_with_another_schema_refuses_to_work(kind):
    for reply in replies(kind, "icu-2", "icu-3"):
        assert "name or digest 'icu-3', and this client's have 'icu-2'" in reply.error.reason
    for schema, stated in (("icu-3", "icu-3"), ("icu-2", "")):
        assert not any(reply.has_error() for reply in replies(kind, schema, stated))


def test_a_schema_is_that_of_columns_whatever_the_order_of_rows():
    x = patients(0)
    frame = pd.DataFrame(x, columns=list(NAMES)).assign(label=outcomes(x))
    swapped = frame[["glucose", "age", "weight", "smoker", "label"]]
    tables = frame, swapped, frame.iloc[::-1]
    digests = [OwnData(table, test=table).read().digest for table in tables]
    assert digests[0] == digests[2] != digests[1]


def frame_of(x: NDArray[np.float64], y: Any) -> pd.DataFrame:
    return pd.DataFrame(x, columns=list(NAMES)).assign(label=y)


def tables(folder: Path, kind: str, **parts: pd.DataFrame) -> str:
    folder.mkdir(exist_ok=True)
    for name, frame in parts.items():
        path = folder / f"{name}.{kind}"
        if kind == "parquet":
            frame.to_parquet(path, index=False)
        else:
            frame.to_csv(path, index=False, sep=";", decimal=",", encoding="cp1252")
    return str(folder)


HOW = {"separator": "semicolon", "decimal": "comma", "encoding": "cp1252"}
GERMAN = DatasetSettings(**HOW)


@pytest.mark.parametrize("kind", ["csv", "parquet", "CSV"])
def test_a_table_has_the_tensors_of_its_arrays(pooled, tmp_path, kind):
    """In any order of its columns, with a column of the run's owners, and a test set beside it."""
    expected = load(pooled, tmp_path, x_test=patients(2), y_test=outcomes(patients(2)))
    parts = {
        name: frame_of(patients(seed), outcomes(patients(seed))).iloc[:, [2, 4, 0, 3, 1]]
        for name, seed in (("Train", 1), ("test", 2))
    }
    parts["Train"]["site"] = "A"
    place = tables(tmp_path / "own", kind, **parts)
    settings = DatasetSettings(**{**HOW, "client_column": "site"})
    loaded = load_own(place, pooled, 1000, settings=settings)
    for ours, theirs in zip(loaded[:2], expected[:2], strict=True):
        assert all(map(torch.equal, ours, theirs))
    one = load_own(f"{place}/Train.{kind}", pooled, 1000, settings=settings)
    assert torch.equal(one.train[0], expected.train[0])
    assert len(one.test[1]) == 0
    dead = (outcomes(patients(1)) == "dead").mean()
    shares = f"classes alive {1 - dead:.1%}, dead {dead:.1%}"
    assert one.describe(CLASSES) == f"rows 200, columns 4, {shares}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="age"), "missing: age"),
        (lambda f: f.assign(smoker=np.where(f.smoker > 0, "yes", "no")), r"others in smoker \('no"),
        (lambda f: f.assign(zip=1067), "missing: none; unknown: zip"),
        (lambda f: f.drop(columns="label"), "target: the set has the columns .* got 'label'"),
        (lambda f: f.assign(label=(f.age > 60).astype(int)), "'alive', 'dead', got '0', '1'"),
        (lambda f: f.assign(label=np.where(f.age > 60, "dead", "Alive")), "got 'Alive'"),
        (lambda f: f.assign(glucose=f.glucose.where(f.age > 30)), r"gaps \(rows\): glucose"),
        (lambda f: f.assign(glucose=f.glucose / 18), "glucose has mean 5.6"),
        (lambda f: f.head(0), r"1 \.\.\. 1000 examples, got 0"),
        (lambda f: pd.concat([f] * 6), r"1 \.\.\. 1000 examples, got 1200"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_that_does_not_fit_is_refused(pooled, tmp_path, kind, change, message):
    place = tables(tmp_path, kind, own=change(frame_of(patients(1), outcomes(patients(1)))))
    refused(f"^data-path: .*({message})", load_own, place, pooled, 1000, settings=GERMAN)


@pytest.mark.parametrize("labels", [["1", "2", "A"], ["1", "2"], ["yes", "no"]])
def test_labels_of_a_table_are_the_runs_by_name_whatever_the_node_lacks(tmp_path, labels):
    """A node without the class A has numbers only; with one class it is no error."""
    x = patients(0, 60)
    pooled = OwnData(frame_of(x, np.resize(labels, 60))).read()
    classes = [str(name) for name in pooled.inputs.classes]
    for some in (labels[:2], labels[:1]):
        y = np.resize(some, 30)
        place = tables(tmp_path / "own", "csv", own=frame_of(x[:30], y))
        loaded = load_own(place, pooled, 60, settings=GERMAN).train[1]
        assert [classes[i] for i in loaded] == y.tolist()
