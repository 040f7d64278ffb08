"""Robust means: Flower's own rules as oracles, breakdown points, limits."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from scipy.optimize import minimize

from fedntk.ntk.averages import change_size, weighted_mean
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.robust_averages import (
    DEFENCES,
    bound_changes,
    least_models,
    robust_mean,
    screen_by_loss,
)
from fedntk.simulations.engine._flower import become_server

SHAPES = {"0.weight": (3, 4), "0.bias": (3,), "2.weight": (2, 3)}
ROBUST = [defence for defence in DEFENCES if defence != "none"]


def models(count, seed=0, spread=0.1, dtype=np.float32):
    rng = np.random.default_rng(seed)
    centre = {n: rng.normal(size=shape) for n, shape in SHAPES.items()}
    return [
        {n: (a + spread * rng.normal(size=a.shape)).astype(dtype) for n, a in centre.items()}
        for _ in range(count)
    ]


ZERO = {n: np.zeros(shape, np.float32) for n, shape in SHAPES.items()}


def mean(defence, group, malicious=1, before=ZERO, examples=None):
    return robust_mean(before, group, examples or [10] * len(group), defence, malicious)


def flat(arrays):
    return np.concatenate([np.asarray(arrays[n], np.float64).ravel() for n in SHAPES])


@pytest.mark.parametrize(
    ("defence", "oracle"),
    [
        ("median", FedMedian()),
        ("trimmed-mean", FedTrimmedAvg(beta=0.2)),
        ("krum", Krum(num_malicious_nodes=2)),
        ("multi-krum", MultiKrum(num_malicious_nodes=2, num_nodes_to_select=9)),
        ("bulyan", Bulyan(num_malicious_nodes=2)),
    ],
)
def test_rules_are_those_of_flower(defence, oracle):
    """Eleven models, two of them far off; Flower computes in float32, of eps 6e-8."""
    clients = models(11)
    clients[3], clients[7] = ({n: 5 - 3 * a for n, a in clients[k].items()} for k in (3, 7))
    become_server()
    replies = []
    for model in clients:
        sent = Message(RecordDict(), 1, "train")
        arrays = ArrayRecord({n: Array(a) for n, a in model.items()})
        metrics = MetricRecord({"num-examples": 10})
        replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=sent))
    actual, _ = oracle.aggregate_train(1, replies)
    expected = {n: a.numpy() for n, a in actual.items()}
    np.testing.assert_allclose(flat(mean(defence, clients, 2)), flat(expected), atol=2e-6)


@pytest.mark.parametrize("defence", ROBUST)
@pytest.mark.parametrize("malicious", [1, 2])
def test_malicious_models_cannot_carry_the_mean_away(defence, malicious):
    """With the fewest models that a rule needs, it stays within twice the honest models' spread.

    norm-bound needs a majority here, too; each of them then moves it by at most two median norms
    times its share.
    """
    group = models(max(least_models(defence, malicious), 2 * malicious + 1))
    honest = np.stack([flat(model) for model in group[malicious:]])
    for k in range(malicious):
        group[k] = {n: np.full_like(a, 1e6) for n, a in group[k].items()}
    actual, centre = flat(mean(defence, group, malicious)), honest.mean(0)
    spread = np.abs(honest - centre).max()
    if defence == "norm-bound":
        longest = np.median(np.linalg.norm(honest, axis=1))
        assert np.linalg.norm(actual - centre) <= 2.1 * longest * malicious / len(group)
    else:
        assert np.abs(actual - centre).max() <= 2 * spread
    assert np.abs(flat(mean("none", group)) - centre).max() > 1e4 * spread


@pytest.mark.parametrize("defence", DEFENCES)
def test_equal_models_are_their_mean_in_any_order(defence):
    same = models(1) * 11
    np.testing.assert_allclose(flat(mean(defence, same, 2)), flat(same[0]), rtol=1e-6)
    group = models(11)
    expected = flat(mean(defence, group, 2))
    np.testing.assert_allclose(flat(mean(defence, group[::-1], 2)), expected, atol=1e-6)


def test_claims_of_examples_move_only_weighted_means():
    group = models(7)
    for defence in DEFENCES:
        moved = flat(mean(defence, group, examples=[10**6, *[1] * 6])) - flat(mean(defence, group))
        assert bool(np.abs(moved).max() > 1e-3) == (defence in ("none", "norm-bound"))


def test_bounded_changes_have_at_most_the_median_norm_and_their_direction():
    start, group = models(1)[0], models(5, seed=1)
    group[0] = {n: start[n] + 100 * (a - start[n]) for n, a in group[0].items()}
    bounded = bound_changes([start] * 5, group)
    sizes = [change_size(start, model) for model in group]
    for model, was, size in zip(bounded, group, sizes, strict=True):
        now = change_size(start, model)
        np.testing.assert_allclose(now, min(size, np.median(sizes)), rtol=1e-5)
        change, before = flat(model) - flat(start), flat(was) - flat(start)
        np.testing.assert_allclose(change / now, before / size, atol=1e-5)


def prototypes(rows, counts):
    return Prototypes(np.asarray(rows, np.float32), np.asarray(counts))


def test_prototypes_of_most_clients_bear_a_malicious_one_whatever_it_claims():
    """Two agree on the first class. Of the second's two prototypes the longer is shortened."""
    honest = [prototypes([[1, 0], [0, 2]], [3, 4]), prototypes([[1, 0], [0, 4]], [5, 1])]
    malicious = prototypes([[-99, -99], [0, 0]], [1000, 0])
    actual = Prototypes.geometric_median([*honest, malicious])
    np.testing.assert_allclose(actual.means, [[1, 0], [0, 2]], atol=1e-4)
    assert actual.counts.tolist() == [1008, 5]


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_has_the_least_sum_of_distances(seed):
    """Beside scipy's minimum, for means of norm 1; votes are at most those of the median client."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(5, 3)) + 1
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    counts = draw.integers(1, 50, 5)
    group = [prototypes([row], [count]) for row, count in zip(rows, counts, strict=True)]
    votes = np.minimum(counts, np.median(counts))

    def total(point):
        return votes @ np.linalg.norm(rows - point, axis=1)

    least = minimize(total, rows.mean(0), method="Nelder-Mead", tol=1e-10).fun
    assert total(Prototypes.geometric_median(group).means[0]) <= least * (1 + 1e-5)


def test_nearest_neighbour_mixing_by_hand():
    """0, 1, 2 and 10 with f = 1: the means of three nearest are 1, 1, 1 and 13 / 3."""
    group = [{"w": np.array([k])} for k in (0.0, 1.0, 2.0, 10.0)]
    assert robust_mean({"w": np.zeros(1)}, group, [1] * 4, "nnm", 1)["w"] == 1


@pytest.mark.parametrize("claim", [5, 10**7])
@pytest.mark.parametrize("malicious", [1, 2, 4])
def test_models_are_refused_without_which_a_fresh_mean_has_the_lowest_loss(malicious, claim):
    """Two of six are far off, and whole numbers too. The loss is 0.3 above that of the others."""
    group, examples = models(6), [1, claim, 3, 4, claim, 6]
    for k, model in enumerate(group):
        model["count"] = np.array(8 + 100 * (k in (1, 4)))
    for k, factor in ((1, 40), (4, 20)):
        group[k] |= {n: factor * group[k][n] for n in SHAPES}

    def mean_of(left):
        whole = [{n: a.astype(np.float64) for n, a in group[k].items()} for k in left]
        mean = weighted_mean(whole, [examples[k] for k in left])
        return np.append(flat(mean), mean["count"])

    honest = mean_of([0, 2, 3, 5])

    def loss_of(mean):
        return 0.3 + float(np.linalg.norm(mean - honest))

    left = [[*range(6)]]
    while len(left) <= malicious:
        fewer = [[k for k in left[-1] if k != out] for out in left[-1]]
        left.append(min(fewer, key=lambda some: loss_of(mean_of(some))))
    best = min(left, key=lambda some: loss_of(mean_of(some)) / 0.995 ** (6 - len(some)))
    actual = screen_by_loss(
        group, examples, lambda a: loss_of(np.append(flat(a), a["count"])), malicious
    )
    assert [k for k, bad in enumerate(actual) if bad is None] == best
    if malicious > 1:
        assert best == [0, 2, 3, 5]


@pytest.mark.parametrize("far", [(2,), (2, 5)])
def test_a_loss_that_is_no_number_is_the_worst_and_a_negative_one_refused(far):
    """One far model is enough for it."""
    group = [{"w": np.array([300.0 if k in far else k])} for k in range(7)]
    verdicts = screen_by_loss(group, [1] * 7, lambda a: np.nan if a["w"] > 9 else 1.0, 2)
    assert [k for k, bad in enumerate(verdicts) if bad is not None] == [*far]
    with pytest.raises(ValueError, match="validation_loss: expected 0 or more, got -1"):
        screen_by_loss(group, [1] * 7, lambda _: -1.0, 1)
