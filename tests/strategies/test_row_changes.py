"""Rows go and come after the solution: the model is that of a run with the rows that are left."""

import itertools
from functools import partial, reduce
from operator import add

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn

from fedntk.clients import ClosedFormClient, CountedRows, MaskedSums, client_app
from fedntk.ntk import BadReply
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.row_change import RowChange
from fedntk.strategies import (
    FeatureSums,
    KeptSums,
    NoisySums,
    NoUsableReply,
    OneExchange,
    RowChanges,
)
from fedntk.strategies.closed_form.row_changes import model_digest
from fedntk.strategies.core.uploads import Upload, Uploads
from fedntk.trust import SealError, verify_records

from ..conftest import refused
from .federation import Grid, arrays_of, as_record, bits, lost, told, with_arrays
from .test_one_exchange import PARTS, clients_of, features, fixed, make, run

WAYS = {
    "one sum": fixed,
    "two sums": partial(make, validation_share=0.3),
    "weighted": partial(fixed, class_weights=(1, 9, 2)),
}
both = pytest.mark.parametrize("masked", [False, True])
each_way = pytest.mark.parametrize("way", WAYS)


def books(folder):
    return [CountedRows(folder / f"rows-{k}") for k in range(6)]


def changing(folder, parts=PARTS, **masks):
    """Clients with these parts that know which of their rows count."""

    def client_fn(context: Context):
        k = int(context.node_config["partition-id"])
        secure = MaskedSums(cache=folder / "cache", allow_repeats=True, **masks)
        rows = books(folder)[k]
        return ClosedFormClient(features(), *parts[k], seed=(0, k), secure=secure, rows=rows)

    return client_app(client_fn)


def go_on(strategy, arrays, rounds, clients, **options):
    """Run further rounds, as after a restart."""
    strategy.load_state_dict(strategy.state_dict())
    record, grid = as_record(arrays), Grid(clients, **options)
    return arrays_of(strategy.start(grid, record, num_rounds=rounds).arrays)


def without(parts, gone):
    """Return parts without rows, by client."""
    left = [
        [i for i in range(len(y)) if i not in gone.get(k, ())] for k, (_, y) in enumerate(parts)
    ]
    return [(x[rows], y[rows]) for (x, y), rows in zip(parts, left, strict=True)]


def from_scratch(way, parts):
    return bits(run(WAYS[way](), Grid(clients_of(parts))))


@pytest.mark.parametrize("changes", [False, True])
def test_a_masked_total_opens_only_if_all_clients_have_the_same_weights(changes, tmp_path):
    """Else a server gives one client weights of 10,000, and reads its sums off the total."""

    def tell(messages):
        for message in messages:
            if message.metadata.dst_node_id == 0 and "config" in message.content:
                message.content["config"]["option-class-weights"] = [1.0, 1.0, 1.0]

    clients = clients_of(PARTS, cache=tmp_path, only_masked=True, allow_repeats=True)
    clients = changing(tmp_path) if changes else clients
    options = {"changes": RowChanges(tmp_path / "records")} if changes else {}
    strategy = fixed(secure=True, class_weights=(1, 9, 2), **options)
    grid = Grid(clients, node_ids=range(6), on_send=tell)
    refused("no client.s reply could be used", run, strategy, grid, error=NoUsableReply)


@pytest.mark.parametrize("split", [False, True])
def test_500_random_streams_leave_the_sums_of_the_rows_that_are_there(split, tmp_path):
    """Two clients, three rounds, of which any reply may be lost; rows move between two sums."""
    sums = FeatureSums(bits=4, auto_ridge=split, validation_share=0.5 * split, ridge=1.0)
    strategy = OneExchange(network=nn.Linear(3, 2), sums=sums, changes=RowChanges(tmp_path))
    changes, options = strategy.changes, strategy.sums
    options.steps = np.ones(3, np.float32)

    def of(rows, labels):
        return FeatureStatistics.of([rows], labels, 2, fixed_point=options.fixed_point)

    generator = np.random.default_rng(split)
    z = torch.from_numpy(generator.integers(-7, 8, (12, 3))).float()  # six of each client
    y = torch.from_numpy(generator.integers(0, 2, 12))
    of_row = np.stack([of(z[[i]], y[[i]]).to_words(np.uint64) for i in range(12)])
    for _ in range(500):
        changes.reset_state()
        last = {k: (np.zeros(options.num_words(), np.uint64), frozenset()) for k in range(2)}
        for number in range(1, 4):
            uploads = []
            for k in range(2):
                if number == 3 or generator.random() < 0.7:
                    there = 6 * k + np.flatnonzero(generator.random(6) < 0.6)
                    held_out = generator.random(len(there)) < 0.3
                    parts = (there[~held_out], there[held_out]) if split else (there,)
                    words = np.concatenate([of_row[part].sum(0) for part in parts])
                    words, rows = words.astype(np.uint64), frozenset(there.tolist())
                    (old, before), last[k] = last[k], (words, rows)
                    change = RowChange(words - old, len(before - rows), len(rows - before))
                    uploads.append(Upload(k, k, 1, {}, [], change))
            screened = changes.screen(Uploads(strategy.channel, uploads), [], strict=True)
            assert len(screened) == len(uploads)
            if uploads:
                changes.commit(reduce(add, screened.values), screened)
        left = sorted(last[0][1] | last[1][1])
        total = changes.total_with(RowChange(0 * changes.words, 0, 0)).everyone
        np.testing.assert_array_equal(
            total.to_words(np.uint64), of(z[left], y[left]).to_words(np.uint64)
        )
        assert changes.num_rows == len(left) == sum(changes.rows.values())


@each_way
@both
def test_streams_leave_the_bits_of_a_run_that_never_had_the_rows(way, masked, tmp_path):
    """Replies get lost, a client joins late, and all rows of one go; each change has its record.

    With masks nobody joins late: the others' zeros would not hide its sums.
    """
    generator, gone = np.random.default_rng(masked), dict.fromkeys(range(6), ())
    clients = changing(tmp_path, only_masked=masked)
    strategy = WAYS[way](changes=RowChanges(tmp_path / "records"), secure=masked)
    arrays = run(strategy, Grid(clients, changes={5: lost}))
    assert bits(arrays) == bits(run(WAYS[way](), Grid(clients_of(PARTS), changes={5: lost})))
    for number in range(2, 5):
        for k in range(5):
            x, y = PARTS[k]
            there = generator.random(len(y)) < (0.0 if k == 3 and number == 4 else 0.7)
            books(tmp_path)[k].replace(x[there], y[there])
            gone[k] = np.flatnonzero(~there)
        silent = {} if number == 4 else dict.fromkeys(generator.choice(6, 2).tolist(), lost)
        arrays = go_on(strategy, arrays, number, clients, changes=silent)
    left = [part for k, part in enumerate(without(PARTS, gone)) if k != 3]
    options = {"min_available_nodes": 5}
    never = {4: lost} if masked else {}  # of the five
    expected = run(WAYS[way](**options), _five(left, changes=never))
    assert bits(arrays) == bits(expected)
    records = verify_records(strategy.changes.path)
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["rows"] == sum(len(y) for _, y in left[: 5 - masked])
    assert records[-1]["after"] == model_digest(as_record(arrays))
    assert {record["added"] - record["deleted"] for record in records} != {0}


def _five(parts, **options):
    """A grid of the clients but number 3, with the seeds that they have among six."""

    def client_fn(context: Context):
        i = int(context.node_config["partition-id"])
        return ClosedFormClient(features(), *parts[i], seed=(0, (0, 1, 2, 4, 5)[i]))

    return Grid(client_app(client_fn), num_clients=5, **options)


def test_without_a_change_the_model_stays_and_nothing_is_signed(tmp_path, monkeypatch):
    """Those who delete nothing send zeros, and no reply tells how many examples it is of."""
    monkeypatch.setattr("fedntk.strategies.core.channel._release", lambda messages: None)
    clients = changing(tmp_path)
    strategy = fixed(changes=RowChanges(tmp_path))
    arrays = run(strategy, Grid(clients))
    grid = Grid(clients)
    strategy.load_state_dict(strategy.state_dict())
    after = arrays_of(strategy.start(grid, as_record(arrays), num_rounds=2).arrays)
    assert bits(after) == bits(arrays)
    assert len(verify_records(strategy.changes.path)) == 1
    replies = [m.content for way, m in grid.seen if way == "up" and "arrays" in m.content]
    assert len(replies) == 6
    for content in replies:
        assert not content["arrays"]["change"].numpy().any()
        assert content["metrics"].keys() == {"num-examples", "partition-id"}
        assert content["metrics"]["num-examples"] == 1


def words_with(change):
    """Change the words of a reply, as int64."""
    return with_arrays(lambda a: {"change": change(a["change"].view(np.int64)).view(np.uint64)})


def beside(deleted, added):
    return lambda w: np.r_[w[:-2], deleted, added]


def less_counts(words):
    return np.r_[words[:-5], words[-5:-2] - 100, words[-2:]]


def not_positive(strategy, words):
    """Three features of -0.9 correlation each: all inequalities of pairs hold."""
    total = strategy.changes.words.view(np.int64)
    diagonal = np.cumsum([0, *range(20, 1, -1)])[:3]
    changed = words.copy()
    for i, j in itertools.combinations(range(3), 2):
        wanted = -0.9 * np.sqrt(float(total[diagonal[i]]) * float(total[diagonal[j]]))
        place = diagonal[i] + j - i
        changed[place] = int(wanted) - total[place]
    return changed


LIES = {
    "fraction": (lambda _: with_arrays(lambda a: {"change": a["change"] + 0.5}), "dtype"),
    "short": (lambda _: words_with(lambda w: w[1:].copy()), "shape"),
    "other name": (lambda _: with_arrays(lambda a: {"gram": a["change"]}), "arrays"),
    "more rows than it has": (lambda _: words_with(beside(8, 0)), "num-examples"),
    "more rows than it had": (lambda _: words_with(beside(5000, 5000)), "num-examples"),
    "more rows than there are": (lambda _: words_with(beside(0, 2**62)), "num-examples"),
    "another number of rows": (lambda _: words_with(beside(0, 1)), "num-examples"),
    "counts below zero": (lambda _: words_with(less_counts), "range"),
    "not positive": (lambda s: words_with(partial(not_positive, s)), "range"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_change_that_no_rows_can_make_is_dropped_and_the_others_count(lie, tmp_path):
    """It has the result of a lost reply."""
    change, reason = LIES[lie]
    clients = changing(tmp_path)
    strategy = fixed(changes=RowChanges(tmp_path / "records"))
    arrays = run(strategy, Grid(clients))
    x, y = PARTS[4]
    books(tmp_path)[4].delete(x[:2], y[:2])
    arrays = go_on(strategy, arrays, 2, clients, changes={2: change(strategy)})
    assert bits(arrays) == from_scratch("one sum", without(PARTS, {4: (0, 1)}))
    metrics = strategy.train_metrics[2]
    assert (metrics["replies-rejected"], metrics[f"rejected-{reason}"]) == (1, 1)


def test_a_lie_under_masks_leaves_the_model_as_it_was(tmp_path):
    """Nobody sees whose it was."""
    clients = changing(tmp_path, only_masked=True)
    strategy = fixed(changes=RowChanges(tmp_path / "records"), secure=True)
    arrays = run(strategy, Grid(clients))
    x, y = PARTS[4]
    books(tmp_path)[4].delete(x[:2], y[:2])

    def lie(reply):
        if "masked" in reply.content["arrays"]:
            more = np.zeros(len(reply.content["arrays"]["masked"].numpy()), np.uint64)
            more[-3] = 2**60
            return with_arrays(lambda a: {"masked": a["masked"] + more})(reply)
        return reply

    after = go_on(strategy, arrays, 2, clients, changes={2: lie})
    assert bits(after) == bits(arrays)
    assert strategy.train_metrics[2]["rejected-secure-sum"] == 6
    after = go_on(strategy, arrays, 3, clients)
    assert bits(after) == from_scratch("one sum", without(PARTS, {4: (0, 1)}))


def test_a_run_that_was_cut_off_signs_its_round_again(tmp_path):
    """Its record is there, and the checkpoint is of the round before."""
    clients, where = changing(tmp_path), {"checkpoint": tmp_path / "checkpoint"}

    def cut_off(server_round, arrays):
        if server_round == 2:
            raise RuntimeError("cut off")

    def kind():
        return fixed(changes=RowChanges(tmp_path / "records"))

    run(kind(), Grid(clients), **where)
    x, y = PARTS[4]
    books(tmp_path)[4].delete(x[:2], y[:2])
    strategy = kind()
    refused("cut off", run, strategy, Grid(clients), 2, evaluate_fn=cut_off, **where,
            error=RuntimeError)  # fmt: skip
    assert [r["deleted"] for r in verify_records(strategy.changes.path)] == [0, 2]
    books(tmp_path)[4].delete(x[2:3], y[2:3])
    after = run(strategy := kind(), Grid(clients, node_ids=range(40, 46)), 2, **where)
    assert bits(after) == from_scratch("one sum", without(PARTS, {4: (0, 1, 2)}))
    assert [r["deleted"] for r in verify_records(strategy.changes.path)] == [0, 3]


def test_a_client_that_lost_its_folder_is_left_as_it_is(tmp_path, caplog):
    clients = changing(tmp_path)
    strategy = fixed(changes=RowChanges(tmp_path / "records"))
    arrays = run(strategy, Grid(clients))
    (tmp_path / "rows-2").rename(tmp_path / "elsewhere")
    after = go_on(strategy, arrays, 2, clients)
    assert bits(after) == bits(arrays)
    assert told(strategy, "rejected-error")[-1] == 1
    assert strategy.channel.last_refusal.endswith("the log of this client says why")
    assert "run-" in caplog.text
    assert "lacks the sums 00000001-" in caplog.text


def test_a_second_node_of_a_partition_is_not_counted(tmp_path):
    """Nor one that does not say which it has, beside others that do."""
    clients = changing(tmp_path)
    strategy = fixed(changes=RowChanges(tmp_path / "records"))
    arrays = run(strategy, Grid(clients))
    grid = Grid(clients, num_clients=8)
    contexts = list(grid.contexts.values())
    contexts[6].node_config["partition-id"] = 1
    strategy.load_state_dict(strategy.state_dict())
    silent = {7: lost}
    grid.changes, grid.changed_kinds = silent, ["query.partition"]
    after = strategy.start(grid, as_record(arrays), num_rounds=2)
    assert bits(arrays_of(after.arrays)) == bits(arrays)
    assert sorted(grid.trained) == [0, 1, 2, 3, 4, 5]


@both
def test_nodes_that_do_not_say_who_they_are_are_not_counted(masked, tmp_path):
    """Registered anew, they would be counted again; with no other, nothing is asked."""
    clients = changing(tmp_path)
    strategy = fixed(changes=RowChanges(tmp_path / "records"), secure=masked)
    silent = dict.fromkeys(range(6), lost)
    first = Grid(clients, changes=silent, changed_kind="query.partition")
    said = "changes: nodes must say which partition they have; set partition-id"
    refused(said, run, strategy, first)
    assert not first.trained
    arrays = run(strategy, Grid(clients))
    again = {"changes": silent, "changed_kind": "query.partition", "node_ids": range(40, 46)}
    after = go_on(strategy, arrays, 2, clients, **again)
    assert bits(after) == bits(arrays)
    assert strategy.changes.num_rows == 45


def test_who_answers_a_lost_query_later_is_counted_then(tmp_path):
    clients, answers = changing(tmp_path), iter([lost, lambda reply: reply])
    changes = {3: lambda reply: next(answers)(reply)}
    strategy = fixed(changes=RowChanges(tmp_path / "records"))
    grid = Grid(clients, changes=changes, changed_kind="query.partition")
    after = run(strategy, grid, 2)
    assert bits(after) == from_scratch("one sum", PARTS)


def test_records_that_none_can_follow_are_refused_before_clients_work(tmp_path):
    """Edited ones, and those of another key."""
    clients, folder = changing(tmp_path), tmp_path / "records"
    strategy = fixed(changes=RowChanges(folder))
    arrays = run(strategy, Grid(clients))
    key, grid = folder / "signing-key", Grid(clients)
    key.write_text("00" * 32)
    strategy.load_state_dict(strategy.state_dict())
    refused("line 1: signed by", strategy.start, grid, as_record(arrays), num_rounds=2,
            error=SealError)  # fmt: skip
    key.write_text("no key")
    refused("expected a signing key", run, fixed(changes=RowChanges(folder)), grid,
            error=SealError)  # fmt: skip
    assert not grid.trained


def test_two_servers_that_go_on_from_one_state_both_take_a_row_out(tmp_path):
    """The row goes between their second rounds, in which the first one's state counts it."""
    clients, (x, y) = changing(tmp_path), PARTS[4]
    first, second = (fixed(changes=RowChanges(tmp_path / name)) for name in "ab")
    arrays = run(first, Grid(clients))
    second.load_state_dict(first.state_dict())
    arrays = go_on(first, arrays, 2, clients)
    books(tmp_path)[4].delete(x[:1], y[:1])
    expected = from_scratch("one sum", without(PARTS, {4: (0,)}))
    assert bits(go_on(second, arrays, 2, clients)) == expected
    assert bits(go_on(first, arrays, 3, clients)) == expected


def test_clients_models_of_their_own_are_without_the_rows_that_went(tmp_path):
    """As of a run that never had them: the total, and a client's own sums."""
    clients = changing(tmp_path)
    x, y = PARTS[4]
    kind = partial(make, validation_share=0.3, personal=True)
    strategy = kind(changes=RowChanges(tmp_path / "records"))
    arrays = run(strategy, Grid(clients))
    books(tmp_path)[4].delete(x[:2], y[:2])
    go_on(strategy, arrays, 2, clients)
    run(never := kind(), Grid(clients_of(without(PARTS, {4: (0, 1)}))))
    assert bits(strategy.total_sent) == bits(never.total_sent)


def test_what_does_not_go_together_is_refused(tmp_path):
    changes = RowChanges(tmp_path)
    refused("changes: .* need sums.bits = 2 ... 8, got 32", fixed, bits=32, changes=changes)
    said = "changes: with noise only what its epsilon covers may be used"
    refused(said, fixed, noise=NoisySums(1.0), changes=changes)
    for part in ({"storage": KeptSums(tmp_path)}, {"asynchrony": True, "round_deadline": 9.0}):
        refused("changes: a client deletes all its rows; leave", fixed, changes=changes, **part)
    grid = Grid(clients_of(PARTS))
    strategy = fixed(changes=changes)
    with pytest.raises(RuntimeError):
        run(strategy, grid)
    assert "make it with rows=CountedRows(folder)" in strategy.channel.last_refusal
    x, y = PARTS[0]
    rows = CountedRows(tmp_path / "rows")
    said = "sampling_rate: expected 1 with rows"
    refused(said, ClosedFormClient, features(), x, y, rows=rows, sampling_rate=0.5)


@pytest.mark.parametrize("width", [2, 5, 60])
def test_sums_of_rows_are_positive_however_few_and_whatever_their_scale(width):
    """Rank 1 to p, features of sizes 1 to 127; an eigenvalue of -1e-6 is not within rounding.

    The bound, 2 p (p + 2) eps for a diagonal of ones, is 2e-12 for p = 60.
    """
    generator = np.random.default_rng(width)
    for n in (1, 2, width, 3 * width):
        z = np.rint(generator.uniform(-1, 1, (n, width)) * generator.integers(1, 128, width))
        z[0] = 1
        gram = z.T @ z
        scale = np.sqrt(np.diag(gram))
        least, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
        direction = vectors[:, 0] * scale
        worse = gram - (least[0] + 1e-6) * np.outer(direction, direction)
        first, second = (
            FeatureStatistics(
                matrix[np.triu_indices(width)], np.zeros((1, width)), np.array([n]), np.ones(1)
            )
            for matrix in (gram, worse)
        )
        first.require_positive()
        refused("positive semidefinite", second.require_positive, error=BadReply)
