"""What the decentralised methods share in the simulations."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.methods.decentralised import (
    numbers_averaged,
    selection_curves,
    selection_sets,
)
from fedntk.simulations.report.report import write_report

from .outcomes import refused

SMALL = {"num_clients": 5, "clients_per_round": 5, "clients_per_evaluation": 5, "rounds": 2,
         "learning_rate": 0.1, "min_partition_size": 2}  # fmt: skip

OWN = {"d_psgd": {"degree": 2}}


def test_a_graph_of_ones_own_comes_from_a_file_of_edges(tmp_path):
    """As networkx writes it, comments and data on the edges included."""
    file = tmp_path / "graph.txt"
    file.write_text("# a path and a chord\n0 1 {'weight': 2}\n1 2\n2 3\n3 4\n4 1\n")

    def edges(**own: Any) -> Any:
        config = Config(method="dfedavg", **SMALL, dfedavg={"topology": "own", **own})
        return make_strategy(load_setup(config)).settings()["edges"]

    assert edges(graph=str(file)) == [[0, 1], [1, 2], [1, 4], [2, 3], [3, 4]]
    refused(r"graph: expected one with topology = 'own'", edges)
    file.write_text("0 7\n1 2\n")
    refused(r"dfedavg.graph = .*expected edges.*4, got \[7\]", edges, graph=str(file))


def test_selection_curves_are_means_in_three_orders():
    """By hand: models 0.2, 0.4, 0.6, 0.8 of clients 7, 5, 3, 1, judged by their value itself."""
    models = {7: {"w": 0.2}, 5: {"w": 0.4}, 3: {"w": 0.6}, 1: {"w": 0.8}}

    def curves(sign: float, points: int) -> dict[Any, pd.DataFrame]:
        found = selection_curves(
            models,
            lambda model: sign * model["w"],
            lambda model: model["w"],
            lambda some: {"w": np.mean([model["w"] for model in some])},
            points=points,
        )
        return dict(list(found.groupby("order")))

    found, again = curves(1, 20), curves(1, 20)
    assert found["best to worst"].client.tolist() == [1, 3, 5, 7]
    assert found["worst to best"].client.tolist() == [7, 5, 3, 1]
    assert found["best to worst"].accuracy.tolist() == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert found["worst to best"].accuracy.tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert sorted(found["random"].client) == [1, 3, 5, 7]
    pd.testing.assert_frame_equal(found["random"], again["random"])
    worst = curves(-1, 3)["best to worst"]  # sorted by other examples than are judged
    assert worst.clients.tolist() == numbers_averaged(4, 3) == [1, 2, 4]
    assert worst.accuracy.tolist() == pytest.approx([0.2, 0.3, 0.5])


STATISTICS = ("mean", "std", "min", "q1", "median", "q3", "max")


def test_a_run_judges_its_last_models_and_means_of_some_of_them(tmp_path):
    own = {"degree": 2, "both_accuracies": True}
    held_out = {"out": str(tmp_path), "validation_examples": 100}
    config = Config(method="d-psgd", **held_out, **SMALL, d_psgd=own)
    result, setup = run(config, progress=False), load_setup(config)
    curves = pd.read_parquet(tmp_path / "details" / "selection.parquet")
    (x, y), held = selection_sets(setup)
    models = [load_predictor(tmp_path, client=k) for k in (None, *range(5))]
    for model in models:
        model.inputs = None  # the sets are standardised
    mean_accuracy = models.pop(0).evaluate(x, y).accuracy
    assert mean_accuracy == result.curve().iloc[-1]
    whole = curves[curves.clients == 5]
    assert whole.accuracy.tolist() == pytest.approx([mean_accuracy] * 3, abs=2 / len(y))
    sorting = [model.evaluate(*held).accuracy for model in models]
    best = curves[(curves.order == "best to worst") & (curves.clients == 1)]
    assert sorting[best.client.iloc[0]] == max(sorting)
    each = [model.evaluate(x, y).accuracy for model in models]
    expected = [np.mean(each), np.std(each), *np.quantile(each, [0, 0.25, 0.5, 0.75, 1])]
    found = [result.curve(f"trained-accuracy-{k}")[2] for k in STATISTICS]
    assert found == pytest.approx(expected, abs=1e-12)
    assert result.curve("averaged-accuracy-median")[2] != found[4]
    assert result.curve("trained-accuracy-decile-30")[2] == pytest.approx(np.percentile(each, 30))
    assert "selection-d-psgd.png" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(("held", "sizes"), [(0, [180, 180]), (100, [360, 100])])
def test_examples_that_judge_means_share_none_with_those_by_which_models_are_sorted(held, sizes):
    setup = load_setup(Config(method="d-psgd", validation_examples=held, **SMALL, **OWN))
    parts = [x for x, _ in selection_sets(setup)]
    assert [len(x) for x in parts] == sizes
    assert len(np.unique(np.concatenate(parts), axis=0)) == sum(sizes)
