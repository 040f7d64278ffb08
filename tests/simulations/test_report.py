"""Comparisons run once and go on; tables and pictures of runs and clients say what records say."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedntk.simulations import Run, RunFailed, compare, load_results, read_runs, run
from fedntk.simulations.data import client_tables
from fedntk.simulations.report.figures import accuracy_curves
from fedntk.simulations.report.report import _without_alpha, final_table, target_table
from fedntk.simulations.report.results import run_state

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


def test_final_table_holds_means_and_deviations_over_seeds(runs):
    assert _without_alpha(runs) == {"SGD, 0.1": "SGD", "SGD, 100": "SGD", "E_%": "E_%"}
    row = final_table(runs).set_index("run").loc["SGD, 0.1"]
    own = [run for run in runs if run.summary["run"] == "SGD, 0.1"]
    last = 100 * np.array([run.curve().iloc[-1] for run in own])
    assert row["last accuracy (%)"] == f"{last.mean():.1f} ± {last.std(ddof=1):.1f}"
    assert row["MB up"] == f"{np.mean([run.curve('bytes-up').sum() for run in own]) / 1e6:.1f}"


def test_target_table_holds_medians_of_those_that_reach_it(runs):
    """Seeds 0 and 1 of a run reach 34 % in rounds 4 and 3, and 54 % in no round and in round 5."""
    tables = [table([seed], 6).query("run == 'one'") for seed in (0, 1)]
    own = [
        replace(runs[0], tables={"rounds": pa.Table.from_pandas(own)}, summary={"run": "one"})
        for own in tables
    ]
    assert target_table(own, [0.34, 0.54, 0.99]).iloc[0].to_dict() == {
        "run": "one", "rounds to 34 %": "4", "MB up to 34 %": "9.0", "s to 34 %": "2.2",
        "rounds to 54 %": "5 (1 of 2)", "MB up to 54 %": "12.0 (1 of 2)",
        "s to 54 %": "3.0 (1 of 2)",
        "rounds to 99 %": "-", "MB up to 99 %": "-", "s to 99 %": "-",
    }  # fmt: skip


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


def test_curves_are_means_over_seeds_against_summed_costs():
    """Drawn as far as all seeds go."""
    rows, mean = table(), 100 * (np.arange(5) / 10 + 0.025)
    axes = accuracy_curves(rows, against="bytes-up").axes[0]
    drawn = axes.lines[0].get_xydata()
    np.testing.assert_allclose(drawn, np.stack([[2, 4, 6, 8, 10], mean], 1))
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (round(band.y0, 6), round(band.y1, 6)) == (0, 45)
    short = accuracy_curves(rows[(rows.seed == 0) | (rows["round"] < 3)]).axes[0]
    np.testing.assert_allclose(short.lines[0].get_xdata(), [0, 1, 2])


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
    newest = client_tables.newest_accuracies(CLIENTS)
    found = {(r.run, r.seed, r.partition): r.accuracy for r in newest.itertuples()}
    assert found == {
        ("b", 0, 0): 0.5, ("b", 0, 1): 0.8, ("a", 0, 0): 0.7, ("a", 0, 1): 0.795,
        ("a", 0, 3): 0.1, ("a", 1, 0): 0.3,
    }  # fmt: skip
    one = client_tables.client_accuracy_table(CLIENTS).loc[(0, 1)]
    assert one.to_dict() == {"b": 0.8, "a": 0.795}


def test_statistics_are_of_each_seeds_clients_and_then_means_over_the_seeds():
    names = ["seeds", "clients", "mean", "worst", "std", "mean-std"]
    summary = client_tables.client_summary(CLIENTS).set_index("run")[names]
    first = np.array([0.7, 0.795, 0.1])
    means = [first.mean(), 0.3]
    expected = [2, 2, np.mean(means), (0.1 + 0.3) / 2, first.std() / 2, np.std(means, ddof=1)]
    np.testing.assert_allclose(summary.loc["a"], expected)
    np.testing.assert_allclose(summary.loc["b"], [1, 2, 0.65, 0.5, 0.15, np.nan])


def test_gains_are_of_the_clients_that_both_runs_have():
    """Client 0 gains 0.2; client 1 loses 0.005, which is within the margin; others are left out."""
    (row,) = client_tables.client_gains(CLIENTS, ["b"]).to_dict("records")
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
    own = accuracy[(accuracy.run == "narrow") & (accuracy.seed == 1)].value
    assert own.tolist() == single.curve().tolist()


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
    own, other = (t[~t.metric.str.contains("seconds|memory")] for t in (table, whole))
    assert own.equals(other)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, each_run):
    def fail(config):
        if config.name == "wide":
            raise RuntimeError("out of luck")

    each_run(fail)
    message = r"1 of 2 runs failed \(wide, seed 0: RuntimeError: out of luck\)"
    refused(message, compare, PAIR, out=tmp_path, progress=False, error=RunFailed)
    assert load_results(tmp_path).run.unique().tolist() == ["narrow"]
    each_run()
    assert len(compare(PAIR, out=tmp_path, progress=False).run.unique()) == 2


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        (PAIR, {"seeds": 3}, r"seeds: expected numbers such as \[0, 1, 2\], got 3"),
        (PAIR, {"seeds": [1, 1]}, r"seeds: expected each once, got \[1, 1\]"),
        (PAIR, {"seed": 3}, "seed: set for each run by the comparison"),
        ({"a/b": FEDAVG, "a-b": FEDAVG}, {}, "names that make different folders"),
        (PAIR | {"c": FEDAVG.replace(model="lenet")}, {}, "c: .*images"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_run(tmp_path, configs, options, message):
    refused(message, compare, configs, out=tmp_path, progress=False, **options)
    assert list(tmp_path.rglob("*")) == []
