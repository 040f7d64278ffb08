"""The benchmarks' networks are the simulations', and each measurement can be made."""

import argparse
import ast
import importlib
import json
import sys

import pandas as pd
import pytest
import torch

from fedntk.simulations.models import mlp, resnet18, simple_cnn
from fedntk.simulations.report.results import round_at

from .conftest import ROOT, output_of


def sizes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(p.shape) for p in model.parameters())


@pytest.mark.parametrize(
    ("network", "ours"),
    [
        ("mlp-100", lambda: mlp((1, 28, 28), 10)),
        ("simple-cnn", lambda: simple_cnn((1, 28, 28), 10)),
        ("resnet18-gn", lambda: resnet18((3, 32, 32), 10, "group")),
    ],
)
def test_networks_are_those_of_the_simulations(network, ours, program):
    """Of benchmarks, and of the stock app, which has no ResNet."""
    model, x = program("common").make(network, 2, "cpu")
    assert sizes(model) == sizes(ours())
    assert model(x).shape == (2, 10)
    if not network.startswith("resnet"):
        assert sizes(program("stock_app/stock").network(network)) == sizes(ours())


def test_what_benchmarks_import_is_there():
    """They import it when they measure, which most of them do in no test."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedntk"):
                module = importlib.import_module(node.module)
                for own in node.names:  # a submodule, or what the module has or makes when asked
                    if not hasattr(module, own.name):
                        importlib.import_module(f"{node.module}.{own.name}")


def test_rounds_to_a_target_in_summaries_are_those_of_the_committed_curves():
    def rounds_to(curves, target):
        pairs = curves[curves.metric == "accuracy"].groupby("seed")
        return [round_at(own.set_index("round").value.to_dict(), target) for _, own in pairs]

    def read(name):
        stem = ROOT / "benchmarks" / "results" / name
        return json.loads(stem.with_suffix(".json").read_text()), pd.read_csv(f"{stem}.csv")

    summary, curves = read("ntk_fl_fmnist")
    for run, own in summary["rounds-to-target"].items():
        found = {key: rounds_to(curves[curves.run == run], float(key)) for key in own}
        assert found == own, run
    summary, curves = read("cp_ntk_fl_table")
    told = {run: row for run, row in summary["reached"].items() if "rounds to 85 %" in row}
    summary, more = read("cp_ntk_fl_fast")
    for own, rows in ((curves, told), (more, {row["method"]: row for row in summary["table"]})):
        for run, row in rows.items():
            assert rounds_to(own[own.run == run], 0.85) == row["rounds to 85 %"], run
    summary, curves = read("ntk_dfl_fmnist")
    curves["run"] = curves.method + curves.split + curves.seed.astype(str)
    for row in summary["rows"]:
        run = f"{row['method']}{row['split']}{row['seed']}"
        assert rounds_to(curves[curves.run == run], 0.85) == [row["rounds-to-85"]], run


KERNEL = {"network": "mlp-100", "n": 8, "device": "cpu"}
FEATURES = {"network": "simple-cnn", "num_features": 50, "method": "subsample", "n": 4}
FEATURES |= {"device": "cpu"}
SLOW = [
    ("kernel", KERNEL | {"method": "torch.func"}),
    ("entk_features", FEATURES),
    ("gradient_norms", {"way": "factors", "batch": 4, "times": 1}),
    ("tct", {"part": "features", "network": "simple-cnn", "n": 4, "times": 1}),
    ("tct", {"part": "memory", "n": 9, "dtype": "float16"}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kernel", KERNEL | {"method": "factored"}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_measurement_runs_from_the_checkout_and_is_right(name, options):
    """Each way against float64, 1e-5: 170 float32 roundings of 6e-8, in sums of up to 3,136.

    The contraction of torch.func adds 79,510 products in some order: at most one rounding each.
    """
    path = ROOT / "benchmarks" / f"{name}.py"
    said = output_of(sys.executable, path, "--child", json.dumps(options))
    measured = json.loads(said.splitlines()[-1])
    assert measured["seconds"] > 0
    for row in [measured, *measured.get("rows", [])]:
        others = options.get("method") == "torch.func"
        assert row.get("relative-difference", 0) < (79_510 * 2**-24 if others else 1e-5)


SMALL = {"dataset": "digits", "model": "mlp", "validation_examples": 200, "num_clients": 10}


def test_an_exchange_of_sums_is_measured(monkeypatch, program, tmp_path):
    sums = program("tct_statistics")
    monkeypatch.setitem(sums.PARTITIONS, "digits", {**sums.PARTITIONS["#C=1"], **SMALL})
    options = argparse.Namespace(out=tmp_path, data_dir="", rounds=1, rate=0.1, bits=8)
    row = sums.exchanged(options, "digits", 0, "entk-sketch", 100)
    assert row["accuracy"] > row["network"] > 0


def test_who_is_in_small_sums_is_found(monkeypatch, program):
    """20 Gaussian examples of 60 in 30 features span none of the others; 50 or 100 span all."""
    program = program("sums_privacy")
    monkeypatch.setattr(program, "MANY", 50)
    drawn = torch.Generator().manual_seed(0)
    z, public = (torch.randn(*n, 30, generator=drawn) for n in ((2, 60), (80,)))
    features = program.Features.of(z, public, 32)
    small, large = (program.membership(features, count, 1) for count in (10, 50))
    for sums in ("one client", "sum of ten"):
        for key in ("auc", "auc-calibrated", "found-among-n-lowest", "others-ruled-out"):
            assert small[sums][key] == 1
        assert max(large[sums]["auc"], large[sums]["others-ruled-out"]) < 1
    assert program.difference(features, 10)["auc"] == 1


def test_a_round_of_ntk_dfl_sends_what_its_formula_says(shared_data, program):
    """Headers and names come on top, 1 % at this size. One cluster of four, 20 examples each."""
    case = {"clients": 4, "kappa": 3, "examples": 20, "data_dir": str(shared_data)}
    measured = program("ntk_dfl").child(**case, topology="clustered", evolve_once=True)
    assert measured["cpu-seconds"] > 0
    for way in ("up", "down"):
        exact = measured[f"formula-{way}"]
        assert exact < measured[f"bytes-{way}"] < 1.02 * exact


def test_two_colluding_neighbours_learn_a_thirds_weights_and_one_does_not(program):
    """Inputs of a linear layer one has exactly. Weights are in float32: 1e-4 of their spread."""
    one, two = program("colluding_neighbours").measured("mlp", 20)
    assert max(own["input-error-mean"] for own in (one, two)) < 1e-5
    assert one["labels-in-clear"]
    assert two["third-weights-error"] < 1e-4 < 0.3 < one["third-weights-error"]


RAY = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's open files
@pytest.mark.parametrize(
    "way",
    [
        "local",
        *(pytest.param(way, marks=RAY) for way in ("ray", "cluster")),
        pytest.param("supernodes", marks=pytest.mark.federation),
    ],
)
def test_the_cost_of_a_round_is_measured(way, program):
    """Two clients, in each way the same bits; a process that has imported torch has 50 MB."""
    costs = program("round_costs")
    rounds = 30 if way in ("ray", "cluster") else 1  # those that end within 0.2 s are read together
    row = costs.child(way, 2, rounds)
    assert 0 < row["least"] <= row["seconds"] <= row["most"]
    assert rounds > 1 or row["least"] == row["seconds"] == row["most"]
    assert row["cpu-seconds"] > 0
    assert row["memory-mb"] > 50
    assert row["model"] == costs.child("local", 2, rounds)["model"]
    if way == "supernodes":
        for key in ("cpu-seconds", "memory-mb"):
            assert 0 < row[f"server-{key}"] < row[key]
