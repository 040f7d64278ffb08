"""Several configurations and seeds: checked first, run once, gone on with, failures last."""

import json
import threading

import numpy as np
import pandas as pd
import psutil
import pytest

from fedntk.simulations import Config, ConfigError, RunFailed, compare, load_results, read_runs, run
from fedntk.simulations.report.results import run_state

SMALL = Config(
    num_clients=8, clients_per_round=3, clients_per_evaluation=2, rounds=2, train_examples=300
)
PAIR = {"NTK-FL": SMALL, "FedAvg": SMALL.replace(method="fedavg", learning_rate=0.1)}


def test_table_of_all_rounds_and_folders_by_name_and_seed(tmp_path):
    table = compare(PAIR, seeds=np.array([3, 1]), out=tmp_path, progress=False)
    assert list(table.columns) == ["run", "method", "seed", "round", "metric", "value"]
    accuracy = table[table.metric == "accuracy"]
    assert accuracy.groupby(["run", "seed", "round"]).size().eq(1).all()
    assert list(dict.fromkeys(zip(accuracy.run, accuracy.seed, strict=True))) == [
        ("NTK-FL", 3), ("NTK-FL", 1), ("FedAvg", 3), ("FedAvg", 1),
    ]  # fmt: skip
    single = run(PAIR["FedAvg"], seed=1, out=str(tmp_path / "alone"), progress=False)
    own = accuracy[(accuracy.run == "FedAvg") & (accuracy.seed == 1)].value
    assert own.tolist() == single.curve().tolist()
    splits = {json.loads(p.read_text())["split"] for p in tmp_path.glob("*/seed-1/summary.json")}
    assert len(splits) == 1
    assert (tmp_path / "NTK-FL" / "seed-3" / "rounds.parquet").exists()
    assert len(read_runs(tmp_path)) == 5


def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch):
    expected = compare(PAIR, seeds=[0, 1], out=tmp_path / "whole", progress=False)
    from fedntk.simulations.engine import runs

    ran: list[tuple[str, str]] = []
    serve = runs.serve

    def counted(grid, config, on_round, setup=None):
        ran.append((f"{config.name} {config.seed}", run_state(config)))

        def stop(record):
            on_round(record)
            if len(ran) == 3 and record["round"] == 1:
                raise KeyboardInterrupt

        serve(grid, config, stop)

    monkeypatch.setattr(runs, "serve", counted)
    with pytest.raises(KeyboardInterrupt):
        compare(PAIR, seeds=[0, 1], out=tmp_path / "cut", progress=False)
    table = compare(PAIR, seeds=[0, 1], out=tmp_path / "cut", progress=False)
    assert ran == [
        *(("NTK-FL 0", "new"), ("NTK-FL 1", "new"), ("FedAvg 0", "new")),
        *(("FedAvg 0", "interrupted"), ("FedAvg 1", "new")),
    ]
    measured = expected.metric.str.contains("seconds|memory")
    pd.testing.assert_frame_equal(table[~measured], expected[~measured])


def test_a_run_that_another_process_finishes_meanwhile_is_kept(tmp_path, monkeypatch):
    from fedntk.simulations.engine import runs

    serve, ran = runs.serve, []

    def slow(grid, config, on_round, setup=None):
        ran.append(config.seed)
        if len(ran) == 1:  # the other process
            with monkeypatch.context() as patch:
                patch.setattr(runs, "serve", serve)
                other = {"NTK-FL": SMALL}
                compare(other, seeds=[1], out=tmp_path, progress=False)
        serve(grid, config, on_round)

    monkeypatch.setattr(runs, "serve", slow)
    compare({"NTK-FL": SMALL}, seeds=[0, 1], out=tmp_path, progress=False)
    assert ran == [0]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    from fedntk.simulations.engine import runs

    serve = runs.serve

    def failing(grid, config, on_round, setup=None):
        if config.name == "NTK-FL":
            raise RuntimeError("out of luck")
        serve(grid, config, on_round)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "serve", failing)
        with pytest.raises(
            RunFailed, match=r"1 of 2 runs failed \(NTK-FL, seed 0: RuntimeError: out of luck\)"
        ):
            compare(PAIR, out=tmp_path, progress=False)
    assert load_results(tmp_path).run.unique().tolist() == ["FedAvg"]
    assert len(compare(PAIR, out=tmp_path, progress=False).run.unique()) == 2


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        ({}, {}, "expected at least one configuration and seed, got 0 and 1"),
        (PAIR, {"seeds": []}, "got 2 and 0"),
        (PAIR, {"seeds": [1, 1]}, r"seeds: expected each once, got \[1, 1\]"),
        (PAIR, {"seed": 3}, "seed: set for each run by the comparison"),
        (PAIR, {"learning_rat": 3.0}, "NTK-FL: unknown key .*did you mean 'learning-rate'"),
        ([SMALL], {}, "configs: expected a dict of name to Config"),
        (PAIR, {"seeds": 3}, "seeds: expected numbers such as"),
        ({"a/b": SMALL, "a-b": SMALL}, {}, "names that make different folders"),
        ({"..": SMALL}, {}, "names that make different folders"),
        (PAIR | {"c": "nowhere.toml"}, {}, "no configuration at nowhere.toml"),
        (PAIR | {"c": SMALL.replace(model="lenet")}, {}, "c: .*images"),
        (PAIR, {"writers": ["x"]}, "writers: expected some of"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_run(tmp_path, configs, options, message):
    with pytest.raises(ConfigError, match=message):
        compare(configs, out=tmp_path, progress=False, **options)
    assert list(tmp_path.rglob("*")) == []


def test_another_comparison_in_the_same_folder_is_refused(tmp_path):
    compare(PAIR, out=tmp_path, progress=False)
    with pytest.raises(ConfigError, match=r"other settings: learning-rate = 0.1 \(now 0.3\)"):
        compare(
            PAIR | {"FedAvg": PAIR["FedAvg"].replace(learning_rate=0.3)},
            out=tmp_path,
            progress=False,
        )


def test_twenty_comparisons_leave_nothing_behind_and_memory_flat(tmp_path):
    """Memory in use after the last ten is that after the first ten, within 8 MB."""
    process = psutil.Process()
    used = []
    for i in range(20):
        compare(PAIR, out=tmp_path / str(i), rounds=1, progress=False, workers=2)
        used.append(process.memory_info().rss / 1e6)
    assert process.children(recursive=True) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("client")]
    assert used[-1] - used[9] < 8, used
