"""Several configurations and seeds: checked first, run once, gone on with, failures last."""

import json

import numpy as np
import pytest

from fedntk.simulations import RunFailed, compare, load_results, run
from fedntk.simulations.report.results import run_state

from .outcomes import refused
from .settings import FEDAVG as SMALL

PAIR = {"wide": SMALL, "narrow": SMALL.replace(width=10)}


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
        ({"a/b": SMALL, "a-b": SMALL}, {}, "names that make different folders"),
        (PAIR | {"c": SMALL.replace(model="lenet")}, {}, "c: .*images"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_run(tmp_path, configs, options, message):
    refused(message, compare, configs, out=tmp_path, progress=False, **options)
    assert list(tmp_path.rglob("*")) == []
