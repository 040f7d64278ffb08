"""Which clients gain, from tables made by hand and from runs."""

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config, run
from fedntk.simulations.data.client_tables import (
    client_accuracy_table,
    client_gains,
    client_summary,
    newest_accuracies,
)
from fedntk.simulations.report.figures import similarity_heat_map

COLUMNS = ["run", "method", "seed", "round", "partition", "metric", "value"]


def table(rows):
    return pd.DataFrame([(*row[:1], "m", *row[1:]) for row in rows], columns=COLUMNS)


CLIENTS = table(
    [
        ("b", 0, 10, 0, "accuracy", 0.5),
        ("b", 0, 10, 1, "accuracy", 0.8),
        ("b", 0, 8, 0, "accuracy", 0.9),  # older than what round 10 says
        ("b", 0, 5, 2, "accuracy", 1.0),  # too old, by a round
        ("b", 0, 10, 0, "loss", 7.0),
        ("a", 0, 10, 0, "accuracy", 0.7),
        ("a", 0, 9, 1, "accuracy", 0.795),
        ("a", 0, 10, 3, "accuracy", 0.1),
        ("a", 1, 10, 0, "accuracy", 0.3),
    ]
)


def test_the_newest_accuracy_of_the_last_rounds_counts():
    newest = newest_accuracies(CLIENTS)
    found = {(r.run, r.seed, r.partition): r.accuracy for r in newest.itertuples()}
    assert found == {
        ("b", 0, 0): 0.5, ("b", 0, 1): 0.8, ("a", 0, 0): 0.7, ("a", 0, 1): 0.795,
        ("a", 0, 3): 0.1, ("a", 1, 0): 0.3,
    }  # fmt: skip
    wide = client_accuracy_table(CLIENTS)
    assert list(wide.columns) == ["b", "a"]
    assert wide.loc[(0, 1)].tolist() == [0.8, 0.795]


def test_statistics_are_of_each_seeds_clients_and_then_means_over_the_seeds():
    summary = client_summary(CLIENTS).set_index("run")
    assert summary.loc["b", ["seeds", "clients", "mean", "worst"]].tolist() == [1, 2, 0.65, 0.5]
    assert summary.loc["b", "std"] == pytest.approx(0.15)
    assert np.isnan(summary.loc["b", "mean-std"])
    of_seed_0 = np.array([0.7, 0.795, 0.1])
    means = [of_seed_0.mean(), 0.3]
    assert summary.loc["a", "mean"] == pytest.approx(np.mean(means))
    assert summary.loc["a", "mean-std"] == pytest.approx(np.std(means, ddof=1))
    assert summary.loc["a", "worst"] == pytest.approx((0.1 + 0.3) / 2)
    assert summary.loc["a", "std"] == pytest.approx(of_seed_0.std() / 2)


def test_gains_are_of_the_clients_that_both_runs_have():
    """Client 0 gains 0.2; client 1 loses 0.005, which is within the margin; others are left out."""
    (row,) = client_gains(CLIENTS, ["b"]).to_dict("records")
    assert (row["run"], row["against"], row["clients"]) == ("a", "b", 2)
    assert (row["gain"], row["lose"]) == (0.5, 0.0)
    assert row["mean-gain"] == pytest.approx((0.2 - 0.005) / 2)
    assert (row["largest-gain"], row["largest-loss"]) == pytest.approx((0.2, -0.005))
    assert client_gains(CLIENTS, ["nobody"]).empty


def test_clients_that_are_alike_stand_side_by_side():
    """Two blocks, shuffled: ordered again, each pair of neighbours within a block is alike."""
    block = np.kron(np.eye(2), np.full((4, 4), 0.9)) + 0.1 * np.eye(8)
    order = np.random.default_rng(0).permutation(8)
    figure = similarity_heat_map(block[np.ix_(order, order)], order)
    axes = figure.axes[0]
    shown = [int(label.get_text()) for label in axes.get_xticklabels()]
    assert sorted(shown[:4]) in ([0, 1, 2, 3], [4, 5, 6, 7])
    assert axes.images[0].get_array()[:4, 4:].max() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_heat_map_of_one_or_two_clients(count):
    figure = similarity_heat_map(np.ones((count, count)), range(count))
    assert len(figure.axes[0].get_xticklabels()) == count


def test_targets_go_by_the_clients_own_models(tmp_path):
    """Here the server's model stays as it was drawn."""
    config = Config(
        method="local-training", num_clients=4, clients_per_round=2, clients_per_evaluation=4,
        rounds=4, private_test=True, partition="pathological", learning_rate=0.1, local_epochs=3,
        targets="0.5", out=tmp_path,
    )  # fmt: skip
    result = run(config, progress=False)
    curve = result.curve("client-accuracy-mean")
    reached = result.to_target(0.5)
    assert reached["round"] == curve[curve >= 0.5].index[0]
    assert result.summary["to-target"]["0.5"] == reached
