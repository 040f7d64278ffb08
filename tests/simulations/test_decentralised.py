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

SMALL = {"num_clients": 5, "clients_per_round": 5, "clients_per_evaluation": 5, "rounds": 2,
         "learning_rate": 0.1, "min_partition_size": 2}  # fmt: skip
TABLES = {"dfedavg": "dfedavg", "dfedsam": "dfedsam", "d-psgd": "d_psgd", "dispfl": "dispfl"}


@pytest.mark.parametrize("method", sorted(TABLES))
def test_a_graph_with_more_neighbours_than_others_is_refused(method):
    message = f"{method}.degree: expected less than clients-per-round = 5, got 5"
    with pytest.raises(ConfigError, match=message):
        Config(method=method, **SMALL)
    Config(method=method, **SMALL, **{TABLES[method]: {"topology": "ring"}})


@pytest.mark.parametrize(
    ("own", "more", "message"),
    [
        ({"evolve_once": True}, {}, "evolve-once: expected clusters"),
        (
            {"evolve_once": True, "topology": "clustered", "average": False},
            {},
            "evolve-once: expected clusters",
        ),
        ({"class_prior": True}, {"loss": "mse"}, "class-prior: expected the loss cross-entropy"),
        ({"bits": 20}, {}, "bits: expected 1 ... 16"),
    ],
)
def test_settings_of_ntk_dfl_that_do_not_go_together_are_refused(own, more, message):
    with pytest.raises(ConfigError, match=message):
        Config(method="ntk-dfl", **SMALL, **more, ntk_dfl={"degree": 2, **own})
    Config(method="ntk-dfl", **SMALL, ntk_dfl={"degree": 2, "topology": "clustered"})


@pytest.mark.parametrize("method", sorted(TABLES))
def test_settings_reach_the_strategy(method):
    own = {"topology": "erdos-renyi", "degree": 2, "dynamic": False, "mixing": "metropolis",
           "learning_rate_factor": 0.9, "same_weights": False}  # fmt: skip
    config = Config(method=method, seed=3, **SMALL, **{TABLES[method]: own})
    settings = make_strategy(load_setup(config)).settings()
    assert {name: settings[name] for name in own} == own
    assert settings["topology_seed"] == 3


@pytest.mark.parametrize("method", ["ntk-dfl", *sorted(TABLES)])
def test_a_graph_of_ones_own_comes_from_a_file_of_edges(method, tmp_path):
    """As networkx writes it, comments and data on the edges included."""
    table = {**TABLES, "ntk-dfl": "ntk_dfl"}[method]
    file = tmp_path / "graph.txt"
    file.write_text("# a path and a chord\n0 1 {'weight': 2}\n1 2\n2 3\n3 4\n4 1\n")

    def settings(**own: Any) -> dict[str, Any]:
        config = Config(method=method, **SMALL, **{table: {"topology": "own", **own}})
        return make_strategy(load_setup(config)).settings()

    assert settings(graph=str(file))["edges"] == [[0, 1], [1, 2], [1, 4], [2, 3], [3, 4]]
    for text, words in (
        ("0 7\n1 2\n", r"partitions 0 \.\.\. 4, got \[7\]"),
        ("0 a\n", "expected edges, two partitions on each line"),
        ("# no edge\n", "got none"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"{method}.graph = .*{words}"):
            settings(graph=str(file))
    with pytest.raises(ConfigError, match=r"graph\.txt: expected edges, .*No such file"):
        settings(graph=str(tmp_path / "missing" / "graph.txt"))
    with pytest.raises(ConfigError, match=f"{method}.graph: expected a file with .*topology = own"):
        settings()
    with pytest.raises(ConfigError, match="and none with another"):
        settings(graph=str(file), topology="ring")


@pytest.mark.parametrize("projection", [0, 20])
def test_the_accuracies_of_the_clients_models_are_those_of_their_predictors(projection, tmp_path):
    """On the server's examples, projected where there is a projection."""
    config = Config(
        method="dfedavg", projection=projection, out=str(tmp_path), **SMALL, dfedavg={"degree": 2}
    )
    result = run(config, progress=False)
    found = {k: result.curve(f"averaged-accuracy-{k}")[2] for k in STATISTICS}
    assert 0 < found["min"] < found["mean"] < found["max"] < 1
    if projection:
        return
    x, y = load_setup(config).evaluation_set()
    each = [load_predictor(tmp_path, client=k).evaluate(x, y).accuracy for k in range(5)]
    expected = [np.mean(each), np.std(each), *np.quantile(each, [0, 0.25, 0.5, 0.75, 1])]
    assert list(found.values()) == pytest.approx(expected, abs=1e-12)


STATISTICS = ("mean", "std", "min", "q1", "median", "q3", "max")


@pytest.mark.parametrize("method", [*sorted(TABLES), "ntk-dfl"])
def test_all_methods_are_judged_at_the_same_two_points(method):
    """After the average, and after the training or evolution; one alone, without the setting."""
    name = TABLES.get(method, "ntk_dfl")
    steps = {"steps": "5,10"} if method == "ntk-dfl" else {}
    for both in (True, False):
        config = Config(
            method=method, **SMALL, **{name: {"degree": 2, "both_accuracies": both, **steps}}
        )
        result = run(config, progress=False)
        points = {p: len(result.curve(f"{p}-accuracy-mean")) for p in ("averaged", "trained")}
        ends = "averaged" if method.startswith("dfed") else "trained"
        assert points == dict.fromkeys(points, 2) | ({} if both else dict.fromkeys(points, 0)) | {
            ends: 2
        }
        if both:
            values = [result.curve(f"{p}-accuracy-median")[1] for p in points]
            assert values[0] != values[1]
            one = result.curve("evaluation-bytes-up")[2]
    assert result.curve("evaluation-bytes-up")[2] < one


# ---------------------------------------------------------------------- selection


def constant(value: float) -> dict[str, np.ndarray]:
    return {"w": np.array([value])}


def accuracy_of(model: Any) -> float:
    """Best at 1: of models 0.1, 0.2, ... the largest, and of a mean its distance from 1."""
    return 1 - abs(1 - float(model["w"][0]))


def test_selection_curves_are_means_in_three_orders():
    """By hand: models 0.2, 0.4, 0.6, 0.8 of clients 7, 5, 3, 1, judged by their value itself."""
    models = {7: constant(0.2), 5: constant(0.4), 3: constant(0.6), 1: constant(0.8)}
    mean = lambda own: {"w": np.mean([m["w"] for m in own], axis=0)}  # noqa: E731
    curves = selection_curves(models, accuracy_of, accuracy_of, mean)
    found = dict(list(curves.groupby("order")))
    assert found["best to worst"].client.tolist() == [1, 3, 5, 7]
    assert found["worst to best"].client.tolist() == [7, 5, 3, 1]
    assert found["best to worst"].accuracy.tolist() == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert found["worst to best"].accuracy.tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert sorted(found["random"].client) == [1, 3, 5, 7]
    for own in found.values():  # all are the equal mean of all in the end
        assert own.accuracy.iloc[-1] == pytest.approx(0.5)
        assert own.clients.tolist() == [1, 2, 3, 4]
    again = selection_curves(models, accuracy_of, accuracy_of, mean)
    pd.testing.assert_frame_equal(curves, again)


def test_models_are_sorted_by_other_examples_than_judge_the_means():
    """Sorted by the one accuracy, judged by the other."""
    models = {k: constant(k / 10) for k in range(5)}
    mean = lambda own: {"w": np.mean([m["w"] for m in own], axis=0)}  # noqa: E731
    curves = selection_curves(models, lambda m: -accuracy_of(m), accuracy_of, mean, points=3)
    best = curves[curves.order == "best to worst"]
    assert best.clients.tolist() == numbers_averaged(5, 3) == [1, 2, 5]
    assert best.accuracy.tolist() == pytest.approx([0.0, 0.05, 0.2])


@pytest.mark.parametrize("held", [0, 100])
def test_a_run_writes_the_curve_of_its_last_models_and_the_report_draws_it(held, tmp_path):
    """The last point of each order is the mean of all: the run's model, on the judging examples."""
    config = Config(
        method="d-psgd", validation_examples=held, out=str(tmp_path), **SMALL, d_psgd={"degree": 2}
    )
    result = run(config, progress=False)
    curves = pd.read_parquet(tmp_path / "details" / "selection.parquet")
    (x, y), (x_held, y_held) = selection_sets(load_setup(config))
    test_size = len(load_setup(config).data.y_test)
    assert (len(y), len(y_held)) == ((test_size, held) if held else (180, 180))
    mean = load_predictor(tmp_path).evaluate(x, y).accuracy
    ends = curves[curves.clients == 5]
    assert ends.accuracy.tolist() == pytest.approx([mean] * 3, abs=2 / len(y))  # other sums
    if held:
        assert mean == result.curve().iloc[-1]
    each = {
        k: load_predictor(tmp_path, client=k).evaluate(x_held, y_held).accuracy for k in range(5)
    }
    best = curves[(curves.order == "best to worst") & (curves.clients == 1)]
    assert each[int(best.client.iloc[0])] == max(each.values())
    report = write_report(tmp_path)
    assert "selection-d-psgd.png" in report.read_text()
    assert (report.parent / "selection-d-psgd.png").stat().st_size > 1000


def test_the_two_sets_of_a_selection_share_no_example():
    config = Config(method="d-psgd", **SMALL, d_psgd={"degree": 2})
    (x, _), (x_held, _) = selection_sets(load_setup(config))
    rows, held = ({own.numpy().tobytes() for own in part} for part in (x, x_held))
    assert len(rows & held) == 0
    assert len(x) + len(x_held) == 360


def test_without_points_there_is_no_curve(tmp_path):
    own = {"degree": 2, "selection_points": 0}
    run(Config(method="d-psgd", out=str(tmp_path), **SMALL, d_psgd=own), progress=False)
    assert not (tmp_path / "details").exists()
