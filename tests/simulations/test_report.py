"""Tables and pictures say what the runs' records say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config, Run, compare, read_runs, write_report
from fedntk.simulations.data.client_tables import newest_accuracies
from fedntk.simulations.report.figures import (
    accuracy_against_heterogeneity,
    accuracy_curves,
    client_accuracies,
    label_distribution,
)
from fedntk.simulations.report.report import _without_alpha, final_table, target_table

SMALL = Config(
    method="fedavg", num_clients=8, clients_per_round=3, clients_per_evaluation=4, rounds=3,
    targets="0.3,0.99", learning_rate=0.1, width=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    alphas = {"SGD, 0.1": SMALL, "SGD, 100": SMALL.replace(alpha=100.0)}
    configs = {**alphas, "E_%": SMALL.replace(local_epochs=3)}
    compare(configs, seeds=[0, 1], out=folder, progress=False)
    return folder


@pytest.fixture
def runs(folder: Path) -> list[Run]:
    return read_runs(folder)


def test_final_table_holds_means_and_deviations_over_seeds(runs):
    row = final_table(runs).set_index("run").loc["SGD, 0.1"]
    own = [run for run in runs if run.summary["run"] == "SGD, 0.1"]
    last = 100 * np.array([run.curve().iloc[-1] for run in own])
    assert row["seeds"] == 2
    assert row["last accuracy (%)"] == f"{last.mean():.1f} ± {last.std(ddof=1):.1f}"
    assert row["MB up"] == f"{np.mean([run.curve('bytes-up').sum() for run in own]) / 1e6:.1f}"


def test_target_table_holds_medians_of_those_that_reach_it(runs):
    """Seeds 0 and 1 of a run reach 34 % in rounds 4 and 3, and 54 % in no round and in round 5."""
    own = [
        replace(runs[0], rounds=table([seed], 6).query("run == 'one'"), summary={"run": "one"})
        for seed in (0, 1)
    ]
    assert target_table(own, [0.34, 0.54, 0.99]).iloc[0].to_dict() == {
        "run": "one", "rounds to 34 %": "4", "MB up to 34 %": "9.0", "s to 34 %": "2.2",
        "rounds to 54 %": "5 (1 of 2)", "MB up to 54 %": "12.0 (1 of 2)",
        "s to 54 %": "3.0 (1 of 2)",
        "rounds to 99 %": "-", "MB up to 99 %": "-", "s to 99 %": "-",
    }  # fmt: skip


def test_report_has_tables_in_markdown_and_latex_and_pictures(folder, tmp_path):
    text = write_report(folder, tmp_path).read_text()
    pictures = {path.name for path in tmp_path.glob("*.png") if path.stat().st_size > 1000}
    assert pictures == {
        *("accuracy-bytes-up.png", "accuracy-rounds.png", "accuracy-seconds.png"),
        *("clients.png", "heterogeneity.png", "labels-2.png", "labels.png"),
    }
    assert all(f"]({name})" in text for name in pictures)
    latex = (tmp_path / "targets.tex").read_text()
    assert r"E\_\%" in latex
    assert latex.count(r"\\") == 4
    assert "| SGD, 0.1 |" in text
    one = write_report(folder / "SGD, 0.1" / "seed-0", tmp_path / "one").read_text()
    assert "digits, 8 clients, 3 a round, dirichlet(0.1)" in one


def test_runs_that_differ_in_alpha_alone_are_one_curve(runs):
    assert _without_alpha(runs) == {"SGD, 0.1": "SGD", "SGD, 100": "SGD", "E_%": "E_%"}


def line(figure, number):
    return figure.axes[0].lines[number].get_xydata()


def table(seeds=(0, 1), rounds=5):
    costs = {"bytes-up": 2e6, "bytes-down": 0, "seconds": 0.5}
    rows = [
        (name, "m", seed, r, metric, value)
        for name in ("one", "two")
        for seed in seeds
        for r in range(rounds)
        for metric, value in {"accuracy": r / 10 + seed / 20, **costs}.items()
    ]
    return pd.DataFrame(rows, columns=["run", "method", "seed", "round", "metric", "value"])


@pytest.mark.parametrize(
    ("against", "x"),
    [
        ("rounds", [0, 1, 2, 3, 4]),
        ("bytes-up", [2, 4, 6, 8, 10]),
        ("seconds", [0.5, 1, 1.5, 2, 2.5]),
    ],
)
def test_curves_are_means_over_seeds_against_summed_costs(against, x):
    """Drawn as far as all seeds go."""
    figure = accuracy_curves(table(), against=against)
    mean = 100 * (np.arange(5) / 10 + 0.025)
    np.testing.assert_allclose(line(figure, 0), np.stack([x, mean], 1))
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (round(band.y0, 6), round(band.y1, 6)) == (0, 45)
    rows = table()
    short = rows[(rows.seed == 0) | (rows["round"] < 3)]
    np.testing.assert_allclose(line(accuracy_curves(short, against=against), 0)[:, 0], x[:3])
    with pytest.raises(ValueError, match="against: expected one of rounds, bytes-up, seconds, got"):
        accuracy_curves(rows, against="joules")


def test_runs_have_their_own_styles_in_whatever_order_they_come():
    rows = table(seeds=(0,), rounds=2)
    many = pd.concat([rows[rows.run == "one"].assign(run=f"run {i}") for i in range(10)])
    styles, turned = (
        {own.get_label(): (own.get_color(), own.get_linestyle()) for own in figure.axes[0].lines}
        for figure in map(accuracy_curves, (many, many.iloc[::-1]))
    )
    assert styles == turned
    assert len(set(styles.values())) == 10


def test_heterogeneity_takes_the_best_round_of_each_seed():
    alphas = {"one": 0.1, "two": 10.0}
    figure = accuracy_against_heterogeneity(table(), alphas)
    np.testing.assert_allclose(line(figure, 0), [[0.1, 42.5], [10, 42.5]])
    apart = accuracy_against_heterogeneity(table(), alphas, labels={"one": "a", "two": "b"})
    np.testing.assert_allclose(line(apart, 0), [[0.1, 42.5]])


def test_clients_newest_accuracies_are_drawn_as_shares():
    columns = ["run", "method", "seed", "round", "partition", "metric", "value"]
    newest = [(0, 1, 0, 0.1), (0, 7, 0, 0.5), (0, 8, 1, 0.25), (0, 9, 0, 0.75), (1, 2, 2, 1.0)]
    rows = [("one", "m", *place, "accuracy", value) for *place, value in newest]
    clients = pd.DataFrame(rows, columns=columns)
    assert sorted(newest_accuracies(clients).accuracy) == [0.25, 0.75, 1.0]
    steps = line(client_accuracies(clients), 0)
    np.testing.assert_allclose(steps[1:4], [[25, 100 / 3], [75, 200 / 3], [100, 100]])


def test_discs_are_as_large_as_the_numbers_of_examples():
    clients = [np.array([0, 1, 2, 3]), np.array([4]), np.array([5, 6])]
    discs = label_distribution(np.array([0, 0, 0, 0, 1, 1, 2]), clients).axes[0].collections[0]
    assert discs.get_offsets().tolist() == [[0, 0], [1, 1], [2, 1], [2, 2]]
    sizes = discs.get_sizes()
    np.testing.assert_allclose(sizes / sizes[0], [1, 0.25, 0.25, 0.25])
