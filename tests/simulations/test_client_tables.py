"""Which clients gain, from tables made by hand and from runs."""

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations.data.client_tables import (
    client_accuracy_table,
    client_gains,
    client_summary,
    newest_accuracies,
)

CLIENTS = pd.DataFrame(
    columns=["run", "seed", "round", "partition", "metric", "value"],
    data=[
        ("b", 0, 10, 0, "accuracy", 0.5),
        ("b", 0, 10, 1, "accuracy", 0.8),
        ("b", 0, 8, 0, "accuracy", 0.9),  # older than what round 10 says
        ("b", 0, 5, 2, "accuracy", 1.0),  # too old, by a round
        ("b", 0, 10, 0, "loss", 7.0),
        ("a", 0, 10, 0, "accuracy", 0.7),
        ("a", 0, 9, 1, "accuracy", 0.795),
        ("a", 0, 10, 3, "accuracy", 0.1),
        ("a", 1, 10, 0, "accuracy", 0.3),
    ],
)


def test_the_newest_accuracy_of_the_last_rounds_counts():
    newest = newest_accuracies(CLIENTS)
    found = {(r.run, r.seed, r.partition): r.accuracy for r in newest.itertuples()}
    assert found == {
        ("b", 0, 0): 0.5, ("b", 0, 1): 0.8, ("a", 0, 0): 0.7, ("a", 0, 1): 0.795,
        ("a", 0, 3): 0.1, ("a", 1, 0): 0.3,
    }  # fmt: skip
    assert client_accuracy_table(CLIENTS).loc[(0, 1)].to_dict() == {"b": 0.8, "a": 0.795}


def test_statistics_are_of_each_seeds_clients_and_then_means_over_the_seeds():
    names = ["seeds", "clients", "mean", "worst", "std", "mean-std"]
    summary = client_summary(CLIENTS).set_index("run")[names]
    first = np.array([0.7, 0.795, 0.1])
    means = [first.mean(), 0.3]
    expected = [2, 2, np.mean(means), (0.1 + 0.3) / 2, first.std() / 2, np.std(means, ddof=1)]
    np.testing.assert_allclose(summary.loc["a"], expected)
    np.testing.assert_allclose(summary.loc["b"], [1, 2, 0.65, 0.5, 0.15, np.nan])


def test_gains_are_of_the_clients_that_both_runs_have():
    """Client 0 gains 0.2; client 1 loses 0.005, which is within the margin; others are left out."""
    (row,) = client_gains(CLIENTS, ["b"]).to_dict("records")
    assert (row["run"], row["against"], row["clients"]) == ("a", "b", 2)
    numbers = [row[name] for name in ("gain", "lose", "mean-gain", "largest-gain", "largest-loss")]
    assert numbers == pytest.approx([0.5, 0.0, (0.2 - 0.005) / 2, 0.2, -0.005])


def test_targets_go_by_the_clients_own_models(finished_run):
    """Here the server's model stays as it was drawn."""
    result = finished_run("local-training")
    curve, reached = result.curve("client-accuracy-mean"), result.to_target(0.3)
    assert result.curve().max() < 0.3
    assert reached["round"] == curve[curve >= 0.3].index[0]
    assert result.summary["to-target"]["0.3"] == reached
