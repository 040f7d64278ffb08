"""Tables and pictures say what the runs' records say."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Run, compare, read_runs
from fedntk.simulations.report.figures import accuracy_curves
from fedntk.simulations.report.report import _without_alpha, final_table, target_table

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
