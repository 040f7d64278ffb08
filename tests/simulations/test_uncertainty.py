"""What is said of a run's uncertainty: by hand, by theory, for every method."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fedntk.ntk import calibrate, uncertainty_of
from fedntk.simulations import Config, assess, load_predictor, run
from fedntk.simulations.assessment.uncertainty_metrics import BINS, calibration, rejection_curve
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.methods import own_methods

from .outcomes import refused
from .settings import each_of
from .test_cli import fedntk


@pytest.mark.parametrize(
    ("log_p", "labels", "expected"),
    [
        ([[0.0, -np.inf]] * 4, [0] * 4, {"accuracy": 1, "nll": 0, "brier": 0, "ece": 0}),
        ([[0.0, -800.0]], [1], {"accuracy": 0, "nll": 800, "brier": 2, "ece": 1}),
        ([[3e-16, -900.0]], [0], {"accuracy": 1, "nll": 0, "brier": 0}),
    ],
    ids=["certain and right", "certain and wrong", "a rounding above 1"],
)
def test_limits_of_calibration(log_p, labels, expected):
    measured = calibration(torch.tensor(log_p, dtype=torch.float64), torch.tensor(list(labels)))
    assert measured == pytest.approx({"ece": 0, **expected}, abs=1e-12)


def test_calibration_is_a_loop_in_float64():
    generator, n = torch.Generator().manual_seed(0), 400
    log_p = (3 * torch.randn(n, 5, generator=generator).double()).log_softmax(1)
    labels = torch.randint(5, (n,), generator=generator)
    p = log_p.exp().numpy()
    hits = nll = brier = 0.0
    gaps = np.zeros(BINS)
    for row, label in zip(p, labels.tolist(), strict=True):
        hits += (row.argmax() == label) / n
        nll -= math.log(row[label]) / n
        brier += sum((row[c] - (c == label)) ** 2 for c in range(len(row))) / n
        gaps[min(int(row.max() * BINS), BINS - 1)] += (row.max() - (row.argmax() == label)) / n
    expected = {"accuracy": hits, "nll": nll, "brier": brier, "ece": np.abs(gaps).sum()}
    assert calibration(log_p, labels) == pytest.approx(expected, rel=1e-12)


def test_rejection_of_ties_is_the_mean_over_their_orders():
    """All orders of six examples; three are equally uncertain."""
    doubt = np.array([0.1, 0.5, 0.5, 0.5, 0.7, 0.9])
    correct = np.array([True, False, True, True, True, False])
    orders = [o for o in itertools.permutations(range(6)) if (np.diff(doubt[list(o)]) >= 0).all()]
    left = [6 - share * 6 // 100 for share in range(100)]
    means = np.mean([[correct[list(o[:k])].mean() for k in left] for o in orders], axis=0)
    np.testing.assert_allclose(rejection_curve(doubt, correct), means, rtol=1e-12)


SMALL = Config(
    method="fedavg", num_clients=12, clients_per_round=6, clients_per_evaluation=0, rounds=3,
    local_epochs=3, learning_rate=0.3, validation_clients=2, validation_examples=150, alpha=1.0,
)  # fmt: skip
METHODS = {"fedavg": {}, "fed-ensemble": {"fed_ensemble": {"num_models": 3}}}


def write_npz(path, x, y, test):
    np.savez(path, x_train=x, y_train=y, x_test=x[:test], y_test=y[:test])
    return f"npz:{path}"


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> str:
    """A data set of the shape of the digits, of noise, with more classes than they have."""
    x = 16 * np.random.default_rng(0).random((130, 1, 8, 8))
    return write_npz(tmp_path_factory.mktemp("noise") / "noise.npz", x, np.arange(130) % 13, 120)


@pytest.fixture(scope="module", params=METHODS)
def finished(request, tmp_path_factory):
    config = SMALL.replace(method=request.param, **METHODS[request.param])
    return run(config, out=tmp_path_factory.mktemp(request.param), progress=False)


@pytest.fixture(scope="module")
def assessed(finished, noise):
    return assess(finished, unfamiliar=noise, coverage=0.9)


def log_probabilities(finished, x):
    """Of each model, through the predictor as users have it: shape (K, n, C)."""
    predictor = load_predictor(finished.folder)
    x, predictor.inputs = predictor.prepare(x), None
    single = [predictor] if finished.config.method == "fedavg" else predictor.models
    return torch.stack([one.predict(x).double().log_softmax(1) for one in single])


def test_the_table_is_of_the_whole_and_of_each_model(finished, assessed):
    data = load_data(finished.config)
    y, log_p = data.test()[1], log_probabilities(finished, data.x_test)
    rows = {"model": log_p}
    if len(log_p) > 1:
        rows = {"ensemble": log_p} | {f"model {k}": log_p[k : k + 1] for k in range(len(log_p))}
    else:
        assert np.isnan(assessed.table.auroc_mutual_information.iloc[0])
    assert list(assessed.table.index) == list(rows)
    for name, models in rows.items():
        expected = calibration(models.exp().mean(0).log(), y)
        assert dict(assessed.table.loc[name, list(expected)]) == pytest.approx(expected, rel=1e-9)
    # each example has its uncertainty and its set
    p, conformal = log_p.exp(), assessed.sets
    confidence, prediction = p.mean(0).max(1)
    sets = 1 - p.mean(0) <= conformal.threshold
    expected = vars(uncertainty_of(p)) | {
        "label": y, "prediction": prediction, "confidence": confidence, "doubt": 1 - confidence,
        "set_size": sets.sum(1),
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(assessed.examples[name], value, rtol=0, atol=1e-13)
    hits, sizes = sets[torch.arange(len(y)), y].double().mean(), sets.sum(1).double()
    shares = [*map(float, (sizes.mean(), (sizes == 0).double().mean(), hits))]
    assert [conformal.mean_size, conformal.empty, conformal.test_coverage] == pytest.approx(shares)


def test_unfamiliar_examples_are_told_by_their_uncertainty(finished, assessed, noise):
    """They are standardised as the run's own are."""
    other = assessed.unfamiliar
    assert (assessed.unfamiliar_name, len(other)) == (noise, 120)
    for measure in ("entropy", "doubt"):
        ours, theirs = assessed.examples[measure].to_numpy(), other[measure].to_numpy()
        above = (theirs[None] > ours[:, None]).mean() + 0.5 * (theirs[None] == ours[:, None]).mean()
        assert assessed.table[f"auroc_{measure}"].iloc[0] == pytest.approx(above, rel=1e-12)
    raw = load_data(SMALL.replace(dataset=noise)).x_test
    p = log_probabilities(finished, raw).exp().mean(0)
    np.testing.assert_allclose(other.confidence, p.max(1).values, atol=1e-12)


@pytest.mark.parametrize("score", ["threshold", "adaptive"])
@pytest.mark.parametrize("on", ["clients", "examples"])
def test_sets_are_calibrated_on_what_was_held_out(finished, on, score):
    """Those of the two last clients, whom nobody trained on, or those that no client has."""
    one, other = (assess(finished, coverage=0.8, score=score, calibrate_on=on) for _ in range(2))
    sets = one.sets
    assert sets == other.sets
    pd.testing.assert_frame_equal(one.examples, other.examples, check_exact=True)
    data, split = load_data(finished.config), load_split(finished.config)
    held = split.validation if on == "examples" else np.concatenate(split.clients[-2:])
    assert not set(held) & set(np.concatenate(split.clients[:-2]))
    assert (sets.num_calibration, sets.note) == (len(held), "")
    if score == "threshold":
        x, y = data.x_train[held], data.train(held)[1]
        p = log_probabilities(finished, x).exp().mean(0)
        assert sets.threshold == pytest.approx(calibrate(p, y, 0.8), abs=1e-12)
    expected = math.ceil((len(held) + 1) * 0.8) / (len(held) + 1)
    assert sets.expected_low < expected < sets.expected_high


@pytest.mark.parametrize("method", each_of(own_methods()))
def test_every_method_whose_loss_is_cross_entropy_is_assessed(method, finished_run):
    """Another loss is refused."""
    finished = finished_run(method)
    if load_predictor(finished.folder).loss == "mse":
        refused("loss is cross-entropy, got mse", assess, finished)
    else:
        assessed = assess(finished)
        assert assessed.table.accuracy.iloc[0] == finished.summary["accuracy"]
        assert assessed.table.nll.iloc[0] == pytest.approx(finished.summary["loss"], rel=1e-4)


def test_held_out_examples_that_chose_part_of_the_model_are_named(tmp_path):
    options = {"selection": "validation", "steps": "10,20"}
    config = SMALL.replace(method="ntk-fl", ntk_fl=options, validation_examples=0, rounds=1)
    sets = assess(run(config, out=tmp_path, progress=False), coverage=0.5).sets
    assert "they chose part of the model" in sets.note


def test_what_cannot_be_assessed_is_refused(finished_run, finished, tmp_path):
    large = write_npz(tmp_path / "large.npz", np.ones((6, 1, 9, 9)), np.arange(6) % 2, 6)
    changed = replace(finished, summary={**finished.summary, "data": "other"})
    for options, message in (
        ({"coverage": 0.9}, "the run held out no clients or examples to calibrate on"),
        ({"unfamiliar": "digits"}, "unfamiliar: expected another data set than the run's"),
        ({"unfamiliar": large}, r"expected examples of shape \(n, 1, 8, 8\)"),
    ):
        refused(message, assess, finished_run("fedavg"), **options)
    refused("needs at least 999 calibration", assess, finished, coverage=0.999)
    refused("the data set has changed since the run in", assess, changed)


def test_the_command_writes_the_figures(finished, assessed, noise, tmp_path):
    options = ["--unfamiliar", noise, "--coverage", 0.9, "--calibrate-on", "examples"]
    assert "Prediction sets" in fedntk("assess", finished.folder, *options, "--out", tmp_path)
    text = (tmp_path / "report.md").read_text()
    pictures = {path.stem for path in tmp_path.glob("*.png") if f"]({path.name})" in text}
    assert pictures >= {"rejection", "reliability", "unfamiliar-doubt", "unfamiliar-entropy"}
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["models"][assessed.table.index[0]]["ece"] == assessed.table.ece.iloc[0]
    assert written["sets"]["calibrated_on"] == "150 held-out examples"
    columns = assessed.examples.columns.drop("set_size")  # these were calibrated on the clients
    read = pd.read_parquet(tmp_path / "examples.parquet")
    pd.testing.assert_frame_equal(read[columns], assessed.examples[columns])
