"""What the decentralised methods share in the simulations."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.assessment.selection import numbers_averaged, selection_curves
from fedntk.simulations.config.settings import ConfigError
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.methods.decentralised import selection_sets
from fedntk.simulations.report.report import write_report

SMALL = Config(
    num_clients=5, clients_per_round=5, clients_per_evaluation=5, rounds=2, learning_rate=0.1,
    min_partition_size=2,
)  # fmt: skip


def config_of(method: str, *, own: dict[str, Any], **options: Any) -> Config:
    return SMALL.replace(method=method, **{method.replace("-", "_"): own}, **options)


@pytest.mark.parametrize(
    ("method", "own", "message"),
    [
        ("dispfl", {}, "dispfl.degree: expected less than clients-per-round = 5, got 5"),
        ("ntk-dfl", {"topology": "regular"}, r"ntk-dfl\.evolve-once: expected clusters"),
        ("ntk-dfl", {"average": False}, r"ntk-dfl\.evolve-once: expected clusters"),
        ("dispfl", {"topology": "ring"}, ""),
        ("ntk-dfl", {"evolve_once": False}, ""),
    ],
)
def test_settings_that_do_not_go_together_are_refused(method, own, message):
    if method == "ntk-dfl":
        own = {"degree": 2, "topology": "clustered", "evolve_once": True, **own}
    if not message:
        config_of(method, own=own)
        return
    with pytest.raises(ConfigError, match=message):
        config_of(method, own=own)


def test_settings_reach_the_strategy():
    own = {"topology": "erdos-renyi", "degree": 2, "dynamic": False, "mixing": "metropolis",
           "learning_rate_factor": 0.9, "same_weights": False}  # fmt: skip
    settings = make_strategy(load_setup(config_of("dispfl", own=own, seed=3))).settings()
    assert {name: settings[name] for name in own} == own
    assert settings["topology_seed"] == 3


def test_a_graph_of_ones_own_comes_from_a_file_of_edges(tmp_path):
    """As networkx writes it, comments and data on the edges included."""
    file = tmp_path / "graph.txt"
    file.write_text("# a path and a chord\n0 1 {'weight': 2}\n1 2\n2 3\n3 4\n4 1\n")

    def edges(**own: Any) -> Any:
        setup = load_setup(config_of("dfedavg", own={"topology": "own", **own}))
        return make_strategy(setup).settings()["edges"]

    assert edges(graph=str(file)) == [[0, 1], [1, 2], [1, 4], [2, 3], [3, 4]]
    for text, words in (
        ("0 7\n1 2\n", r"partitions 0 \.\.\. 4, got \[7\]"),
        ("0 a\n", "expected edges, two partitions on each line"),
        ("# no edge\n", "got none"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"dfedavg.graph = .*{words}"):
            edges(graph=str(file))
    for own, words in (
        ({"graph": str(tmp_path / "missing.txt")}, "expected edges, .*No such file"),
        ({}, "expected a file with .*topology = own"),
        ({"graph": str(file), "topology": "ring"}, "and none with another"),
    ):
        with pytest.raises(ConfigError, match=words):
            edges(**own)


STATISTICS = ("mean", "std", "min", "q1", "median", "q3", "max")


@pytest.mark.parametrize("projection", [0, 20])
def test_the_accuracies_of_the_clients_models_are_those_of_their_predictors(projection, tmp_path):
    """On the server's examples, projected where there is a projection."""
    config = config_of("dfedavg", own={"degree": 2}, projection=projection, out=str(tmp_path))
    result = run(config, progress=False)
    found = {k: result.curve(f"averaged-accuracy-{k}")[2] for k in STATISTICS}
    assert 0 < found["min"] < found["mean"] < found["max"] < 1
    if projection:
        return
    x, y = load_setup(config).evaluation_set()
    each = [load_predictor(tmp_path, client=k).evaluate(x, y).accuracy for k in range(5)]
    expected = [np.mean(each), np.std(each), *np.quantile(each, [0, 0.25, 0.5, 0.75, 1])]
    assert list(found.values()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("method", "ends"), [("dfedavg", "averaged"), ("d-psgd", "trained")])
def test_methods_are_judged_at_the_same_two_points(method, ends, tmp_path):
    """After the average and after the training; at one, without the setting or a curve's points."""
    sent = []
    for both in (True, False):
        own = {"degree": 2, "both_accuracies": both, "selection_points": 0}
        config = config_of(method, own=own, out=str(tmp_path / str(both)))
        result = run(config, progress=False)
        sent.append(result.curve("evaluation-bytes-up")[2])
        points = ("averaged", "trained")
        judged = [result.curve(f"{point}-accuracy-median") for point in points]
        assert [len(curve) for curve in judged] == [2 * (both or ends == p) for p in points]
        assert not both or judged[0][1] != judged[1][1]
    assert sent[1] < sent[0]
    assert not (tmp_path / "True" / "details").exists()


# ---------------------------------------------------------------------- selection


def accuracy_of(model: Any) -> float:
    """Best at 1: of models 0.1, 0.2, ... the largest, and of a mean its distance from 1."""
    return 1 - abs(1 - float(model["w"]))


def mean(models: Any) -> dict[str, np.ndarray]:
    return {"w": np.mean([own["w"] for own in models])}


def test_selection_curves_are_means_in_three_orders():
    """By hand: models 0.2, 0.4, 0.6, 0.8 of clients 7, 5, 3, 1, judged by their value itself."""
    models = {7: {"w": 0.2}, 5: {"w": 0.4}, 3: {"w": 0.6}, 1: {"w": 0.8}}
    curves = selection_curves(models, accuracy_of, accuracy_of, mean)
    found = dict(list(curves.groupby("order")))
    for order, clients, accuracies in (
        ("best to worst", [1, 3, 5, 7], [0.8, 0.7, 0.6, 0.5]),
        ("worst to best", [7, 5, 3, 1], [0.2, 0.3, 0.4, 0.5]),
    ):
        assert found[order].client.tolist() == clients
        assert found[order].accuracy.tolist() == pytest.approx(accuracies)
    assert sorted(found["random"].client) == [1, 3, 5, 7]
    for own in found.values():  # all are the equal mean of all in the end
        assert own.accuracy.iloc[-1] == pytest.approx(0.5)
        assert own.clients.tolist() == [1, 2, 3, 4]
    again = selection_curves(models, accuracy_of, accuracy_of, mean)
    pd.testing.assert_frame_equal(curves, again)


def test_models_are_sorted_by_other_examples_than_judge_the_means():
    """Sorted by the one accuracy, judged by the other."""
    models = {k: {"w": k / 10} for k in range(5)}
    curves = selection_curves(models, lambda m: -accuracy_of(m), accuracy_of, mean, points=3)
    best = curves[curves.order == "best to worst"]
    assert best.clients.tolist() == numbers_averaged(5, 3) == [1, 2, 5]
    assert best.accuracy.tolist() == pytest.approx([0.0, 0.05, 0.2])


@pytest.mark.parametrize("held", [0, 100])
def test_a_run_writes_the_curve_of_its_last_models_and_the_report_draws_it(held, tmp_path):
    """The last point of each order is the mean of all: the run's model, on the judging examples.

    These share no example with those by which models are sorted.
    """
    config = config_of("d-psgd", own={"degree": 2}, validation_examples=held, out=str(tmp_path))
    result = run(config, progress=False)
    curves = pd.read_parquet(tmp_path / "details" / "selection.parquet")
    setup = load_setup(config)
    (x, y), (x_held, y_held) = selection_sets(setup)
    assert (len(y), len(y_held)) == ((len(setup.data.y_test), held) if held else (180, 180))
    assert len(np.unique(np.concatenate([x, x_held]), axis=0)) == len(x) + len(x_held)
    mean_accuracy = load_predictor(tmp_path).evaluate(x, y).accuracy
    ends = curves[curves.clients == 5]
    assert ends.accuracy.tolist() == pytest.approx([mean_accuracy] * 3, abs=2 / len(y))
    if held:
        assert mean_accuracy == result.curve().iloc[-1]
        return
    models = [load_predictor(tmp_path, client=k) for k in range(5)]
    each = [model.evaluate(x_held, y_held).accuracy for model in models]
    best = curves[(curves.order == "best to worst") & (curves.clients == 1)]
    assert each[int(best.client.iloc[0])] == max(each)
    report = write_report(tmp_path)
    assert "selection-d-psgd.png" in report.read_text()
    assert (report.parent / "selection-d-psgd.png").stat().st_size > 1000
