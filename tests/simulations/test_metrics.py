"""Further metrics: of every evaluated round, in all results, and never the end of a run."""

import functools
import itertools
import os

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, recall_score, roc_auc_score
from torch import nn

from fedntk.ntk import EnsemblePredictor, NetworkPredictor
from fedntk.simulations import Config, RunFailed, load_predictor, run, tune, write_report
from fedntk.simulations.config.metrics import BUILT_IN
from fedntk.simulations.engine.building import load_setup

from .outcomes import refused

SMALL = {
    "num_clients": 6, "clients_per_round": 3, "clients_per_evaluation": 2, "rounds": 4,
    "train_examples": 200, "learning_rate": 0.3, "progress": False,
}  # fmt: skip


class Total:
    """Adds up what it is called with until it is reset, as objects of torchmetrics do."""

    def reset(self):
        self.count = 0

    def __call__(self, scores, labels):
        assert (scores.dtype, labels.dtype) == (torch.float32, torch.int64)
        self.count += len(labels)
        return torch.tensor(self.count)


def top_two(scores, labels):
    return (scores.topk(2).indices == labels[:, None]).any(1).float().mean()


def fail(scores, labels):
    raise ZeroDivisionError("no luck")


@pytest.mark.parametrize("seed", range(5))
def test_built_in_metrics_are_those_of_scikit_learn(seed):
    """Classes without labels, without predictions and without both among them."""
    rng = np.random.default_rng(seed)
    scores, labels = rng.normal(size=(30, 7)).astype(np.float32), rng.integers(1, 6, 30)
    scores[:, 6] = -9
    predicted, tensors = scores.argmax(1), (torch.from_numpy(scores), torch.from_numpy(labels))
    f1 = f1_score(labels, predicted, average="macro")
    balanced = recall_score(labels, predicted, labels=np.unique(labels), average="macro")
    p = np.exp(scores.astype(float)) / np.exp(scores.astype(float)).sum(1, keepdims=True)
    areas = [roc_auc_score(labels == c, p[:, c]) for c in np.unique(labels)]
    expected = [f1, balanced, np.mean(areas)]
    assert [f(*tensors) for f in BUILT_IN.values()] == pytest.approx(expected)


def test_an_area_under_the_curve_of_one_class_is_none():
    with pytest.raises(ValueError, match="examples of two classes"):  # which a run logs
        BUILT_IN["auc"](torch.zeros(3, 2), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("method", ["fedavg", "fed-ensemble", "tct", "one-exchange"])
def test_clients_report_the_metrics_of_the_model_on_their_examples(method, tmp_path):
    """One with examples of one class has no AUC; the mean is over the others."""
    tct = {"bootstrap_rounds": 1, "num_features": 50, "local_steps": 5}
    options = (
        SMALL
        | {"rounds": 3, "clients_per_round": 6, "clients_per_evaluation": 6}
        | ({"tct": tct} if method == "tct" else {})
    )
    result = run(
        method, metrics="f1-macro,auc", monitor="client-f1-macro-worst", private_test=True,
        local_test_fraction=0.1, alpha=0.1, out=tmp_path, **options,
    )  # fmt: skip
    last = result.clients[result.clients["round"] == result.clients["round"].max()]
    table = last.pivot(index="partition", columns="metric", values="value")
    setup, predictor = load_setup(result.config), load_predictor(result.folder)
    areas = {}
    for client, row in table.iterrows():
        rows = setup.split.tests[client]
        y = torch.from_numpy(setup.data.y_test[rows])
        scores = predictor.predict(setup.data.x_test[rows])
        assert row["f1-macro"] == pytest.approx(BUILT_IN["f1-macro"](scores, y), abs=1e-6)
        if len(set(y.tolist())) > 1:
            areas[client] = BUILT_IN["auc"](scores, y)
    assert table["auc"].dropna().to_dict() == pytest.approx(areas, abs=1e-6)
    assert 0 < len(areas) < len(table)
    assert result.curve("client-auc-mean").iloc[-1] == pytest.approx(np.mean([*areas.values()]))
    assert result.curve("client-f1-macro-worst").iloc[-1] == table["f1-macro"].min()
    assert result.summary["best"]["value"] == result.curve("client-f1-macro-worst").max()


def test_metrics_are_in_all_results_and_choose_the_best_model(tmp_path, caplog):
    """One that fails is missing, and logged once by server and clients; without any, the same is
    learned.
    """
    metrics = {"top2": top_two, "n": Total(), "bad": fail, "f1": "f1-macro"}
    metrics["nan"] = lambda *_: np.nan
    result = run("fedavg", metrics=metrics, monitor="top2", out=tmp_path / "a", **SMALL)
    assert result.curve("n").tolist() == [360] * 5
    assert len(result.curve("bad")) == len(result.curve("nan")) == 0
    said = [message for message in caplog.messages if message.startswith("metric ")]
    assert [message.partition(": ")[2] for message in said] == [
        f"ZeroDivisionError: no luck (test_metrics.py, line {fail.__code__.co_firstlineno + 1})",
        "it returned nan",
    ] * 2
    curve = result.curve("top2")
    last = {"top2": curve[4], "n": 360, "bad": None, "f1": result.curve("f1")[4], "nan": None}
    assert result.summary["metrics"] == last
    assert result.summary["best"]["value"] == curve.max()
    text = write_report(result.folder).read_text()
    assert f"{curve[4]:.3f}" in text
    assert "](metric-top2.png)" in text
    plain = run("fedavg", out=tmp_path / "b", **SMALL)
    assert plain.curve().tolist() == result.curve().tolist()


def test_patience_and_tuning_go_by_a_metric(tmp_path):
    """`flat` never gets better after round 0; smaller is better of a name with loss in it."""
    metrics = {"flat": lambda *_: 1.0, "n-loss": Total(), "f1": "f1-macro"}
    options = {"metrics": metrics, **SMALL}
    for monitor in ("flat", "n-loss"):
        result = run("fedavg", monitor=monitor, patience=2, out=tmp_path / monitor, **options)
        assert result.summary["rounds"] == 2
    options |= {"validation_examples": 50, "out": tmp_path / "tune"}
    tuning = tune("fedavg", grid={"learning-rate": [1e-6, 0.3]}, metric="f1", **options)
    assert tuning.best.learning_rate == 0.3
    options |= {"grid": {"momentum": [0.0]}, "parallel": 2}
    refused("metrics = .*: other processes", tune, "fedavg", **options)


def test_an_ensembles_evaluation_has_metrics_beside_those_of_its_models():
    ensemble = EnsemblePredictor(NetworkPredictor(nn.Linear(4, 3)) for _ in range(2))
    ensemble.metrics = Config(metrics={"n": Total()}).load_metrics()
    more = ensemble.evaluate(torch.ones(5, 4), torch.zeros(5, dtype=torch.long)).more
    assert (more["n"], "model-accuracy-max" in more) == (5, True)


def test_a_metric_that_was_edited_is_not_taken_for_the_runs(tmp_path, monkeypatch):
    """Its own lines, a function or a constant that it uses, or what an object holds."""
    monkeypatch.chdir(tmp_path)
    source = "LEAST = {}\ndef g(s):\n    return {}\ndef f(s, y):\n    return float(g(s) > LEAST)\n"
    changed, numbers = "the code of the metrics has changed since", itertools.count()

    def go(least=1, text="0.5", **more):
        (tmp_path / "mine.py").write_text(source.format(least, text))
        os.utime(tmp_path / "mine.py", (next(numbers),) * 2)
        return run("fedavg", **{**SMALL, "metrics": "mine.py:f", "out": tmp_path / "a", **more})

    refused("division", go, on_round=lambda record: 1 / (2 - record["round"]), error=RunFailed)
    refused(changed, go, least=2)
    refused(changed, go, text="0.6")
    assert go().summary == go().summary
    refused(changed, go, text="0.7")
    smooth = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    objects = {"metrics": {"smooth": smooth, "n": Total()}, "out": tmp_path / "b"}
    assert go(**objects).summary == go(**objects, resume=True).summary
    smooth.keywords["label_smoothing"] = 0.2
    refused("an object counts as another in each call", go, **objects)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": "f1-marco"}, "got 'f1-marco'; did you mean 'f1-macro'"),
        ({"metrics": top_two}, "in Python a dict of names and functions, got '<function top_two"),
        ({"metrics": {"accuracy": top_two}}, "another name, such as my-accuracy, got 'accuracy'"),
        ({"metrics": "client-f=f1-macro"}, "got 'client-f'"),
        ({"metrics": "f1-macro", "monitor": "f1-marco"}, "monitor: .*did you mean 'f1-macro'"),
        ({"metrics": "nowhere.py:f"}, "metrics = .*/nowhere.py:f: there is no file"),
        ({"metrics": ["math:sqroot"]}, "metrics = math:sqroot: math has no sqroot; did you mean"),
        ({"metrics": "math:pi"}, "expected a function, got 3.14"),
        ({"metrics": {"n": Total()}, "engine": "ray"}, r"pass metrics='mymetrics.py:Total'"),
    ],
)
def test_a_metric_that_cannot_be_is_refused_before_the_run(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(message, run, "fedavg", **{**SMALL, **options})
    assert list(tmp_path.iterdir()) == []


def test_the_setting_names_metrics_in_any_process():
    config = Config(metrics={"top2": top_two, "f1-macro": "f1-macro"}, monitor="top2")
    named, _, rest = config.metrics.partition("#")
    assert (named, rest[12:]) == (f"top2={__name__}:top_two", ",f1-macro")
    assert Config.parse(config.run_config()) == config
