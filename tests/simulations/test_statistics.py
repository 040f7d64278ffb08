"""Statistics over seeds: cases counted by hand, limits, and SciPy's own words."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import bootstrap, trim_mean

from fedntk.simulations.report.statistics import (
    Estimate,
    estimate,
    interquartile_mean,
    paired_differences,
    performance_profile,
    run_scores,
    summary_over_seeds,
)


def scores(**runs):
    rows = [
        (run, f"task {number}", seed, float(value))
        for run, tasks in runs.items()
        for number, task in enumerate(tasks if isinstance(tasks[0], list) else [tasks])
        for seed, value in enumerate(task)
    ]
    return pd.DataFrame(rows, columns=["run", "task", "seed", "value"])


def test_intervals_that_can_be_counted():
    """The mean of a resample of 0, 0, 3 is binomial(3, 1/3): 0 in 30 %, 3 in 3.7 % of all.

    Both are more than the 2.5 % at each end of a 95 % interval. In the middle 90 % there is no 3,
    and the next is 2, in 22 %. Of two values, each end is a quarter of all resamples.
    """
    assert estimate([[0, 3, 0]]) == (1, 0, 3)
    assert estimate([[0, 0, 3]], confidence=0.9) == (1, 0, 2)
    assert estimate([[0, 1]]) == (0.5, 0, 1)
    # resampled within each task, so the mean of both tasks does not vary: not from 0 to 10
    assert estimate([[0, 0], [10, 10]]) == (5, 5, 5)


def test_intervals_are_scipys_whatever_the_order_of_the_seeds():
    values = np.random.default_rng(1).normal(size=8)
    generator = np.random.default_rng(0)
    own = bootstrap((np.sort(values),), np.mean, method="percentile", rng=generator)
    assert estimate([values])[1:] == pytest.approx(tuple(own.confidence_interval))
    assert estimate([values[::-1]]) == estimate([values])


def test_interquartile_mean_is_that_of_all_tasks_together():
    """As rliable's ``aggregate_iqm``: a quarter is cut at each end of all runs of all tasks."""
    first, second = np.array([0.0, 1, 2, 3]), np.array([4.0, 5, 6, 100])
    assert interquartile_mean(first, second) == (2 + 3 + 4 + 5) / 4
    assert interquartile_mean(first, second) == trim_mean(np.stack([first, second]), 0.25, None)
    row = summary_over_seeds(scores(a=[[0, 1, 2, 3], [4, 5, 6, 100]])).iloc[0]
    assert (row["mean"], row.iqm, row.seeds, row.scores) == (121 / 8, 3.5, 4, 8)
    assert row["iqm-low"] < row.iqm < row["iqm-high"]


def test_one_seed_has_no_interval():
    assert estimate([[0.5]]).text() == "50.0"
    assert Estimate(0.5, 0.25, 1).text() == "50.0 [25.0, 100.0]"
    assert summary_over_seeds(scores(a=[1])).filter(regex="low|high").isna().all(axis=None)


def test_paired_differences_are_over_common_seeds():
    """What differs between seeds but not between runs leaves no width."""
    table = paired_differences(scores(a=[1, 5, 9], b=[2, 6, 10, 99], c=[1, 5, 9]))
    row = table.set_index(["run", "against"]).T
    assert row["b", "a"].tolist() == [3, 1, 1, 1]
    assert row["a", "b"].tolist() == [3, -1, -1, -1]
    assert row["c", "a"].tolist() == [3, 0, 0, 0]
    assert len(table) == 6
    assert paired_differences(scores(a=[1, 2], b=[0, 0]), ["a"]).difference.tolist() == [-1.5]


def test_performance_profile_counts_what_lies_above():
    found = performance_profile(scores(a=[0.1, 0.5, 0.9], b=[[1, 1], [0, 0]]), [0, 0.1, 0.5, 1])
    assert found[found.run == "a"].share.tolist() == [1, 2 / 3, 1 / 3, 0]
    b = found[found.run == "b"]
    assert b[["share", "low", "high"]].to_numpy().tolist() == [[0.5] * 3] * 3 + [[0] * 3]


def test_scores_are_of_the_last_round_that_has_the_metric():
    rows = [("a", 0, r, v) for r, v in enumerate([0.3, 0.9, 0.6])] + [("b", 0, 0, 0.2)]
    rounds = pd.DataFrame(rows, columns=["run", "seed", "round", "value"]).assign(metric="accuracy")
    assert run_scores(rounds[::-1]).value.tolist() == [0.6, 0.2]
    assert run_scores(rounds, tasks={"a": "x", "b": "y"}).task.tolist() == ["x", "y"]
    with pytest.raises(ValueError, match="metric: expected one of accuracy; got 'f1'"):
        run_scores(rounds, "f1")
