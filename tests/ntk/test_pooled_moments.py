"""Moments of a table from sums over its rows: equal to those of the rows themselves, in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.predictors.pooled_moments import moments_of, with_moments, with_schema
from fedntk.ntk.predictors.schema import Schema

from ..conftest import refused

ROUNDING = 1e-13  # of some hundred float64 operations on numbers around 1, over their deviations


def schema(**gap: Any) -> Schema:
    """A column with gaps and one without, and the label."""
    age = {"kind": "number", "range": [0, 120], "indicator": True} | gap
    return Schema.parse({"age": age, "dose": {"kind": "number"}, "label": {"kind": "target"}})


def rows(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.uniform(20, 90, n)
    age[rng.random(n) < 0.3] = np.nan
    return pd.DataFrame({"age": age, "dose": rng.normal(5 + seed, 2, n)})


def fitted(table: Schema, frame: pd.DataFrame) -> InputTransform:
    encoded = table.encode(frame)
    table = table.fit(encoded)
    columns = tuple(table.outputs)
    return InputTransform.fit(table.fill(encoded), columns=columns, schema=table)


@pytest.mark.parametrize("gap", ["mean", 30.0, 0.0])
def test_moments_of_other_rows_are_those_of_a_fit_to_them(gap):
    """Also of a gap that was filled by another number when the sums were taken."""
    there, here = rows(400, 0), rows(300, 1)
    before = fitted(schema(gap="mean"), there)
    assert before.schema is not None
    raw = before.schema.fill(before.schema.encode(here))
    scaled = (raw - before.mean) / before.std
    pooled = with_moments(before, (scaled.mean(0), scaled.std(0)))
    after = with_schema(pooled, schema(gap=gap), before.columns)
    expected = fitted(schema(gap=gap), here)
    np.testing.assert_allclose(after.mean, expected.mean, rtol=ROUNDING)
    np.testing.assert_allclose(after.std, expected.std, rtol=ROUNDING)
    assert after.schema is not None
    assert expected.schema is not None
    gaps = [t.schema.tables["age"]["gap"] for t in (after, expected)]
    np.testing.assert_allclose(*gaps, rtol=ROUNDING)
    again = with_schema(pooled, after.schema, before.columns)  # the number in place of mean
    assert np.array_equal(again.mean, after.mean)
    assert np.array_equal(again.std, after.std)


@pytest.mark.parametrize("value", [0.0, 1 / 3, -7.1, 2020.3])
@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("step", [0.0, 2.0**-30])
def test_rounding_is_no_deviation(value, weight, step):
    """In the clear, or masked by three clients, each of which rounds to a step; nor is 1 of n."""
    rows, n = np.full((3, 30, 2), value), 90
    rows[0, 0, 1] += 1
    sums = [(weight * np.stack([rows, rows**2, np.ones_like(rows)])).sum(2)]
    total, squares, ones = (np.rint(sums[0] / step) * step if step else sums[0]).sum(1)
    mean, std = moments_of(total, squares, ones[0], 3 * step / 2)
    np.testing.assert_allclose(mean, [value, value + 1 / n], rtol=1e-9, atol=1e-9)
    assert std[0] == 0
    assert std[1] == pytest.approx(np.sqrt(1 / n - 1 / n**2), rel=1e-4)


def test_gaps_that_no_row_has_or_all_values_alike_are_told_from_rounding():
    """By a masked sum shares are off by some 1e-11, and variances by as much."""
    there = rows(400, 0)
    before = fitted(schema(gap="mean"), there)
    gap = before.schema.tables["age"]["gap"] if before.schema else 0
    mean = replace(before, mean=np.array([50.0, -1e-11, 5.0]))
    assert with_schema(mean, schema(gap="mean"), before.columns).mean[0] == 50
    share, value = 0.25, 50.0
    spread = np.sqrt(share * (1 - share) * (gap - value) ** 2 + 1e-9)
    filled = [value + share * (gap - value), share, 5.0]
    alike = replace(before, mean=np.array(filled), std=np.array([spread, 0.4, 1.0]))
    after = with_schema(alike, schema(gap="mean"), before.columns)
    assert after.mean[0] == pytest.approx(value)
    assert after.std[0] == 1
    only_gaps = replace(before, mean=np.array([gap, 1 - 1e-11, 5.0]))
    refused(
        "a row without", with_schema, only_gaps, schema(gap=3.0), before.columns, error=ValueError
    )


def test_a_column_that_is_constant_here_is_only_centred():
    before = InputTransform.fit(np.array([[1.0, 0], [3.0, 2]]), columns=("a", "b"))
    pooled = with_moments(before, (np.array([0.5, 2.0]), np.array([2.0, 0.0])))
    assert pooled.mean.tolist() == [2.5, 3.0]
    assert pooled.std.tolist() == [2.0, 1.0]
    assert with_schema(pooled, None, ("a", "b")) is pooled


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (schema(gap="mean", indicator=False), "expected the columns age, age=., dose"),
        (schema(gap="mean", range=[0, 99]), "age: expected the same settings, but for gap"),
        (schema(gap="refuse"), "age: expected gap = .*, as in its schema, or a number"),
        (None, "of a schema if these are"),
    ],
)
def test_moments_of_another_table_are_refused(table, message):
    inputs = fitted(schema(gap="mean"), rows(50, 0))
    columns = inputs.columns if table is None else tuple(table.outputs)
    refused(message, with_schema, inputs, table, columns, error=ValueError)


@pytest.mark.parametrize(
    ("share", "message"), [(1.0, "a row without a gap"), (None, "expected indicator = true")]
)
def test_a_mean_needs_the_number_of_gaps_and_a_value(share, message):
    table = schema(gap=30.0, indicator=share is not None)
    inputs = fitted(table, rows(50, 0))
    if share is not None:
        inputs.mean[1] = share
    other = schema(gap="mean", indicator=share is not None)
    refused(message, with_schema, inputs, other, inputs.columns, error=ValueError)
