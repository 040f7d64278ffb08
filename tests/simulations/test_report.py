"""Tables and pictures say what the runs' records say."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

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
    table = final_table(runs).set_index("run")
    own = [run for run in runs if run.summary["run"] == "SGD, 0.1"]
    last = 100 * np.array([run.curve().iloc[-1] for run in own])
    row = table.loc["SGD, 0.1"]
    assert row["seeds"] == 2
    assert row["last accuracy (%)"] == f"{last.mean():.1f} ± {last.std(ddof=1):.1f}"
    up = np.mean([run.curve("bytes-up").sum() for run in own]) / 1e6
    assert row["MB up"] == f"{up:.1f}"


def test_target_table_holds_medians_of_those_that_reach_it(runs):
    """Seeds 0 and 1 of a run reach 34 % in rounds 4 and 3, and 54 % in no round and in round 5."""
    own = [
        replace(runs[0], rounds=table([seed], 6).query("run == 'one'"), summary={"run": "one"})
        for seed in (0, 1)
    ]
    found = target_table(own, [0.34, 0.54, 0.99]).iloc[0]
    assert found.to_dict() == {
        "run": "one", "rounds to 34 %": "4", "MB up to 34 %": "9.0", "s to 34 %": "2.2",
        "rounds to 54 %": "5 (1 of 2)", "MB up to 54 %": "12.0 (1 of 2)",
        "s to 54 %": "3.0 (1 of 2)",
        "rounds to 99 %": "-", "MB up to 99 %": "-", "s to 99 %": "-",
    }  # fmt: skip
    assert list(target_table(runs))[1::3] == ["rounds to 30 %", "rounds to 99 %"]


def test_report_has_tables_in_markdown_and_latex_and_readable_pictures(folder, tmp_path):
    text = write_report(folder, tmp_path).read_text()
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [
        *("accuracy-bytes-up.png", "accuracy-rounds.png", "accuracy-seconds.png"),
        *("clients.png", "heterogeneity.png", "labels-2.png", "labels.png"),
    ]
    for name in pictures:
        assert f"]({name})" in text
        assert (tmp_path / name).stat().st_size < 300_000
        picture = np.asarray(Image.open(tmp_path / name).convert("L"))
        assert 0.005 < (picture < 200).mean() < 0.5  # neither empty nor covered
    latex = (tmp_path / "targets.tex").read_text()
    assert r"E\_\%" in latex
    assert r"rounds to 30 \%" in latex
    assert latex.count(r"\\") == 4
    assert "| SGD, 0.1 |" in text


def test_runs_that_differ_in_alpha_alone_are_one_curve(runs):
    assert _without_alpha(runs) == {
        "SGD, 0.1": "SGD", "SGD, 100": "SGD", "E_%": "E_%"
    }  # fmt: skip


def test_one_run_can_be_reported(folder, tmp_path):
    text = write_report(folder / "SGD, 0.1" / "seed-0", tmp_path).read_text()
    assert "digits, 8 clients, 3 a round, dirichlet(0.1)" in text
    assert not (tmp_path / "heterogeneity.png").exists()


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
    ("against", "x", "label"),
    [
        ("rounds", [0, 1, 2, 3, 4], "communication round"),
        ("bytes-up", [2, 4, 6, 8, 10], "data sent by clients (MB)"),
        ("seconds", [0.5, 1, 1.5, 2, 2.5], "time (s)"),
    ],
)
def test_curves_are_means_over_seeds_against_summed_costs(against, x, label):
    figure = accuracy_curves(table(), against=against, title="t", target=0.4)
    axes = figure.axes[0]
    np.testing.assert_allclose(line(figure, 0)[:, 0], x)
    np.testing.assert_allclose(line(figure, 0)[:, 1], 100 * (np.arange(5) / 10 + 0.025))
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (round(band.y0, 6), round(band.y1, 6)) == (0, 45)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "test accuracy (%)")
    assert axes.get_legend().get_title().get_text() == "band: range over seeds"
    figure.savefig(io.BytesIO())
    with pytest.raises(ValueError, match="against: expected one of rounds, bytes-up, seconds, got"):
        accuracy_curves(table(), against="joules")


def test_seeds_of_different_length_are_drawn_as_far_as_all_go():
    rows = table()
    short = rows[(rows.seed == 0) | (rows["round"] < 3)]
    np.testing.assert_allclose(line(accuracy_curves(short), 0)[:, 0], [0, 1, 2])


def test_ten_runs_have_ten_styles():
    rows = table(seeds=(0,), rounds=2)
    many = pd.concat([rows[rows.run == "one"].assign(run=f"run {i}") for i in range(10)])
    lines = accuracy_curves(many).axes[0].lines
    assert len({(each.get_color(), each.get_linestyle()) for each in lines}) == 10


def test_one_seed_has_no_band():
    figure = accuracy_curves(table(seeds=(0,)))
    assert not figure.axes[0].collections
    assert figure.axes[0].get_legend().get_title().get_text() == ""


def test_heterogeneity_takes_the_best_round_of_each_seed():
    alphas = {"one": 0.1, "two": 10.0}
    figure = accuracy_against_heterogeneity(table(), alphas)
    np.testing.assert_allclose(line(figure, 0), [[0.1, 42.5], [10, 42.5]])
    assert figure.axes[0].get_xscale() == "log"
    apart = accuracy_against_heterogeneity(table(), alphas, labels={"one": "a", "two": "b"})
    np.testing.assert_allclose(line(apart, 0), [[0.1, 42.5]])


def test_a_run_has_its_colour_in_whatever_order_it_comes():
    both, turned = (
        {line.get_label(): line.get_color() for line in accuracy_curves(rows).axes[0].lines}
        for rows in (table(), table().iloc[::-1])
    )
    assert both == turned


def test_clients_newest_accuracies_are_drawn_as_shares():
    columns = ["run", "method", "seed", "round", "partition", "metric", "value"]
    newest = [(0, 1, 0, 0.1), (0, 7, 0, 0.5), (0, 8, 1, 0.25), (0, 9, 0, 0.75), (1, 2, 2, 1.0)]
    rows = [("one", "m", *place, "accuracy", value) for *place, value in newest]
    clients = pd.DataFrame(rows, columns=columns)
    assert sorted(newest_accuracies(clients).accuracy) == [0.25, 0.75, 1.0]
    steps = line(client_accuracies(clients), 0)
    np.testing.assert_allclose(steps[1:4], [[25, 100 / 3], [75, 200 / 3], [100, 100]])


def test_discs_are_as_large_as_the_numbers_of_examples():
    labels = np.array([0, 0, 0, 0, 1, 1, 2])
    clients = [np.array([0, 1, 2, 3]), np.array([4]), np.array([5, 6])]
    figure = label_distribution(labels, clients)
    discs = figure.axes[0].collections[0]
    assert discs.get_offsets().tolist() == [[0, 0], [1, 1], [2, 1], [2, 2]]
    sizes = discs.get_sizes()
    np.testing.assert_allclose(sizes / sizes[0], [1, 0.25, 0.25, 0.25])
    many = label_distribution(labels, [np.array([0])] * 60)
    assert "the first 50 of 60" in many.axes[0].get_xlabel()
