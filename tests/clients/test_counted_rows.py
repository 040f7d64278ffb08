"""Which rows count: a multiset of digests that only their owner can make."""

import json
import stat
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedntk.clients import ClosedFormClient, CountedRows, get_weights
from fedntk.ntk import FeatureMap, NotEnoughMemory
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.ntk.support.files import DamagedFile

from ..conftest import refused
from ..strategies.federation import examples, network

X, Y = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0]]), np.array([0, 1, 0, 1])


def named(*rounds, server="a"):
    """Names of sums of these rounds, 0 for none, as one server draws them."""
    return tuple(f"{number:08}-{server * 16}" if number else "" for number in rounds)


@pytest.fixture
def rows(tmp_path):
    rows = CountedRows(tmp_path / "rows")
    rows.replace(X, Y)
    return rows


def test_equal_rows_count_as_often_as_they_are_there(rows):
    """Another label makes another row."""
    rows.delete(X[:1], Y[:1])
    assert rows.select(X, Y)[0].tolist() == [0, 1, 3]
    rows.add(X[:1], Y[:1])
    assert rows.select(X, Y)[0].tolist() == [0, 1, 2, 3]
    rows.delete(X[[0, 2]], Y[[0, 2]])
    assert rows.select(X, Y)[0].tolist() == [1, 3]
    assert len(rows) == 2


def test_what_does_not_count_cannot_be_deleted(rows):
    """Twice, more often than it is there, or a row that was never added: then nothing is."""
    rows.delete(X[1:2], Y[1:2])
    for x, y in ((X[1:2], Y[1:2]), (X[[0, 0, 0]], Y[[0, 0, 0]]), (X[:2], Y[:2]), ([[9, 9]], [0])):
        refused("do not count, or not so often", rows.delete, x, y)
        assert len(rows) == 3


def test_before_the_first_exchange_no_row_can_go_or_come(tmp_path):
    """Else the added ones would be all that count; a mistyped folder is not made."""
    new = CountedRows(tmp_path / "new")
    for change in (new.add, new.delete):
        refused("none was counted yet in .*new; call replace", change, X[:1], Y[:1])
    assert not new.folder.exists()
    assert new.select(X, Y)[0].tolist() == [0, 1, 2, 3]
    new.add(X[:1], Y[:1])
    assert len(new) == 5


def test_random_streams_are_those_of_a_multiset(tmp_path):
    generator = np.random.default_rng(0)
    rows, expected = CountedRows(tmp_path), Counter()
    rows.replace(X[:0], Y[:0])
    for _ in range(60):
        n = generator.integers(0, 3, 1)
        one = Counter({int(n[0])})
        if generator.random() < 0.5:
            rows.add(n[:, None], n)
            expected += one
        elif one <= expected:
            rows.delete(n[:, None], n)
            expected -= one
        else:
            refused("do not count", rows.delete, n[:, None], n)
        assert len(rows) == expected.total()


def test_rows_are_the_same_whatever_holds_them(rows):
    """As tensors, lists, float64 or whole numbers; labels one-hot or in a column; and minus 0."""
    for x, y in (
        (torch.tensor(X), torch.tensor(Y)),
        (torch.tensor(X).float(), Y[:, None]),
        (X.astype(np.float16), Y),
        (X.astype(np.int64), np.eye(3)[Y].astype(int)),
        (X.tolist(), Y.tolist()),
        (np.asfortranarray(X), Y.astype(np.uint8)),
    ):
        assert len(rows.select(x, y)[0]) == 4
    rows.replace([[0.5, -0.0]], [0])
    assert len(rows.select(np.float32([[0.5, 0.0]]), [0])[0]) == 1


@pytest.mark.parametrize(
    "two",
    [
        np.array([[0.1], [0.1 + 1e-12]]),
        np.array([[2**53], [2**53 + 1]]),
        np.array([[2**64 - 2], [2**64 - 1]], np.uint64),
        np.array([[-(2**53)], [-(2**53) - 1]]),
    ],
)
def test_rows_that_only_round_to_the_same_are_two(two, rows):
    rows.replace(two, [0, 0])
    rows.delete(two[:1], [0])
    assert rows.select(two, [0, 0])[0].tolist() == [1]


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X, Y[:2], "expected 4 labels, got the shape"),
        (X, Y + 0.5, "whole numbers as labels, got float64"),
        (X.astype(str), Y, "expected numbers"),
        (1.0, 0, "expected numbers"),
    ],
)
def test_what_is_no_row_is_refused(x, y, said, rows):
    refused(said, rows.add, x, y)
    assert len(rows) == 4


def test_rows_that_count_must_be_there(rows):
    refused("rows: 2 that count are not among this client's examples", rows.select, X[:2], Y[:2])


def test_digests_are_keyed_and_only_the_owner_reads_them(rows):
    """Another folder has other digests of the same rows."""
    other = CountedRows(rows.folder.parent / "other")
    other.replace(X, Y)
    names = [json.loads((one.folder / "rows.json").read_text()).keys() for one in (rows, other)]
    assert len(names[0]) == 3
    assert not names[0] & names[1]
    for path in ("rows.json", "secret"):
        assert stat.S_IMODE((rows.folder / path).stat().st_mode) == 0o600
    rows.change("run", named(0, 1), np.zeros(3, np.uint64), rows.select(X, Y)[1])
    for path in (rows.folder, rows.folder / "run-run"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_damaged_folder_is_no_empty_one(rows):
    """Else rows would be added that are there, or were deleted."""
    secret, names = rows.folder / "secret", rows.folder / "rows.json"
    secret.rename(secret.with_suffix(".away"))
    refused("secret: it is gone", rows.add, X, Y, error=DamagedFile)
    secret.with_suffix(".away").rename(secret)
    names.write_text("{")
    refused("rows.json: damaged", len, rows, error=DamagedFile)
    names.unlink()
    for call in (rows.select, rows.add, rows.delete, rows.replace):
        refused("rows.json: it is gone", call, X, Y, error=DamagedFile)


def test_a_change_is_since_the_round_that_the_server_counts(rows):
    """Words subtract modulo 2^64; a round whose reply was lost is no start, unless it is named."""
    words = {n: np.full(2, n, np.uint64) for n in (1, 2, 3, 9)}
    digests = rows.select(X, Y)[1]
    first = rows.change("a", named(0, 1), words[9], digests)
    assert (first.words.tolist(), first.deleted, first.added) == ([9, 9], 0, 4)
    second = rows.change("a", named(1, 2), words[2], digests[:1])
    assert (second.words.tolist(), second.deleted, second.added) == ([2**64 - 7] * 2, 3, 0)
    third = rows.change("a", named(1, 3), words[3], digests[1:])
    assert (third.words.tolist(), third.deleted, third.added) == ([2**64 - 6] * 2, 1, 0)
    for number in range(4, 9):  # whatever is lost meanwhile
        rows.change("a", named(1, number), words[1], digests)
    again = rows.change("a", named(8, 9), words[2], [])
    assert (again.words.tolist(), again.deleted, again.added) == ([1, 1], 4, 0)
    refused("lacks the sums 00000002-a+ that count", rows.change, "a", named(2, 10), words[1], [])
    refused("lacks the sums 00000008-a+ that count", rows.change, "b", named(8, 10), words[1], [])
    for names in (named(9, 0), ("../../secret", *named(10)), (*named(9), "00000010-../../x")):
        refused("names: expected", rows.change, "a", names, words[1], [])
    refused("are of another size", rows.change, "a", named(9, 10), np.zeros(3, np.uint64), [])


def test_sums_are_of_one_server_and_one_message(rows):
    """Two servers go on from one state, a message comes late, or again: none sees another's sums.

    Else a server's next change would be since what it was not told, and rows stay in its model.
    """
    words, digests = np.arange(4, dtype=np.uint64), rows.select(X, Y)[1]
    rows.change("run", named(0, 1), words, digests)
    rows.change("run", named(1, 2), words, digests)
    other = (*named(1), *named(2, server="b"))
    assert rows.change("run", other, 0 * words, digests[1:]).deleted == 1
    assert rows.change("run", named(2, 3), 0 * words, digests[1:]).deleted == 1
    assert rows.change("run", (*named(2), *named(2, server="c")), words, digests).deleted == 0
    assert rows.change("run", named(3, 4), words, digests).added == 1
    refused("was answered before", rows.change, "run", named(3, 4), words, digests[1:])


def test_sums_that_stay_take_no_further_disk(rows, monkeypatch):
    words, digests = np.arange(4, dtype=np.uint64), rows.select(X, Y)[1]
    for number in range(5):
        rows.change("run", named(number, number + 1), words, digests)
    files = list((rows.folder / "run-run").glob("*.npz"))
    assert len(files) == 3
    assert len({path.stat().st_ino for path in files}) == 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    refused("sums of the rows that count need", rows.change, "run", named(5, 6), words + 1, digests,
            error=NotEnoughMemory)  # fmt: skip


def test_of_two_threads_one_counts_the_first_rows(rows, monkeypatch):
    """The other one sees, once it may write, that they are counted."""
    new, changing = CountedRows(rows.folder.parent / "new"), CountedRows._changing

    @contextmanager
    def late(self, **options):
        monkeypatch.undo()
        self.select(X, Y)
        with changing(self, **options) as counted:
            yield counted

    monkeypatch.setattr(CountedRows, "_changing", late)
    new.select(X, Y)
    assert len(new) == 4


def test_a_client_gives_sums_only_of_the_rows_that_count(tmp_path):
    """A dataset may make other examples when it is read again, and arrays do not."""
    x, y = examples(3)
    rows = CountedRows(tmp_path)
    told = {**FeatureMap("last-layer").to_config(), **SumTask(step="statistics").to_config()}

    def counts(*data, **options):
        client = ClosedFormClient(network(), *data, **options)
        arrays, number, _ = client.fit(get_weights(network()), told)
        assert number == arrays[2].sum()
        return arrays[2].tolist()

    def expected(labels):
        return torch.bincount(labels, minlength=3).tolist()

    assert counts(x, y, rows=rows) == expected(y)
    rows.delete(x[1:3], y[1:3])
    left = [0, 3, 4, 5, 6, 7]
    assert counts(x, y, rows=rows) == expected(y[left]) == counts(x[left], y[left], rows=rows)
    dataset = torch.utils.data.TensorDataset(x, y)
    refused("x: expected arrays of examples", counts, dataset, rows=rows)
    rows.replace(x[:0], y[:0])
    refused("rows: none of this client's counts", counts, x, y, rows=rows)


def test_the_server_is_not_told_which_rows_are_not_there(tmp_path, caplog):
    """Their number and the folder are in the client's own log."""
    x, y = examples(3)
    rows = CountedRows(tmp_path)
    rows.replace(x, y)
    client = ClosedFormClient(network(), x[2:], y[2:], rows=rows)
    task = SumTask(step="statistics", changes=True)
    told = {**FeatureMap("last-layer").to_config(), **task.to_config()}
    said = "^rows: they cannot be counted; the log of this client says why$"
    refused(said, client.fit, get_weights(network()), told)
    assert "2 that count are not among" in caplog.text
