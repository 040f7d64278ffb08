"""A schema: words, gaps, dates and texts become the same numbers everywhere, or are refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pytest
import statsmodels.api as sm
import torch
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder
from torch import nn

from fedntk.clients import PrivacyLedger
from fedntk.ntk import NetworkPredictor
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.predictors.schema import Schema
from fedntk.simulations import Config, OwnData, load_predictor, run
from fedntk.simulations.config.data import DatasetSettings
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.load import load_data, load_own
from fedntk.simulations.data.own import read_parts
from fedntk.simulations.data.schema import load_schema, propose_schema
from fedntk.simulations.deploy.deployment import write_deployment
from fedntk.simulations.deploy.node import NodeSettings, check_node
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.engine.runs import read_config
from fedntk.simulations.engine.server_app import serve as serve_run
from fedntk.strategies.core.replies import NoUsableReply

from ..conftest import refused
from .outcomes import grid_of
from .test_cli import fedntk

GLM = "glm"
SITES = ("Aarau", "Bülach", "Chur")
TABLES: dict[str, dict[str, Any]] = {
    "age": {"kind": "number", "unit": "years", "range": [0, 120], "gap": "mean", "indicator": True},
    "dose": {"kind": "number", "unit": "mg", "missing": ["-9"], "gap": 0.5},
    "smoker": {
        "kind": "category",
        "categories": ["no", "yes"],
        "reference": "no",
        "unseen": "refuse",
        "any_case": True,
    },
    "stage": {"kind": "category", "categories": ["I", "II", "III"], "gap": "unknown"},
    "visit": {"kind": "date", "format": "%d.%m.%Y", "range": ["01.01.1990", "31.12.2030"]},
    "note": {"kind": "text", "features": 8, "gap": ""},
    "file": {"kind": "ignored"},
    "outcome": {"kind": "target", "categories": ["alive", "dead"]},
    "site": {"kind": "client"},
}
YES_NO = {"categories": ["N", "J"], "reference": "N", "unseen": "refuse", "any_case": True}


def patients(n: int = 120, seed: int = 0) -> pd.DataFrame:
    """Text as a csv file holds it, with gaps, of three sites that differ."""
    rng = np.random.default_rng(seed)
    site = np.arange(n) % 3
    age = rng.integers(20, 70, n) + 10 * site
    frame = pd.DataFrame({"age": np.where(rng.random(n) < 0.1, "", age.astype(str))})
    frame["dose"] = np.where(rng.random(n) < 0.1, "-9", rng.normal(5, 1, n).round(2).astype(str))
    frame["smoker"] = rng.choice(["no", "yes", "Yes"], n)
    frame["stage"] = rng.choice(["I", "II", "III", "NA"], n)
    frame["visit"] = pd.Series(pd.date_range("2020-01-31", periods=n)).dt.strftime("%d.%m.%Y")
    frame["note"] = rng.choice(["Schmerzen im Bein", "kein Fieber", ""], n)
    frame["file"] = [f"p{i}" for i in range(n)]
    frame["outcome"] = np.where(age + rng.normal(0, 10, n) > 55, "dead", "alive")
    return frame.assign(site=np.array(SITES)[site])


def read(frame: pd.DataFrame, tables: Any = TABLES, **options: Any) -> Data:
    return OwnData(frame, frame, schema=Schema.parse(tables), **options).read()


def one(kind: str, values: Any, **settings: Any) -> np.ndarray:
    """What a column of a kind becomes."""
    series = pd.Series(values, dtype=None if len(values) else object)
    return Schema.parse({"a": {"kind": kind, **settings}}).encode(pd.DataFrame({"a": series}))


def test_the_numbers_are_those_of_scikit_learn_on_the_pooled_rows():
    """Its imputer sums in another order, so the mean differs by at most n roundings."""
    frame, data = patients(), read(patients())
    age = frame[["age"]].replace("", np.nan).astype(float)
    dose = frame[["dose"]].astype(float)
    stage = frame[["stage"]].replace("NA", "unknown")
    stages = OneHotEncoder(categories=[["I", "II", "III", "unknown"]], sparse_output=False)
    visit = pd.to_datetime(frame[["visit"]].visit, format="%d.%m.%Y") - pd.Timestamp("2000-01-01")
    blocks = {
        "age": SimpleImputer(strategy="mean", add_indicator=True).fit_transform(age),
        "dose": SimpleImputer(missing_values=-9, strategy="constant", fill_value=0.5)
        .fit_transform(dose),
        "smoker": OneHotEncoder(drop="first", sparse_output=False)
        .fit_transform(frame[["smoker"]].apply(lambda s: s.str.lower())),
        "stage": stages.fit_transform(stage),
        "visit": visit.dt.days.to_numpy()[:, None],
        "note": HashingVectorizer(n_features=8, ngram_range=(1, 2)).transform(frame.note).toarray(),
    }  # fmt: skip
    expected = np.hstack([*blocks.values()])
    np.testing.assert_allclose(data.x_train, expected, rtol=len(frame) * 2.0**-53, atol=0)
    names = ["age", "age=?", "dose", "smoker=yes", "stage=I", "stage=II", "stage=III"]
    assert list(data.columns[:9]) == [*names, "stage=unknown", "visit"]
    assert data.columns[9:] == tuple(f"note#{i}" for i in range(8))
    assert data.classes == ("alive", "dead")
    assert {*data.natural_ids} == {*SITES}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_nodes_read_the_bits_of_the_pooled_table(tmp_path, kind):
    """One node's file is a German spreadsheet's; columns have another order, and no site."""
    data, frame = read(patients()), patients()
    data.inputs.save(tmp_path)
    inputs = InputTransform.load(tmp_path)
    assert inputs is not None
    known = Data.of_inputs(inputs, data.num_train)
    for i, site in enumerate(SITES):
        mine = frame[frame.site == site].drop(columns="site").iloc[:, ::-1]
        path, settings = tmp_path / f"{i}.{kind}", DatasetSettings()
        if kind == "parquet":
            mine.to_parquet(path, index=False)
        else:
            german = {"sep": ";", "encoding": "cp1252"} if i == 1 else {}
            mine = mine.assign(dose=mine.dose.str.replace(".", ",")) if german else mine
            mine.to_csv(path, index=False, **german)
            names = ("semicolon", "comma", "cp1252") if german else ("comma", "point", "utf-8")
            how = dict(zip(("separator", "decimal", "encoding"), names, strict=True))
            settings = DatasetSettings(**how)
        own = load_own(str(path), known, 100, settings=settings)
        rows = np.flatnonzero(frame.site == site)
        assert np.array_equal(own.raw, data.x_train[rows])
        assert all(map(torch.equal, own.train, data.train(rows)))


def test_a_saved_predictor_takes_raw_rows_to_the_same_bits(tmp_path):
    """As text, as pandas reads a file, in another order of columns, with others beside them."""
    data, frame = read(patients()), patients()
    predictor = NetworkPredictor(nn.Linear(len(data.columns), 2))
    predictor.inputs = data.inputs
    predictor.save(tmp_path)
    loaded = NetworkPredictor.load(tmp_path, nn.Linear(len(data.columns), 2))
    assert loaded.inputs is not None
    assert loaded.inputs.digest == data.digest
    frame.to_csv(tmp_path / "rows.csv", index=False)
    expected = predictor.predict(data.x_train)
    for rows in (frame, pd.read_csv(tmp_path / "rows.csv"), frame.iloc[:, ::-1]):
        assert torch.equal(loaded.predict(rows), expected)
    assert torch.equal(loaded.predict(frame.drop(columns=["file", "site", "outcome"])), expected)
    refused(
        "missing: smoker; a column of empty cells", loaded.predict, frame.drop(columns="smoker")
    )
    twice = pd.concat([frame, frame[["age"]]], axis=1)
    refused("different names, got twice age", loaded.predict, twice)
    with pytest.warns(UserWarning, match="stage: 'IV' in row 1: taken for zeros"):
        loaded.predict(frame.head(1).assign(stage="IV"))


def test_words_that_pandas_may_have_taken_for_gaps_are_said():
    with pytest.warns(UserWarning, match="a: 'nan' in row 1: taken for gaps; .*keep_default_na"):
        one("category", [np.nan, "x"], categories=["None", "x"], gap="x")


def test_a_mean_stays_among_the_values_it_is_of():
    """(x + x + x) / 3 is rounded twice, and may lie outside a range that ends at x."""
    schema = Schema.parse({"a": {"kind": "number", "gap": "mean", "range": [0, 0.7]}})
    for n in range(1, 60):
        assert schema.fit(np.full((n, 1), 0.7)).tables["a"]["gap"] == 0.7


@pytest.mark.parametrize(
    ("kind", "values", "settings", "expected"),
    [
        ("number", ["1e3", " -.5 ", "007", 2, 0.1], {}, [1000, -0.5, 7, 2, 0.1]),
        ("number", ["NA", "?", None, np.nan, ""], {"gap": 3}, [3] * 5),
        ("number", [None, 4.0], {"gap": -1.5, "indicator": True}, [[-1.5, 1], [4, 0]]),
        ("number", ["1.7e308", "2"], {"range": [0, float("inf")]}, [1.7e308, 2]),
        ("number", [2**53 + 2, True - 1], {}, [2**53 + 2, 0]),
        ("category", [True, False, "TRUE"], {"categories": ["true"], "any_case": True}, [1, 0, 1]),
        ("category", ["J", None, "n"], YES_NO | {"gap": "N"}, [1, 0, 0]),
        ("category", ["a", "b ", "c"], {"categories": ["a", "b"]}, [[1, 0], [0, 1], [0, 0]]),
        ("category", ["c", "b"], {"categories": ["b"], "unseen": "other"}, [[0, 1], [1, 0]]),
        ("category", ["b", "a"], {"categories": ["a", "b"], "reference": "a"}, [[1], [0]]),
        ("category", ["None", None], {"categories": ["None"], "gap": "?"}, [[1, 0], [0, 1]]),
        ("category", [1.0, None, 2.0], {"categories": ["1", "2"], "gap": "1"},
         [[1, 0], [1, 0], [0, 1]]),
        ("category", ["001", "1"], {"categories": ["001", "1"]}, [[1, 0], [0, 1]]),
        ("category", ["e\u0301"], {"categories": ["\u00e9"]}, [[1]]),  # one letter, two codes
        ("date", ["2000-01-02", "2000-01-01T12:00"], {}, [1, 0.5]),
        ("date", ["2000-01-01T02:00+02:00", "1999-12-31T22:00-02:00"], {}, [0, 0]),
        ("date", ["2/1/2001"], {"format": "%d/%m/%Y"}, [367]),
        ("date", pd.to_datetime(["2000-01-03", None]), {"format": "%d.%m.%Y", "gap": "05.01.2000"},
         [2, 4]),
        ("date", pd.to_datetime(["2000-01-01 06:00"]).tz_localize("Asia/Tokyo"), {}, [-3 / 24]),
        ("text", [None, ""], {"features": 3, "gap": ""}, [[0, 0, 0]] * 2),
        ("number", ["-9.0", -9, "-9,9", 1], {"missing": ["-9", "-9,9"], "gap": 0}, [0, 0, 0, 1]),
        ("category", ["none", "SOME"], YES_NO | {"categories": ["None", "some"],
         "reference": "None"}, [0, 1]),
        ("category", ["NA", ""], {"categories": ["na"], "any_case": True, "gap": "x"},
         [[1, 0], [0, 1]]),
        ("category", ["new", "", "b"], {"categories": ["a"], "gap": "new", "unseen": "other"},
         [[0, 1, 0], [0, 1, 0], [0, 0, 1]]),
        ("category", ["", "a"], {"categories": ["A"], "any_case": True, "gap": "a"}, [[1], [1]]),
        ("category", [b"\xc3\xa9", np.bytes_(b"a")], {"categories": ["é", "a"]}, [[1, 0], [0, 1]]),
        ("date", ["2001", "2000"], {"format": "%Y"}, [366, 0]),
        ("number", [], {}, np.zeros((0, 1))),
        ("category", [], {"categories": ["a", "b"]}, np.zeros((0, 2))),
        ("text", [], {"features": 4}, np.zeros((0, 4))),
    ],
)  # fmt: skip
def test_what_a_column_becomes(recwarn, kind, values, settings, expected):
    x = one(kind, values, **settings)
    expected = np.asarray(expected, float)
    assert np.array_equal(x, expected if expected.ndim == 2 else expected[:, None])


@pytest.mark.parametrize(
    ("kind", "values", "settings", "message"),
    [
        ("number", [1, "x", "1_0", "inf", "nan0", "1,5"], {"unit": "kg"},
         "a: expected number kg, got 'x' in row 2, '1_0' in row 3, 'inf' in row 4 and 2 more"),
        ("number", [1, 121, -1], {"range": [0, 120]}, "number 0 ... 120, got '121' in row 2, '-1'"),
        ("number", [1, "", None], {}, "value in each row, got '' in row 2, 'None' in row 3; fill"),
        ("number", [True], {}, "expected number, got 'True'"),
        ("number", [2**53 + 1, 2**53], {}, "expected number, got '9007199254740993' in row 1;"),
        ("category", ["1.0", "2.0"], {"categories": ["1", "2"]}, "'1.0' in row 1, '2.0' in row 2;"),
        ("category", ["iii"], {"categories": ["III"]}, "got 'iii' in row 1; write it as the"),
        ("category", ["New"], {"categories": ["a"], "gap": "new"}, "got 'New' in row 1; write it"),
        ("text", [["a"], "b"], {}, r"text, numbers or dates, got \"\['a'\]\" in row 1; make"),
        ("category", [{"a": 1}], {"categories": ["a"]}, "a: expected text, numbers or dates"),
        ("category", ["A"], {"categories": ["a"], "unseen": "refuse"}, "category a, got 'A' in"),
        ("category", [1, 7], {"categories": ["001"]}, "got '1' in row 1; write it as"),
        ("category", [1.0], {"categories": ["1.0"]}, "read it as text \\(dtype=str\\)"),
        ("date", ["31.12.2000"], {}, "date as 2000-01-31, got '31.12.2000'"),
        ("date", ["2000-02-30"], {}, "got '2000-02-30' in row 1"),
        ("date", ["2040-01-01"], {"range": ["2000-01-01", "2030-01-01"]}, "got '2040-01-01'"),
        ("text", ["a", ""], {}, "a value in each row, got '' in row 2"),
    ],
)  # fmt: skip
def test_cells_that_do_not_fit_are_named_with_their_rows(kind, values, settings, message):
    refused(message, one, kind, values, **settings)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"a": {"kind": "numbr"}}, r"\[a\] kind: expected number, category, .*got numbr"),
        ({"a": 3}, r"\[a\] kind: .*got nothing"),
        ([{"a": 3}], "expected a table for each column, got list"),
        ({"a": {"kind": "number"}, " a": {"kind": "number"}}, "different names, got twice a"),
        *(({"a": {"kind": kind, "missing": ["-9"]}}, f"a {kind} has no 'missing'")
          for kind in ("target", "client", "ignored")),
        *(({"a": {"kind": "category", "categories": ["b"]} | settings}, "are no keywords, got")
          for settings in ({"categories": ["mean"]}, {"categories": [" "]}, {"gap": ""},
                           {"gap": "mean"}, {"unseen": ""}, {"categories": ["zeros", "b"]})),
        *(({"a": {"kind": "date", "format": form}}, "format: expected a form that tells a date")
          for form in ("%d.%d.%Y", "DD.MM.YYYY", "%d.%m.", "%Y-%m-%d %Z", "%H:%M", "%Q")),
        ({"a": {"kind": "number", "range": [0, 9], "gap": -5}}, "gap: expected number 0 ... 9,"),
        ({"a": {"kind": "text", "features": 65536}, "b": {"kind": "text", "features": 65536}},
         r"\[b\] expected at most 100000 numbers in all"),
        ({"a": {"kind": "target", "categories": ["b", "b "]}}, "categories: expected different"),
        ({"a": {"kind": "number", "categories": ["a"]}}, "a number has no 'categories'; it may"),
        ({"a": {"kind": "number", "rang": [0, 1]}}, "no 'rang'; did you mean 'range'"),
        ({"a": {"kind": "number", "range": [1, 0]}}, "range: expected least and largest value"),
        ({"a": {"kind": "number", "range": [1]}}, "range: expected least and largest value"),
        ({"a": {"kind": "number", "gap": "median"}}, "gap: expected number, mean or refuse"),
        ({"a": {"kind": "category"}}, "categories: expected different words, got"),
        ({"a": {"kind": "category", "categories": ["b", " b"]}}, "expected different words"),
        ({"a": {"kind": "category", "categories": [1, 2]}}, "a sequence of str, got list"),
        ({"a": {"kind": "category", "categories": ["b"], "reference": "c"}}, "reference: expected"),
        ({"a": {"kind": "date", "range": ["x", "y"]}}, "range: expected least and largest"),
        ({"a": {"kind": "target"}}, "expected columns of inputs .*0 names"),
        ({"a": {"kind": "category", "categories": ["b=c"]}, "a=b": {"kind": "category",
          "categories": ["c"]}}, "2 names, 1 of them different"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_meant_are_refused(tables, message):
    refused(message, Schema.parse, tables)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: f.assign(extra=1), {}, "got also extra; leave them out, or have the schema"),
        (lambda f: f.drop(columns="note"), {}, "missing: note"),
        (lambda f: f.drop(columns="outcome"), {}, "target: the set has the columns"),
        (lambda f: f.assign(outcome="dead"), {}, "expected two classes or more, got 1"),
        (lambda f: f.assign(outcome=np.linspace(0, 1, 120)), {"task": "regression"},
         "expected the classes of the schema, got real targets"),
        (lambda f: f.assign(outcome="gone"), {}, "classes of the schema, alive, dead, got 'gone'"),
        (lambda f: f.assign(age=""), {}, "age: expected values for gap = mean, got only gaps"),
        (lambda f: f.assign(age="200", stage="", smoker="x"), {},
         r"(?s)the schema\nage: expected number 0 ... 120 years, .*\nsmoker: expected"),
        (lambda f: f, {"target": "stage"}, "target: expected outcome, as in the schema, got stage"),
        (lambda f: f, {"client_column": "file"}, "expected one column of clients"),
        (lambda f: f, {"target": "age", "outcome": "ignored"},
         "target: expected no column of inputs, got age; in the schema, give it the kind target"),
        (lambda f: f, {"target": "file, note", "outcome": "ignored"}, "no .* inputs, got note"),
        (lambda f: f, {"client_column": "smoker", "site": "ignored"},
         "client-column: expected no column of inputs, got smoker; .* kind client"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(change, options, message):
    kinds = {name: {"kind": options.pop(name)} for name in TABLES.keys() & options}
    refused(message, read, change(patients()), TABLES | kinds, **options)


def test_a_mean_is_learned_only_where_moments_are():
    """Standardised data tell these as well; the mean is of the training rows, in any order."""
    own = OwnData(patients(), schema=Schema.parse(TABLES))
    refused("gap = mean is learned", own.read, standardise=False)
    frame = patients()
    digests = [read(f, client_column="site").digest for f in (frame, frame.iloc[::-1])]
    assert digests[0] == digests[1]
    ages = [float(age) for age in frame.age if age]
    schema = read(frame).schema
    assert schema is not None
    assert schema.tables["age"]["gap"] == pytest.approx(np.mean(ages), rel=1e-15)
    test = frame.assign(age="120")
    assert OwnData(frame, test, schema=Schema.parse(TABLES)).read().schema == schema


def test_a_run_learns_no_mean_if_it_standardises_nothing():
    """With noise it would be the exact mean of rows that are private."""
    own = OwnData(patients(), schema=Schema.parse(TABLES))
    refused("gap = mean is learned", run, Config(standardise=False), data=own)
    options: Any = {"noise": {"epsilon": 3.0}, "sums": {"auto_ridge": False}}
    exact = {"standardise": False, "clients_per_evaluation": 0, "public": "schema", "rounds": 1}
    options["sums"] |= {"validation_share": 0.0}
    private = Config(method="one-exchange", one_exchange=options, **exact)
    refused("gap = mean is learned", run, private, data=replace(own, test=patients()))


def test_the_setting_schema_counts_for_all_data_or_is_refused(tmp_path):
    """Pictures, arrays and named sets have no columns whose names it could have."""
    lines = (f"[{name}]\nkind = 'ignored'" for name in ("file", "site", "note", "visit", "dose"))
    smoker = "[smoker]\nkind = 'category'\ncategories = ['yes']\nany-case = true"
    more = "[outcome]\nkind = 'target'", smoker
    (tmp_path / "s.toml").write_text("\n".join([*lines, *more]))
    settings = DatasetSettings(schema=str(tmp_path / "s.toml"))
    frame = patients()[["smoker", "outcome"]]
    assert OwnData.of(OwnData(frame), settings).read().columns == ("smoker=yes",)
    pixels = np.zeros((4, 1, 6, 6)), np.arange(4) % 2
    pictures = datasets.Dataset.from_dict({
        "image": [PIL.Image.new("L", (6, 6))] * 4, "outcome": ["a", "b"] * 2,
    }).cast_column("image", datasets.Image())  # fmt: skip
    for data in (pixels, pictures):
        refused("schema: expected a table, ", OwnData.of(OwnData(data), settings).read)
    np.savez(tmp_path / "a.npz", x_train=pixels[0], y_train=pixels[1])
    for name in ("digits", f"npz:{tmp_path}/a.npz"):
        refused("schema: expected a table", load_data, replace(settings, dataset=name))


def test_a_test_class_that_nobody_trains_is_refused():
    """Also if the schema has its name."""
    stages = TABLES["outcome"] | {"categories": ["alive", "dead", "lost"]}
    own = OwnData(patients(), patients().assign(outcome="lost"), schema=Schema.parse(
        TABLES | {"outcome": stages}))  # fmt: skip
    refused("no training example has the labels lost", own.read)


def test_names_in_another_form_of_unicode_are_the_same(tmp_path):
    """In the schema, in a frame and in a file: e\u0301 is one letter, as \u00e9 is."""
    classes = {"kind": "target", "categories": ["e\u0301", "a"]}
    schema = Schema.parse({"caf\u00e9": {"kind": "number"}, "e\u0301tat": classes})
    frame = pd.DataFrame({"cafe\u0301 ": ["1", "2"] * 9, "e\u0301tat": ["\u00e9", "a"] * 9})
    data = OwnData(frame, frame, schema=schema, target="e\u0301tat").read()
    assert (data.columns, data.classes) == (("caf\u00e9",), ("\u00e9", "a"))
    frame.to_csv(tmp_path / "a.csv", index=False)
    own = load_own(str(tmp_path / "a.csv"), data, 18)
    assert np.array_equal(own.raw, data.x_train)


def test_a_node_whose_numbers_are_of_another_kind_is_refused(tmp_path):
    """0 and 1 in training, 1 and 2 at a node, as without a schema."""
    tables = {"a": {"kind": "number"}, "label": {"kind": "target"}}
    frame = pd.DataFrame({"a": ["0", "1"] * 20, "label": ["x", "y", "y", "x"] * 10})
    data = read(frame, tables)
    assert data.inputs.kinds == ("0 or 1",)
    frame.replace({"a": {"0": "2"}}).to_csv(tmp_path / "a.csv", index=False)
    refused("a has values such as 1, 2, and 0 and 1 in training", load_own,
            str(tmp_path / "a.csv"), data, 40)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        *(("1,5", 1.5), ("-9,9", 7), ("k. A.", 7), (".", 7), ("-8,8", 7), ("", 7), ("12", 12)),
        *(("1.234", "got '1,234' in row 1"), ("n.d.", "got 'n.d.' in row 1")),
    ],
)
def test_a_decimal_comma_is_of_numbers_and_not_of_gaps(tmp_path, cell, expected):
    table = {"kind": "number", "missing": ["-9,9", "-8.8", "k. A."], "gap": 7}
    schema = Schema.parse({"a": table, "label": {"kind": "target"}})
    path, settings = tmp_path / "a.csv", DatasetSettings(separator="semicolon", decimal="comma")
    pd.DataFrame({"a": [cell, "2"], "label": ["x", "y"]}).to_csv(path, index=False, sep=";")
    if isinstance(expected, str):
        refused(expected, read_parts, "csv", path, settings, schema=schema)
    else:
        part = read_parts("csv", path, settings, schema=schema)["train"]
        assert part.x.tolist() == [[expected], [2]]


def test_another_schema_has_another_digest():
    """Also if the numbers are the same, as another unit means another thing."""
    digest = read(patients()).digest
    for name, change in (("dose", {"unit": "g"}), ("age", {"range": [0, 130]})):
        assert read(patients(), TABLES | {name: TABLES[name] | change}).digest != digest


def test_examples_that_processes_pass_on_keep_their_schema(tmp_path):
    data = read(patients())
    data.write(tmp_path / "passed.npz")
    again = load_data(DatasetSettings(dataset=f"npz:{tmp_path}/passed.npz"))
    assert (again.digest, again.checksum, again.schema) == (data.digest, data.checksum, data.schema)


def test_examples_that_processes_pass_on_keep_their_moments(tmp_path):
    """And two with other moments, of rows or of targets, have other names and checksums."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "label"])
    own = OwnData(frame, frame, task="regression")
    names, checksums = set(), set()
    for name, other in {"x": frame * [2, 1], "y": frame * [1, 3]}.items():
        replace(own, train=other, test=other).read().inputs.save(tmp_path / name)
        mine = replace(own, moments=tmp_path / name)
        config = read_config(Config(method="fedavg", num_clients=3), {}, data=mine)
        data = load_data(config)
        data.write(tmp_path / "passed.npz")
        file: Any = {"dataset": f"npz:{tmp_path}/passed.npz", "task": "regression"}
        again = load_data(DatasetSettings(moments=config.moments, **file))
        assert again.checksum == data.checksum
        names.add(config.dataset)
        checksums.add(data.checksum)
    assert len(names) == len(checksums) == 2


def test_real_targets_of_a_schema_are_read_as_without_one(tmp_path):
    """Several of them, from a csv file in which all cells stay text."""
    frame = patients().assign(a=np.linspace(0, 1, 120), b=np.geomspace(1, 2, 120))
    kinds = TABLES | {"a": {"kind": "target"}, "outcome": {"kind": "ignored"}}
    data = read(frame, kinds | {"b": {"kind": "target"}})
    assert data.classes == ("a", "b")
    assert np.array_equal(data.y_train, frame[["a", "b"]])
    frame.drop(columns="b").to_csv(tmp_path / "a.csv", index=False)
    own = load_own(str(tmp_path / "a.csv"), read(frame.drop(columns="b"), kinds), 120)
    np.testing.assert_allclose(own.train[1][:, 0], (frame.a - frame.a.mean()) / frame.a.std(ddof=0))


def test_only_columns_of_text_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    assert one("category", ["a"], categories=["a"]).tolist() == [[1.0]]
    refused("a: columns of text need scikit-learn; install", one, "text", ["b"], error=ImportError)


HARD = pd.DataFrame({
    "row": [str(i + 1) for i in range(40)],
    "Größe (m)": [f"{1.5 + i / 100:.2f}" if i else "k. A." for i in range(40)],
    "weight": [f"{60 + i / 7:.3f}" if i % 9 else "" for i in range(40)],
    "grade": [str(i % 3 + 1) for i in range(40)],
    "code": [f"{i % 4:03d}" for i in range(40)],
    "ill": ["yes", "no", "Yes", "NA"] * 10,
    "born": [f"{i % 12 + 1:02d}/{i % 11 + 1:02d}/19{50 + i}" for i in range(40)],
    "seen": [f"2020-01-01T{i % 24:02d}:00:00+0{i % 3}:00" for i in range(40)],
    "story": [f"patient {i} has had some pain" if i != 5 else "" for i in range(40)],
    "name": [f"Ann{i}" for i in range(40)],
    "empty": [""] * 40,
    "constant": ["5"] * 40,
    "keyword": ["mean", "refuse"] * 20,
    "short": [f"31.12.{i + 10}" for i in range(40)],
    'say "a, b"': ["x, y", 'z "', "\\", "x\ny"] * 10,
    "label": ["dead", "alive"] * 20,
})  # fmt: skip


@pytest.mark.parametrize("decimal", ["point", "comma"])
def test_a_schema_proposed_for_a_hard_table_reads_it_back(tmp_path, decimal):
    """Each cell of the table fits what was guessed from it; the file is one that people edit."""
    frame, how = HARD, {}
    if decimal == "comma":
        how = {"separator": "semicolon", "decimal": "comma"}
        frame = frame.assign(weight=HARD.weight.str.replace(".", ","))
    path = tmp_path / "hard.csv"
    frame.to_csv(path, index=False, sep=";" if how else ",")
    text = propose_schema(path, DatasetSettings(**how))
    (tmp_path / "schema.toml").write_text(text)
    schema = load_schema(tmp_path / "schema.toml")
    kinds = {name: column.kind for name, column in schema.columns.items()}
    assert kinds == {
        "row": "ignored", "Größe (m)": "ignored", "weight": "number", "grade": "number",
        "code": "category", "ill": "category", "born": "date", "seen": "date", "story": "text",
        "name": "ignored", "empty": "ignored", "constant": "number",
        "keyword": "ignored", "short": "date",
        'say "a, b"': "category", "label": "target",
    }  # fmt: skip
    assert "; 3 different values: if they are codes, it is a category\n[grade]" in text
    assert "%d/%m/%Y, or %m/%d/%Y\n[born]" in text
    assert '[ill]\nkind = "category"\ncategories = ["no", "yes"]\n' in text
    assert "some pain" not in text
    settings = DatasetSettings(dataset=f"csv:{path}", schema=str(tmp_path / "schema.toml"), **how)
    data = load_data(settings)
    assert len(data.x_train) + len(data.x_test) == 40
    weights = [float(weight) for weight in HARD.weight if weight]
    assert schema.tables["weight"]["gap"] == np.median(weights)


def test_a_range_is_proposed_only_if_it_is_finite(tmp_path):
    for last, number in (("1.7e308", 0), ("4e307", 1)):
        (tmp_path / "a.csv").write_text(f"a,label\n1.5e307,x\n{last},y\n")
        text = propose_schema(tmp_path / "a.csv", DatasetSettings())
        assert text.count("\nrange = ") == number
        assert "Infinity" not in text


def test_coefficients_are_those_of_the_pooled_encoded_rows_by_sensible_names(tmp_path):
    """To the 1e-6 that a logistic regression from sums has; see test_regression."""
    tables = TABLES | {name: {"kind": "ignored"} for name in ("dose", "visit", "note")}
    tables["stage"] = tables["stage"] | {"reference": "I"}
    config = Config(method="glm", rounds=9, model="linear", num_clients=3, partition="natural")
    frame, test = patients(600), patients(60, 1)
    own = OwnData(frame, test, schema=Schema.parse(tables))
    done = run(config, data=own, out=tmp_path, progress=False)
    rows = pd.read_csv(done.folder / "details" / "coefficients.csv").set_index("name")
    names = ["age", "age=?", "smoker=yes", "stage=II", "stage=III", "stage=unknown"]
    assert list(rows.index) == [*names, "(constant)"]
    data = own.read()
    pooled = sm.Logit(data.y_train, sm.add_constant(data.x_train, prepend=False))
    fit = pooled.fit(disp=0, tol=1e-14)
    np.testing.assert_allclose(rows.coefficient, fit.params, rtol=1e-6)
    np.testing.assert_allclose(rows.standard_error, fit.bse, rtol=1e-6)
    predicted = load_predictor(done.folder).predict_proba(test)[:, 1]
    np.testing.assert_allclose(predicted, fit.predict(np.c_[data.x_test, np.ones(60)]), rtol=1e-6)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """One exchange of sums, in which the order of replies plays no part, over the three sites."""
    for part, frame in (("train", patients()), ("test", patients(60, seed=1))):
        (tmp_path / "pool").mkdir(exist_ok=True)
        frame.to_csv(tmp_path / "pool" / f"{part}.csv", index=False)
    lines = []
    for name, table in TABLES.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (tmp_path / "schema.toml").write_text("\n".join(lines))
    return Config(
        method="one-exchange", dataset=f"csv:{tmp_path}/pool", schema=f"{tmp_path}/schema.toml",
        num_clients=3, partition="natural", clients_per_evaluation=0, rounds=1,
        one_exchange={"sums": {"bits": 8, "auto_ridge": False, "validation_share": 0.0}},
    )  # fmt: skip


def served(config: Config, deployment: Path, out: Path) -> Config:
    """Run a deployment whose nodes and server's messages are in this process."""
    settings = Config.load(deployment / "server" / "config.toml", out=str(out))
    grid = grid_of(settings.replace(dataset="csv:nowhere.csv"))
    for i, context in enumerate(grid.contexts.values()):
        node = deployment / f"node-{i}"
        context.node_config = NodeSettings.read(node / "mine.toml").node_config(node)
    serve_run(grid, settings)
    return settings


def test_nodes_with_the_schema_learn_the_bits_of_the_simulation(config, tmp_path):
    """Files lack columns that are no inputs. By another schema all nodes refuse to work."""
    expected = run(config, out=tmp_path / "simulated", progress=False)
    write_deployment(config, tmp_path / "d", ["localhost"])
    frame = patients()
    for i, site in enumerate(SITES):
        mine = frame[frame.site == site].drop(columns=["site", "file"])
        mine.to_csv(tmp_path / "d" / f"node-{i}" / "mine.csv", index=False)
    served(config, tmp_path / "d", tmp_path / "deployed")
    rows = patients(60, seed=1)
    scores = [load_predictor(tmp_path / name).predict(rows) for name in ("simulated", "deployed")]
    assert expected.folder == tmp_path / "simulated"
    assert torch.equal(*scores)
    for path in (tmp_path / "d").glob("node-*/inputs.json"):
        path.write_text(path.read_text().replace('"unit": "mg"', '"unit": "g"'))
    again = config, tmp_path / "d", tmp_path / "again"
    refused(
        "schema: OneExchange expects examples whose columns, units",
        served,
        *again,
        error=NoUsableReply,
    )


def write_nodes(config: Config, folder: Path, frame: pd.DataFrame) -> Path:
    """Write a deployment whose nodes have the rows of their sites, and perhaps ledgers."""
    write_deployment(config, folder, ["localhost"])
    for i, site in enumerate(SITES):
        mine = frame[frame.site == site].drop(columns=["site", "file"])
        mine.to_csv(folder / f"node-{i}" / "mine.csv", index=False)
        if config.secure is not None:
            PrivacyLedger.create(folder / f"node-{i}" / "mine.ledger")
    return folder


def test_moments_are_those_of_the_nodes_rows_by_masked_sums(config, tmp_path):
    """In a deployment, whose server has other patients, and in a simulation: the same bits.

    Each of three clients rounds each sum of its standardised rows to 2^-30, so a mean of n = 90
    is off by at most 3 x 2^-31 / 90 = 2e-11 deviations; a variance by as much and 2 |mean| times
    that. Means are within 3, and at least half of the rows have no gap.
    """
    frame = patients(90, seed=7)
    (tmp_path / "rows").mkdir()
    frame.to_csv(tmp_path / "rows" / "train.csv", index=False)
    patients(60, seed=1).to_csv(tmp_path / "rows" / "test.csv", index=False)
    sums: Any = {"method": GLM, "model": "linear", "secure": True}
    first = config.replace(**sums)
    folder = write_nodes(first, tmp_path / "first", frame)
    served(first, folder, tmp_path / "deployed")
    here = {"dataset": f"csv:{tmp_path}/rows", "moments": str(folder / "node-0")}
    run(first.replace(**here), out=tmp_path / "simulated", progress=False)
    pooled = [tmp_path / name / "details" for name in ("deployed", "simulated")]
    texts = [(place / "inputs.json").read_text() for place in pooled]
    assert texts[0] == texts[1]

    second = config.replace(moments=str(pooled[0]))
    folder = write_nodes(second, tmp_path / "second", frame)
    served(second, folder, tmp_path / "learned")
    run(second.replace(dataset=here["dataset"]), out=tmp_path / "expected", progress=False)
    rows = patients(60, seed=1)
    predictors = [load_predictor(tmp_path / name) for name in ("learned", "expected")]
    assert torch.equal(*(predictor.predict(rows) for predictor in predictors))
    inputs, expected = predictors[0].inputs, read(frame).inputs
    assert inputs is not None
    assert inputs.schema is not None
    assert expected.schema is not None
    np.testing.assert_allclose((inputs.mean - expected.mean) / expected.std, 0, atol=1e-9)
    np.testing.assert_allclose(inputs.std / expected.std, 1, atol=1e-9)
    gaps = [schema.tables["age"]["gap"] for schema in (inputs.schema, expected.schema)]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-9)


def test_real_targets_have_pooled_moments_as_well(tmp_path):
    """They are the clients' rows', in the clear; the transform began with other patients'."""
    kinds = {"outcome": {"kind": "target"}, "stage": {"kind": "ignored"}}
    tables = TABLES | kinds | {name: {"kind": "ignored"} for name in ("visit", "note")}

    def amounts(n: int, seed: int) -> pd.DataFrame:
        amount = np.random.default_rng(seed).normal(100 + seed, 20 + seed, n)
        return patients(n, seed).assign(outcome=amount)

    own = {"schema": Schema.parse(tables), "task": "regression", "test": amounts(40, 1)}
    OwnData(amounts(200, 0), **own).read().inputs.save(tmp_path / "reference")
    options = {"num_clients": 3, "partition": "natural", "task": "regression", "rounds": 1}
    config = Config(method="glm", model="linear", clients_per_evaluation=0, **options)
    data = OwnData(amounts(150, 9), moments=tmp_path / "reference", **own)
    done = run(config, data=data, out=tmp_path / "run", progress=False)
    again = OwnData(amounts(200, 0), moments=done.folder / "details", **own)
    pooled = again.read().inputs
    expected = OwnData(amounts(150, 9), **own).read().inputs
    for part, other in ((pooled, expected), (pooled.targets, expected.targets)):
        assert part is not None
        assert other is not None
        np.testing.assert_allclose((part.mean - other.mean) / other.std, 0, atol=1e-9)
        np.testing.assert_allclose(part.std / other.std, 1, atol=1e-9)


def test_moments_that_do_not_fit_are_refused(config, tmp_path):
    """Noise refuses them too, as the sums that they come from have none."""
    expected = read(patients())
    expected.inputs.save(tmp_path)
    again = config.replace(moments=str(tmp_path))
    assert load_data(again).inputs.digest == expected.digest
    refused("moments: expected standardise = true", load_data, again.replace(standardise=False))
    target = again.replace(schema="", dataset="digits")
    refused("moments: expected a table, got dataset = digits", load_data, target)
    refused("expected a folder with inputs.json", load_data, config.replace(moments="no"))
    arrays = OwnData((np.eye(4), np.arange(4) % 2), moments=tmp_path)
    refused("expected the columns age, age=., dose, .* got no table", arrays.read)
    real = TABLES | {"outcome": {"kind": "target"}}
    frame = patients().assign(outcome=np.linspace(0, 1, 120))
    refused("expected the targets of that run", read, frame, real, moments=tmp_path)
    noise: Any = {"noise": {"epsilon": 3.0}, "sums": {"auto_ridge": False, "validation_share": 0.0}}
    noisy = again.replace(one_exchange=noise, public="schema, moments", test_share=0.0)
    refused("moments: they come from sums without noise", load_setup, noisy)
    (tmp_path / "details").mkdir()
    expected.inputs.save(tmp_path / "details")
    name = "a run's folder, with the moments before it; name .*details"
    refused(name, read, patients(), moments=tmp_path)


def test_a_node_is_told_the_schema_and_each_cell_that_does_not_fit(config, tmp_path, caplog):
    """Without the reference table, and with no schema file on the node's machine."""
    write_deployment(config, tmp_path / "d", ["localhost"])
    (tmp_path / "pool").rename(tmp_path / "elsewhere")
    (tmp_path / "schema.toml").unlink()
    node = tmp_path / "d" / "node-1"
    assert '\ntarget = "outcome"\n' in (node / "mine.toml").read_text()
    readme = (node / "README.md").read_text()
    assert "| `age` | number 0 ... 120 years |\n| `dose` | number mg |\n" in readme
    assert "| `outcome` | alive, dead |" in readme
    mine = patients(40, seed=2).drop(columns=["site", "file"])
    mine.to_csv(node / "mine.csv", index=False)
    check_node(node / "mine.toml")
    mine.assign(age="150", visit="2020-01-01").to_csv(node / "mine.csv", index=False)
    refused("this node's log says why", check_node, node / "mine.toml")
    assert "\nage: expected number 0 ... 120 years, got '150' in row 1, " in caplog.text
    assert "\nvisit: expected date as %d.%m.%Y 01.01.1990 ... 31.12.2030, got '20" in caplog.text


def test_the_command_writes_a_schema_and_keeps_one_that_is_there(tmp_path):
    patients().to_csv(tmp_path / "mine.csv", index=False)
    command: Any = (
        "schema",
        tmp_path / "mine.csv",
        "--target",
        "outcome",
        "--client-column",
        "site",
    )
    out = tmp_path / "schema.toml"
    assert "check it, above all" in fedntk(*command, "--out", out)
    assert out.read_text() in fedntk(*command)
    assert "no column is the target" not in out.read_text()
    assert "# check: no column is the target" in fedntk(*command[:2])
    assert load_schema(out).columns["stage"].kind == "category"
    assert "exists; choose another name" in fedntk(*command, "--out", out, fails=2)
    assert "target: the set has the columns" in fedntk(*command[:2], "--target", "x", fails=2)
    assert "expected a csv or parquet file" in fedntk("schema", tmp_path / "no.csv", fails=2)
