"""Comparisons run once and go on; tables and pictures of runs and clients say what records say."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy.stats import bootstrap, trim_mean
from selenium.webdriver import ActionChains

from fedntk.simulations import Results, Run, RunFailed, compare, load_results, read_runs, run
from fedntk.simulations.report import statistics
from fedntk.simulations.report.figures import accuracy_curves, styles
from fedntk.simulations.report.report import (
    _examples_of_clients,
    _without_alpha,
    final_table,
    target_table,
    write_html,
)
from fedntk.simulations.report.results import round_at, run_state
from fedntk.simulations.report.statistics import Estimate, estimate

from ..conftest import requests_of, show
from .outcomes import refused
from .settings import FEDAVG

SMALL = FEDAVG.replace(clients_per_evaluation=4, rounds=3, targets="0.3,0.99", width=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    alphas = {"SGD, 0.1": SMALL, "SGD, 100": SMALL.replace(alpha=100.0)}
    configs = {**alphas, "E_%": SMALL.replace(local_epochs=3)}
    compare(configs, seeds=[0, 1], out=folder, progress=False)
    return read_runs(folder)


def test_final_table_holds_means_and_intervals_over_seeds(runs):
    """The interval of two values is from one to the other."""
    assert _without_alpha(runs) == {"SGD, 0.1": "SGD", "SGD, 100": "SGD", "E_%": "E_%"}
    row = final_table(runs).set_index("run").loc["SGD, 0.1"]
    group = [run for run in runs if run.summary["run"] == "SGD, 0.1"]
    last = 100 * np.array([run.curve().iloc[-1] for run in group])
    assert row["last accuracy (%)"] == f"{last.mean():.1f} [{last.min():.1f}, {last.max():.1f}]"
    assert row["MB up"] == f"{np.mean([run.curve('bytes-up').sum() for run in group]) / 1e6:.1f}"


def test_clients_figures_say_which_examples_they_are_of(runs):
    for settings, words in (
        ({}, "training examples"),
        ({"local_test_fraction": 0.2}, "held-out examples"),
        ({"private_test": True}, "part of the test set"),
    ):
        changed = [replace(run, config=run.config.replace(**settings)) for run in runs]
        assert _examples_of_clients(changed) == words
    assert (
        _examples_of_clients([runs[0], changed[1]]) == "part of the test set or training examples"
    )


def test_target_table_holds_medians_of_those_that_reach_it(runs):
    """Seeds 0 and 1 of a run reach 34 % in rounds 4 and 3, and 44 % in no round and in round 5.

    These curves are straight, so a mean over rounds on both sides is the round's value. The last
    two have fewer after them: seed 1 has 40 % in rounds 2 to 5, and 45 % in rounds 3 to 5.
    """
    tables = [pa.Table.from_pandas(table([seed], 6).query("run == 'one'")) for seed in (0, 1)]
    pair = [replace(runs[0], tables={"rounds": t}, summary={"run": "one"}) for t in tables]
    assert target_table(pair, [0.34, 0.44, 0.99]).iloc[0].to_dict() == {
        "run": "one", "rounds to 34 %": "4", "MB up to 34 %": "9.0", "MB down to 34 %": "13.5",
        "s to 34 %": "2.2", "rounds to 44 %": "5 (1 of 2)", "MB up to 44 %": "12.0 (1 of 2)",
        "MB down to 44 %": "18.0 (1 of 2)", "s to 44 %": "3.0 (1 of 2)",
        "rounds to 99 %": "-", "MB up to 99 %": "-", "MB down to 99 %": "-", "s to 99 %": "-",
    }  # fmt: skip


def test_a_round_reaches_a_target_by_the_mean_around_it():
    """Means by hand; of a straight line that is the round's own value, so the mean has no delay."""
    line = {r: 0.8 + 0.002 * (r - 20) for r in range(1, 41)}  # at 0.8 after 20 rounds
    assert round_at(line, 0.8 - 1e-9) == 20
    assert round_at(line | {9: 0.82}, 0.8) == 20  # 4 points of luck
    assert round_at({0: 0.1, 1: 0.9}, 0.8) == 1  # one exchange
    assert round_at({0: 0.8, 1: 0.1}, 0.8) == 0  # of a network that was trained before
    assert round_at({0: 0.1, 1: 0.5, 2: 0.99, 3: 0.99, 4: 0.99}, 0.8) == 2  # not 1, nor 3
    assert round_at({1: 0.7, 2: 0.7, 3: 0.7, 4: 0.7, 5: 0.85}, 0.8) is None  # the last one's luck
    assert round_at({5: 0.7, 10: np.nan, 15: 0.9, 20: 0.9}, 0.8) == 15  # what was evaluated
    assert round_at({}, 0.8) is round_at({1: np.nan}, 0.8) is None


def table(seeds=(0, 1), rounds=5):
    costs = {"bytes-up": 2e6, "bytes-down": 3e6, "seconds": 0.5}
    rows = [
        (name, "m", seed, r, metric, value)
        for name in ("one", "two")
        for seed in seeds
        for r in range(rounds)
        for metric, value in {"accuracy": r / 10 + seed / 20, **costs}.items()
    ]
    return pd.DataFrame(rows, columns=["run", "method", "seed", "round", "metric", "value"])


def test_curves_are_means_over_seeds_against_summed_costs():
    """Drawn as far as all seeds go."""
    rows, mean = table(), 100 * (np.arange(5) / 10 + 0.025)
    for way, sent in (("down", [3, 6, 9, 12, 15]), ("up", [2, 4, 6, 8, 10])):
        axes = accuracy_curves(rows, against=f"bytes-{way}").axes[0]
        np.testing.assert_allclose(axes.lines[0].get_xydata(), np.stack([sent, mean], 1))
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (round(band.y0, 6), round(band.y1, 6)) == (0, 45)
    short = accuracy_curves(rows[(rows.seed == 0) | (rows["round"] < 3)]).axes[0]
    np.testing.assert_allclose(short.lines[0].get_xdata(), [0, 1, 2])


CLIENTS = pd.DataFrame(
    columns=["run", "seed", "round", "partition", "value"],
    data=[
        ("b", 0, 10, 0, 0.5),
        ("b", 0, 10, 1, 0.8),
        ("b", 0, 8, 0, 0.9),  # older than what round 10 says
        ("b", 0, 5, 2, 1.0),  # too old, by a round
        ("a", 0, 10, 0, 0.7),
        ("a", 0, 9, 1, 0.795),
        ("a", 0, 10, 3, 0.1),
        ("a", 1, 10, 0, 0.3),
    ],
).assign(metric="accuracy")
CLIENTS.loc[len(CLIENTS)] = ("b", 0, 10, 0, 7.0, "loss")


def test_clients_newest_accuracies_of_the_last_rounds_count():
    newest = statistics.newest_accuracies(CLIENTS)
    assert {(r.run, r.seed, r.partition): r.accuracy for r in newest.itertuples()} == {
        ("b", 0, 0): 0.5, ("b", 0, 1): 0.8, ("a", 0, 0): 0.7, ("a", 0, 1): 0.795,
        ("a", 0, 3): 0.1, ("a", 1, 0): 0.3,
    }  # fmt: skip
    row = statistics.client_accuracy_table(CLIENTS).loc[(0, 1)]
    assert row.to_dict() == {"b": 0.8, "a": 0.795}
    # statistics are of each seed's clients, and then means over the seeds
    names = ["seeds", "clients", "mean", "worst", "std", "mean-std"]
    summary = statistics.client_summary(CLIENTS).set_index("run")[names]
    first = np.array([0.7, 0.795, 0.1])
    means = [first.mean(), 0.3]
    expected = [2, 2, np.mean(means), (0.1 + 0.3) / 2, first.std() / 2, np.std(means, ddof=1)]
    np.testing.assert_allclose(summary.loc["a"], expected)
    np.testing.assert_allclose(summary.loc["b"], [1, 2, 0.65, 0.5, 0.15, np.nan])


def test_gains_are_of_the_clients_that_both_runs_have():
    """Client 0 gains 0.2; client 1 loses 0.005, which is within the margin; others are left out."""
    (row,) = statistics.client_gains(CLIENTS, ["b"]).to_dict("records")
    assert (row["run"], row["against"], row["clients"]) == ("a", "b", 2)
    numbers = [row[name] for name in ("gain", "lose", "mean-gain", "largest-gain", "largest-loss")]
    assert numbers == pytest.approx([0.5, 0.0, (0.2 - 0.005) / 2, 0.2, -0.005])
    better = CLIENTS.assign(value=CLIENTS.value + 0.5 * (CLIENTS.run == "a"))
    (row,) = statistics.client_gains(better, ["b"]).to_dict("records")
    assert row["largest-loss"] == 0  # as both gain


def test_targets_go_by_the_clients_own_models(finished_run):
    """Here the server's model stays as it was drawn."""
    result = finished_run("local-training")
    curve, reached = result.curve("client-accuracy-mean"), result.to_target(0.3)
    assert result.curve().max() < 0.3
    assert reached["round"] == round_at(curve.to_dict(), 0.3)
    assert result.summary["to-target"]["0.3"] == reached


PAIR = {"wide": FEDAVG, "narrow": FEDAVG.replace(width=10)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The table of a comparison that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return compare(PAIR, seeds=np.array([1, 0]), out=folder, progress=False)


def test_table_of_all_rounds_by_name_and_seed(whole, tmp_path):
    accuracy = whole[whole.metric == "accuracy"]
    assert list(zip(accuracy.run, accuracy.seed, accuracy["round"], strict=True)) == [
        (name, seed, number) for name in PAIR for seed in (1, 0) for number in range(3)
    ]
    single = run(PAIR["narrow"], seed=1, out=tmp_path, progress=False)
    narrow = accuracy[(accuracy.run == "narrow") & (accuracy.seed == 1)].value
    assert narrow.tolist() == single.curve().tolist()


def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path, whole, each_run):
    ran = []

    def stop(config, record):
        if len(ran) == 3 and record["round"] == 1:
            raise KeyboardInterrupt

    each_run(lambda config: ran.append((f"{config.name} {config.seed}", run_state(config))), stop)
    with pytest.raises(KeyboardInterrupt):
        compare(PAIR, seeds=[1, 0], out=tmp_path, progress=False)
    summary = json.loads((tmp_path / "narrow" / "seed-1" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    table = compare(PAIR, seeds=[1, 0], out=tmp_path, progress=False)
    assert ran == [
        *(("wide 1", "new"), ("wide 0", "new"), ("narrow 1", "new")),
        *(("narrow 1", "interrupted"), ("narrow 0", "new")),
    ]
    assert (tmp_path / "wide" / "seed-1" / "rounds.parquet").exists()
    resumed, expected = (t[~t.metric.str.contains("seconds|memory")] for t in (table, whole))
    assert resumed.equals(expected)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, each_run):
    def fail(config):
        if config.name == "wide":
            raise RuntimeError("out of luck")

    each_run(fail)
    message = r"1 of 2 runs failed \(wide, seed 0: RuntimeError: out of luck \(test_report"
    refused(message, compare, PAIR, out=tmp_path, progress=False, error=RunFailed)
    assert load_results(tmp_path).run.unique().tolist() == ["narrow"]
    each_run()
    assert len(compare(PAIR, out=tmp_path, progress=False).run.unique()) == 2


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        (PAIR, {"seeds": 3}, "seeds: expected numbers such as 0,1,2, each once; got 3"),
        (PAIR, {"seeds": [1, 1]}, r"each once; got \[1, 1\]"),
        (PAIR, {"seed": 3}, "seed: set for each run by the comparison"),
        ({"a/b": FEDAVG, "a-b": FEDAVG}, {}, "names that make different folders"),
        (PAIR | {"c": FEDAVG.replace(model="lenet")}, {}, "c: .*images"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_run(tmp_path, configs, options, message):
    refused(message, compare, configs, out=tmp_path, progress=False, **options)
    assert list(tmp_path.rglob("*")) == []


def test_results_are_a_table_that_shows_itself(runs):
    table = Results(runs)
    assert type(table[table.metric == "accuracy"]) is pd.DataFrame
    assert len(load_results([run.folder for run in runs]).runs) == len(runs)
    for shown in (table._repr_html_(), runs[0]._repr_html_()):
        assert "accuracy" in shown
        assert '<img alt="curves of accuracy" src="data:image/png;base64,' in shown
    last = pd.DataFrame([run.summary for run in runs]).groupby("run").accuracy.mean()
    assert table.summary().set_index("run")["mean"].to_dict() == pytest.approx(last.to_dict())
    gain = table.differences(against="E_%").set_index("run").difference
    assert gain["SGD, 100"] == pytest.approx(last["SGD, 100"] - last["E_%"])


def test_a_run_has_one_colour_in_all_pictures(runs):
    """Also in a picture of some of the runs, which keep the place that they have among all."""
    expected, some = styles(["E_%", "SGD, 0.1", "SGD, 100"]), Results(runs)
    some = some[some.run != "E_%"]
    for line in accuracy_curves(some).axes[0].lines:
        assert line.get_color() == expected[line.get_label()]["color"]
    assert len({str(style) for style in styles(map(str, range(20))).values()}) == 20


def test_more_than_four_runs_have_bars_in_place_of_bands():
    rows = pd.concat([table().assign(run=f"run {n}") for n in range(5)])
    axes = accuracy_curves(rows).axes[0]
    assert [len(axes.containers), len(axes.collections)] == [5, 5]  # of bars, and no band


# --------------------------------------------------------------------- over seeds


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
    theirs = bootstrap((np.sort(values),), np.mean, method="percentile", rng=generator)
    assert estimate([values])[1:] == pytest.approx(tuple(theirs.confidence_interval))
    assert estimate([values[::-1]]) == estimate([values])


def test_interquartile_mean_is_that_of_all_tasks_together():
    """As rliable's ``aggregate_iqm``: a quarter is cut at each end of all runs of all tasks."""
    first, second = np.array([0.0, 1, 2, 3]), np.array([4.0, 5, 6, 100])
    assert statistics.interquartile_mean(first, second) == (2 + 3 + 4 + 5) / 4
    assert statistics.interquartile_mean(first, second) == trim_mean(
        np.stack([first, second]), 0.25, None
    )
    row = statistics.summary_over_seeds(scores(a=[[0, 1, 2, 3], [4, 5, 6, 100]])).iloc[0]
    assert (row["mean"], row.iqm, row.seeds, row.scores) == (121 / 8, 3.5, 4, 8)
    assert row["iqm-low"] < row.iqm < row["iqm-high"]


def test_one_seed_has_no_interval():
    assert estimate([[0.5]]).text() == "50.0"
    assert Estimate(0.5, 0.25, 1).text() == "50.0 [25.0, 100.0]"
    assert (
        statistics.summary_over_seeds(scores(a=[1])).filter(regex="low|high").isna().all(axis=None)
    )


def test_paired_differences_are_over_common_seeds():
    """What differs between seeds but not between runs leaves no width."""
    table = statistics.paired_differences(scores(a=[1, 5, 9], b=[2, 6, 10, 99], c=[1, 5, 9]))
    row = table.set_index(["run", "against"]).T
    assert row["b", "a"].tolist() == [3, 1, 1, 1]
    assert row["a", "b"].tolist() == [3, -1, -1, -1]
    assert row["c", "a"].tolist() == [3, 0, 0, 0]
    assert len(table) == 6
    assert statistics.paired_differences(scores(a=[1, 2], b=[0, 0]), ["a"]).difference.tolist() == [
        -1.5
    ]


def test_performance_profile_counts_what_lies_above():
    table = scores(a=[0.1, 0.5, 0.9], b=[[1, 1], [0, 0]])
    profile = statistics.performance_profile(table, [0, 0.1, 0.5, 1])
    assert profile[profile.run == "a"].share.tolist() == [1, 2 / 3, 1 / 3, 0]
    b = profile[profile.run == "b"]
    assert b[["share", "low", "high"]].to_numpy().tolist() == [[0.5] * 3] * 3 + [[0] * 3]


def test_scores_are_of_the_last_round_that_has_the_metric():
    rows = [("a", 0, r, v) for r, v in enumerate([0.3, 0.9, 0.6])] + [("b", 0, 0, 0.2)]
    rounds = pd.DataFrame(rows, columns=["run", "seed", "round", "value"]).assign(metric="accuracy")
    assert statistics.run_scores(rounds[::-1]).value.tolist() == [0.6, 0.2]
    assert statistics.run_scores(rounds, tasks={"a": "x", "b": "y"}).task.tolist() == ["x", "y"]
    message = "metric: expected one of accuracy; got 'f1'"
    refused(message, statistics.run_scores, rounds, "f1", error=ValueError)


@pytest.mark.slow
def test_the_page_in_a_browser(chrome, runs, tmp_path):
    """One file, which asks nothing of a network: its tables sort, and its curves say values."""
    evil = "<b>&</script><script>throw 1</script>"  # a name is a text
    summaries = [{**run.summary, "run": run.summary["run"].replace("E_%", evil)} for run in runs]
    named = [replace(run, summary=summary) for run, summary in zip(runs, summaries, strict=True)]
    page = write_html(named, tmp_path / "report.html")
    backgrounds = set()
    for width, scheme in ((1280, "light"), (400, "dark")):
        show(chrome, width, scheme)
        chrome.get(page.as_uri())
        assert chrome.execute_script("return document.documentElement.scrollWidth") <= width
        style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        backgrounds.add(chrome.execute_script(style, "body", "backgroundColor"))
        text = [chrome.execute_script(style, "body", "color"),
                chrome.execute_script(style, "#curves .xtick text", "fill")]  # fmt: skip
        assert text[0] == text[1]
        check_sorting(chrome)
        if width == 1280:  # figures and counts of seeds at their longest
            cut = """const cells = document.querySelectorAll("td:not(:first-child):not(.words)");
                for (const cell of cells) cell.textContent = "1,234.5 (11\\u00a0of\\u00a012)";
                return [...document.querySelectorAll(".scroll")]
                .filter(each => each.scrollWidth > each.clientWidth).length"""
            assert chrome.execute_script(cut) == 0
        check_hover(chrome, {summary["run"] for summary in summaries})
    assert len(backgrounds) == 2
    assert chrome.get_log("browser") == []
    asked = requests_of(chrome)
    assert page.as_uri() in asked
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked


def check_sorting(chrome):
    cells = """return [...document.querySelectorAll("section table")[0].tBodies[0].rows]
        .map(row => row.cells[arguments[0]].textContent.trim())"""
    buttons = chrome.find_elements("css selector", "section:first-of-type th button")
    for column, key in ((0, str.lower), (1, lambda cell: float(cell.split()[0]))):
        for reverse in (column > 0, column == 0):  # numbers begin with the largest
            buttons[column].click()
            texts = chrome.execute_script(cells, column)
            assert texts == sorted(texts, key=key, reverse=reverse)
            assert len(set(map(key, texts))) > 1


def check_hover(chrome, names):
    points = chrome.find_elements("css selector", "#curves .trace:last-child .point")
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", points[-1])
    ActionChains(chrome).move_to_element(points[-1]).perform()
    shown = chrome.find_element("css selector", "#curves .hoverlayer").text
    legend = [each.text for each in chrome.find_elements("css selector", "#curves .legendtext")]
    assert {*legend} == names | {"Pareto front"}
    assert any(name in shown for name in names)
    assert "round 3" in shown
    assert "2 seeds" in shown
