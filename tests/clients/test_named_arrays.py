"""NamedArrays: a list to whoever knows no names, records to whoever does."""

import copy

import numpy as np
import pytest

from fedntk.clients import NamedArrays
from fedntk.clients.core.named_arrays import records_of

RECORDS = {
    "arrays": {"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(2, np.float32)},
    "empty": {},
    "corrections": {"w": np.ones((2, 3))},
}


def test_it_is_the_list_of_all_arrays_and_knows_their_records_and_names():
    """The same name may stand in two records, and a record may be empty."""
    arrays = NamedArrays(RECORDS)
    expected = [RECORDS["arrays"]["w"], RECORDS["arrays"]["b"], RECORDS["corrections"]["w"]]
    assert len(arrays) == 3
    assert all(own is other for own, other in zip(arrays, expected, strict=True))
    assert type(arrays[:2]) is type(arrays.copy()) is list
    shown = {name: list(record) for name, record in arrays.records.items()}
    assert shown == {"arrays": ["w", "b"], "empty": [], "corrections": ["w"]}
    del arrays.records["corrections"]  # they are not the ones that it was made of
    arrays.records["arrays"]["more"] = np.zeros(1)
    assert {name: list(record) for name, record in RECORDS.items()} == shown


def test_a_deep_copy_keeps_the_names():
    arrays = copy.deepcopy(NamedArrays(RECORDS))
    assert type(arrays) is NamedArrays
    assert list(arrays.records) == list(RECORDS)
    assert arrays[2] is arrays.records["corrections"]["w"]
    assert arrays[2] is not RECORDS["corrections"]["w"]
    np.testing.assert_array_equal(arrays[2], RECORDS["corrections"]["w"])


def test_records_come_in_the_order_that_they_are_asked_for_or_the_missing_are_named():
    named = NamedArrays(RECORDS)
    corrections, weights = records_of(named, "corrections", "arrays", strategy="SCAFFOLD")
    assert list(weights) == ["w", "b"]
    assert corrections["w"] is RECORDS["corrections"]["w"]
    text = (
        "expected the records arrays, linear, control, got arrays, empty, corrections; linear, "
        "control comes from the strategy TCT"
    )
    with pytest.raises(ValueError, match=text):
        records_of(named, "arrays", "linear", "control", strategy="TCT")
    with pytest.raises(ValueError, match=r"NamedArrays .* strategy TCT, .* got a list without"):
        records_of([np.zeros(1)], strategy="TCT")
