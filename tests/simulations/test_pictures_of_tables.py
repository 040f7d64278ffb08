"""Measures and pictures of declared tables: deciles, running totals, one measure by another."""

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import run
from fedntk.simulations.reproduction.declaration import Declaration
from fedntk.simulations.reproduction.making import as_table
from fedntk.simulations.reproduction.rendering import draw, frames

DECLARED = """
title = "two rounds of D-PSGD"
source = "none"
[rows.a]
label = "A"
[measures.accuracy]
at = "curve"
[measures.sent]
metric = "bytes-up"
at = "cumulative"
[measures.clients]
metric = "trained-accuracy"
at = "clients"
rounds = [1, 2, 9]
[figure]
measure = "accuracy"
[small]
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(
        "d-psgd", dataset="digits", num_clients=4, clients_per_round=4, rounds=2,
        train_examples=200, d_psgd={"degree": 2}, progress=False,
        out=str(tmp_path_factory.mktemp("run")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def declared(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("declared") / "table.toml"
    path.write_text(DECLARED, encoding="utf-8")
    declaration = Declaration.load(str(path))
    cell = declaration.cell("a", "", 0)
    values = [
        value
        for name, measure in declaration.measures.items()
        for value in measure.of(result, name, path.parent)
    ]
    return declaration, as_table(cell, values)


def pictured(declared, **picture):
    declaration, table = declared
    figure = declaration.figure.model_copy(update=picture)
    axes = draw(declaration.model_copy(update={"figure": figure}), table).axes[0]
    return axes, axes.get_lines()


def test_data_are_added_up_to_each_evaluation(declared, result):
    rows = declared[1][declared[1].measure == "sent"]
    assert rows["round"].tolist() == result.curve().index.tolist()
    assert rows.value.iloc[-1] == result.summary["bytes-up"]
    assert rows.value.is_monotonic_increasing


def test_deciles_are_those_of_the_models_in_rounds_that_were_run(declared, result):
    rows = declared[1][declared[1].measure == "clients, decile 100"]
    assert rows["round"].tolist() == [1, 2]
    assert rows.value.tolist() == result.curve("trained-accuracy-max")[[1, 2]].tolist()


def test_a_table_shows_some_deciles_of_the_last_round(declared, result):
    ((_, frame),) = frames(*declared)
    shown = [f"{result.curve(f'trained-accuracy-decile-{d}')[2]:.1f}" for d in (0, 10, 50, 90, 100)]
    assert frame.iloc[0, 1:].tolist() == shown


def test_one_measure_is_drawn_against_another(declared, result):
    _, lines = pictured(declared, x="measure", against="sent")
    drawn = lines[0].get_xydata()
    assert drawn[:, 0].tolist() == result.curve("bytes-up").cumsum().tolist()
    assert drawn[:, 1].tolist() == result.curve().tolist()


def test_panels_have_the_named_cells_and_a_line_joins_columns_of_one_point(declared):
    declaration, table = declared
    places = {"p": (3.0, 30.0), "q": (1.0, 10.0), "r": (2.0, 20.0)}
    rows = [
        table[table.measure == name].tail(1).assign(column=column, value=values[number])
        for column, values in places.items()
        for number, name in enumerate(("sent", "accuracy"))
    ]
    panels = {"both": ["a/p", "*/q"], "one": ["a/r"]}
    picture = {"x": "measure", "against": "sent", "panels": panels}
    figure = declaration.figure.model_copy(update=picture)
    drawn = draw(declaration.model_copy(update={"figure": figure}), pd.concat(rows))
    assert [axes.get_title() for axes in drawn.axes] == [*panels]
    lines = [line.get_xydata().tolist() for axes in drawn.axes for line in axes.get_lines()]
    assert lines == [[[1, 10], [3, 30]], [[2, 20]]]


def test_two_measures_are_drawn_in_two_styles(declared):
    _, lines = pictured(declared, also=["sent"])
    assert [line.get_label() for line in lines] == ["accuracy", "sent"]
    assert lines[0].get_linestyle() != lines[1].get_linestyle()


def test_deciles_are_bands_around_the_median(declared, result):
    axes, lines = pictured(declared, measure="clients", x="deciles")
    assert lines[0].get_ydata() == pytest.approx(result.curve("trained-accuracy-median")[[1, 2]])
    widest = axes.collections[0].get_paths()[0].vertices[:, 1]
    ends = [result.curve(f"trained-accuracy-{end}")[[1, 2]] for end in ("min", "max")]
    assert [widest.min(), widest.max()] == [np.min(ends[0]), np.max(ends[1])]
