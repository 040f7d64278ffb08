"""What is said of a run's uncertainty: by hand, by theory, for every method, and on real data."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedntk.ntk import calibrate, conformal_scores, uncertainty_of
from fedntk.simulations import Config, ConfigError, assess, load_predictor, run
from fedntk.simulations.assessment.uncertainty_metrics import (
    BINS,
    auroc,
    calibration,
    rejection_curve,
    reliability,
)
from fedntk.simulations.cli import app
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.methods import own_methods

from .settings import each_of

# ------------------------------------------------------------------- figures of merit


def metrics(probabilities, labels):
    p = torch.tensor(probabilities, dtype=torch.float64)
    return calibration(p.log(), torch.tensor(labels))


def test_calibration_by_hand():
    """Two bins, each a tenth off. ECE is added up in float32, of numbers below 1: 4 roundings."""
    found = metrics([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.1, 0.9]], [0, 1, 1, 1])
    assert found["accuracy"] == 0.75
    assert found["ece"] == pytest.approx((0.1 + 0.1) / 2, abs=4 * 6e-8)


@pytest.mark.parametrize(
    ("log_p", "labels", "expected"),
    [
        ([[0.0, -np.inf]] * 4, [0] * 4, {"accuracy": 1, "nll": 0, "brier": 0, "ece": 0}),
        ([[0.0, -800.0]], [1], {"accuracy": 0, "nll": 800, "brier": 2, "ece": 1}),
        ([[-math.log(4)] * 4] * 4, range(4), {"accuracy": 0.25, "nll": math.log(4), "brier": 0.75}),
    ],
    ids=["certain and right", "certain and wrong", "uniform"],
)
def test_limits_of_calibration(log_p, labels, expected):
    """A confidence of 1 counts as the float32 below it: 6e-8."""
    found = calibration(torch.tensor(log_p).double(), torch.tensor(list(labels)))
    assert found == pytest.approx({"ece": 0, **expected}, abs=6e-8)


def test_a_probability_may_be_a_rounding_above_1():
    log_p = torch.tensor([[3e-16, -900.0]], dtype=torch.float64)
    assert log_p.exp().max() > 1
    found = calibration(log_p, torch.tensor([0]))
    assert (found["accuracy"], found["brier"]) == (1, 0)


def drawn(n=400, classes=5):
    generator = torch.Generator().manual_seed(0)
    log_p = (3 * torch.randn(n, classes, generator=generator).double()).log_softmax(1)
    return log_p, torch.randint(classes, (n,), generator=generator)


def test_calibration_is_a_loop_in_float64():
    """ECE adds up to n float32 numbers below 1 in each bin: n roundings of 6e-8."""
    log_p, labels = drawn()
    p, n = log_p.exp().numpy(), len(labels)
    nll = brier = 0.0
    gaps = np.zeros(BINS)
    for row, label in zip(p, labels.tolist(), strict=True):
        nll -= math.log(row[label]) / n
        brier += sum((row[c] - (c == label)) ** 2 for c in range(len(row))) / n
        gaps[min(int(row.max() * BINS), BINS - 1)] += (row.max() - (row.argmax() == label)) / n
    found = calibration(log_p, labels)
    assert found["nll"] == pytest.approx(nll, rel=1e-12)
    assert found["brier"] == pytest.approx(brier, rel=1e-12)
    assert found["ece"] == pytest.approx(np.abs(gaps).sum(), abs=n * 6e-8)


def test_the_reliability_diagram_is_that_of_the_ece():
    """Also where confidences are on the edges of bins, or exactly 1."""
    log_p, labels = drawn()
    on_edges = torch.arange(8, 16).double() / 15
    edges = torch.stack([on_edges, 1 - on_edges], 1)
    for p, y in ((log_p.exp(), labels), (edges, torch.arange(8) % 2)):
        table = reliability(p, y)
        assert table.examples.sum() == len(y)
        gaps = (table.confidence - table.accuracy).abs()
        ece = (gaps * table.examples).sum() / len(y)
        assert calibration(p.log(), y)["ece"] == pytest.approx(ece, abs=len(y) * 6e-8)
        assert (table.bin <= table.confidence * BINS + 1e-6).all()
        assert (table.confidence * BINS <= table.bin + 1 + 1e-6).all()


@pytest.mark.parametrize(
    ("familiar", "unfamiliar", "expected"),
    [
        ([0.1, 0.4], [0.4, 0.8], (3 + 0.5) / 4),  # of the four pairs; a tie counts half
        ([1e-300, 2e-300], [3e-300, 1.0], 1),
        ([2.0, 3.0], [1.0, 0.0], 0),
        ([0.0] * 5, [0.0] * 7, 0.5),
    ],
)
def test_auroc_by_hand(familiar, unfamiliar, expected):
    assert auroc(np.array(familiar), np.array(unfamiliar)) == expected


def test_rejection_by_a_perfect_and_by_a_useless_uncertainty():
    """160 of 200 right. Perfect: the wrong ones go first. Useless: the accuracy stays."""
    correct = np.arange(200) % 5 > 0
    rejected = np.arange(100) / 100
    perfect = rejection_curve((~correct).astype(float), correct)
    np.testing.assert_allclose(perfect, np.minimum(0.8 / (1 - rejected), 1), rtol=1e-12)
    np.testing.assert_allclose(rejection_curve(np.zeros(200), correct), 0.8, rtol=1e-12)
    worst = rejection_curve(correct.astype(float), correct)  # the right ones go first
    np.testing.assert_allclose(worst, np.maximum(1 - 0.2 / (1 - rejected), 0), atol=1e-12)


def test_rejection_of_ties_is_the_mean_over_their_orders():
    """All 720 orders of six examples, of which three are equally uncertain."""
    doubt = np.array([0.1, 0.5, 0.5, 0.5, 0.7, 0.9])
    correct = np.array([True, False, True, True, True, False])
    means = np.zeros(100)
    orders = [o for o in itertools.permutations(range(6)) if (np.diff(doubt[list(o)]) >= 0).all()]
    for order in orders:
        for share in range(100):
            kept = 6 - share * 6 // 100
            means[share] += correct[list(order[:kept])].mean() / len(orders)
    assert len(orders) == 6
    np.testing.assert_allclose(rejection_curve(doubt, correct), means, rtol=1e-12)


# ---------------------------------------------------------------------------- a run

SMALL = Config(
    method="fedavg",
    num_clients=12, clients_per_round=6, clients_per_evaluation=0, rounds=3, local_epochs=3,
    learning_rate=0.3, validation_clients=2, validation_examples=150, alpha=1.0,
)  # fmt: skip
METHODS = {
    "one": {"method": "fedavg"},
    "ensemble": {"method": "fed-ensemble", "fed_ensemble": {"num_models": 3}},
}


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> str:
    """A data set of the shape of the digits, of noise, with more classes than they have."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("noise") / "noise.npz"
    x, y = 16 * generator.random((130, 1, 8, 8)), np.arange(130) % 13
    np.savez(path, x_train=x, y_train=y, x_test=x[:120], y_test=y[:120])
    return f"npz:{path}"


@pytest.fixture(scope="module", params=METHODS)
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return run(SMALL.replace(**METHODS[request.param]), out=folder, progress=False)


@pytest.fixture(scope="module")
def assessed(finished, noise):
    return assess(finished, unfamiliar=noise, coverage=0.9)


def log_probabilities(finished, x):
    """Of each model, through the predictor as users have it: shape (K, n, C)."""
    predictor = load_predictor(finished.folder)
    single = [predictor] if finished.config.method == "fedavg" else predictor.models
    return torch.stack([one.predict(x).double().log_softmax(1) for one in single])


def test_the_table_is_of_the_whole_and_of_each_model(finished, assessed):
    x, y = load_data(finished.config).test()
    log_p = log_probabilities(finished, x)
    rows = {"model": log_p} if len(log_p) == 1 else {"ensemble": log_p}
    if len(log_p) > 1:
        rows |= {f"model {k}": log_p[k : k + 1] for k in range(len(log_p))}
    assert list(assessed.table.index) == list(rows)
    for name, own in rows.items():
        expected = calibration(own.exp().mean(0).log(), y)
        assert dict(assessed.table.loc[name, list(expected)]) == pytest.approx(expected, rel=1e-9)


def test_each_example_has_its_uncertainty_and_its_set(finished, assessed):
    x, y = load_data(finished.config).test()
    p, found = log_probabilities(finished, x).exp(), assessed.examples
    mean = p.mean(0)
    assert (found.label == y.numpy()).all()
    assert (found.prediction == mean.argmax(1).numpy()).all()
    np.testing.assert_allclose(found.confidence, mean.max(1).values, rtol=1e-12)
    np.testing.assert_allclose(found.doubt + found.confidence, 1, rtol=1e-15)
    for name, value in vars(uncertainty_of(p)).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-13)
    if len(p) == 1:
        assert (found.mutual_information == 0).all()
        assert np.isnan(assessed.table.auroc_mutual_information.iloc[0])
    sets = 1 - mean <= assessed.sets.threshold
    assert (found.set_size == sets.sum(1).numpy()).all()
    assert assessed.sets.mean_size == pytest.approx(float(sets.sum(1).double().mean()))
    assert assessed.sets.empty == pytest.approx(float((sets.sum(1) == 0).double().mean()))
    hits = sets[torch.arange(len(y)), y].double().mean()
    assert assessed.sets.test_coverage == pytest.approx(float(hits))


def test_unfamiliar_examples_are_told_by_their_uncertainty(finished, assessed, noise):
    """They are standardised as the run's own are."""
    first, other = assessed.table.iloc[0], assessed.unfamiliar
    assert assessed.unfamiliar_name == noise
    assert len(other) == 120
    assert "label" not in other
    for measure in ("entropy", "doubt"):
        ours, theirs = assessed.examples[measure].to_numpy(), other[measure].to_numpy()
        above = (theirs[None] > ours[:, None]).mean() + 0.5 * (theirs[None] == ours[:, None]).mean()
        assert first[f"auroc_{measure}"] == pytest.approx(above, rel=1e-12)
    data = load_data(finished.config)
    raw = load_data(finished.config.replace(dataset=noise)).x_test
    mean, std = data.x_train.mean(dtype=np.float64), data.x_train.std(dtype=np.float64)
    x = torch.from_numpy(((raw - mean) / std).astype(np.float32))
    p = log_probabilities(finished, x).exp().mean(0)
    # float32 inputs, standardised in another order: 8 roundings of 6e-8, times the gradient
    np.testing.assert_allclose(other.confidence, p.max(1).values, atol=1e-4)


@pytest.mark.parametrize("score", ["threshold", "adaptive"])
@pytest.mark.parametrize("on", ["clients", "examples"])
def test_sets_are_calibrated_on_what_was_held_out(finished, on, score):
    """Those of the two last clients, whom nobody trained on, or those that no client has."""
    sets = assess(finished, coverage=0.8, score=score, calibrate_on=on).sets
    data, split = load_data(finished.config), load_split(finished.config)
    held = split.validation if on == "examples" else np.concatenate(split.clients[-2:])
    assert not set(held) & set(np.concatenate(split.clients[:-2]))
    assert sets.num_calibration == len(held)
    assert str(len(held)) in sets.calibrated_on
    k = math.ceil((len(held) + 1) * 0.8)
    if score == "threshold":
        x, y = data.train(held)
        p = log_probabilities(finished, x).exp().mean(0)
        assert sets.threshold == pytest.approx(calibrate(p, y, 0.8), abs=1e-12)
        # of the calibration examples themselves k are covered, exactly
        own = conformal_scores(p).gather(1, y[:, None])[:, 0]
        assert int((own <= sets.threshold + 1e-12).sum()) == k
    assert sets.note == ""
    assert sets.expected_low < k / (len(held) + 1) < sets.expected_high


def test_the_same_assessment_twice(finished):
    one, other = (assess(finished, coverage=0.5, score="adaptive") for _ in range(2))
    assert one.sets == other.sets
    pd.testing.assert_frame_equal(one.examples, other.examples, check_exact=True)


@pytest.mark.parametrize("method", each_of(own_methods()))
def test_every_method_whose_loss_is_cross_entropy_is_assessed(
    method, noise, finished_run, tmp_path
):
    """One whose model is of another loss is refused in one line."""
    finished = finished_run(method)
    if load_predictor(finished.folder).loss == "mse":
        with pytest.raises(ConfigError, match="loss is cross-entropy, got mse"):
            assess(finished)
        own = finished.config.settings.table.replace("-", "_")
        loss = {own: {"loss": "cross-entropy"}}
        finished = run(finished.config, **loss, out=tmp_path, progress=False)
    found = assess(finished, unfamiliar=noise)
    assert found.table.accuracy.iloc[0] == finished.summary["accuracy"]
    assert found.table.nll.iloc[0] == pytest.approx(finished.summary["loss"], rel=1e-4)
    assert len(found.examples) == len(load_data(finished.config).y_test)
    assert len(found.unfamiliar) == 120


def test_held_out_examples_that_chose_part_of_the_model_are_named(tmp_path):
    own = {"selection": "validation", "steps": "10,20"}
    config = SMALL.replace(method="ntk-fl", ntk_fl=own, validation_examples=0, rounds=1)
    found = assess(run(config, out=tmp_path, progress=False), coverage=0.5).sets
    assert "they chose part of the model" in found.note
    assert found.note in Path(assess(tmp_path, coverage=0.5).write()).read_text()


# --------------------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A run that held nothing out, on a data set of its own."""
    folder = tmp_path_factory.mktemp("bare")
    generator = np.random.default_rng(1)
    x, y = generator.random((90, 1, 8, 8)), np.arange(90) % 3
    np.savez(folder / "own.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    options = {"validation_clients": 0, "validation_examples": 0, "partition": "iid", "rounds": 1}
    config = SMALL.replace(dataset=f"npz:{folder / 'own.npz'}", **options)
    return run(config, out=folder / "run", progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coverage": 0.9}, "coverage: the run held out no clients or examples to calibrate on; "
         "run it with validation-clients or validation-examples (test examples are never used"),
        ({"coverage": 0.9, "calibrate_on": "examples"}, "held out no examples to calibrate on; "
         "run it with validation-examples (test"),
        ({"coverage": 0.9, "calibrate_on": "test"}, "calibrate-on: expected clients or examples, "
         "got 'test'"),
        ({"coverage": 90}, "coverage: expected a number between 0 and 1, got 90"),
        ({"which": "worst"}, "which: expected model or best, got 'worst'"),
        ({"unfamiliar": "mnits"}, "unfamiliar = mnits: dataset: expected digits, mnist"),
        ({"unfamiliar": "npz:nowhere.npz"}, "unfamiliar = npz:nowhere.npz: dataset: no file at"),
    ],
)  # fmt: skip
def test_what_cannot_be_assessed_is_refused(bare, options, message):
    with pytest.raises(ConfigError) as caught:
        assess(bare, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_held_out_examples_and_other_scores_are_refused(finished):
    with pytest.raises(ConfigError, match=r"coverage of 0.999 needs at least 999 calibration exam"):
        assess(finished, coverage=0.999)
    with pytest.raises(ConfigError, match="score: expected one of threshold, adaptive, got 'aps'"):
        assess(finished, coverage=0.9, score="aps")


def test_other_data_is_refused(bare, tmp_path):
    dataset = bare.config.dataset
    with pytest.raises(ConfigError, match="unfamiliar: expected another data set than the run's"):
        assess(bare, unfamiliar=dataset)
    x, y = np.ones((6, 1, 9, 9)), np.arange(6) % 2
    np.savez(tmp_path / "large.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ConfigError, match=r"expected examples of shape \(n, 1, 8, 8\).*1, 9, 9"):
        assess(bare, unfamiliar=f"npz:{tmp_path / 'large.npz'}")
    changed = replace(bare, summary={**bare.summary, "data": "other"})
    with pytest.raises(ConfigError, match="the data set has changed since the run in"):
        assess(changed)
    with pytest.raises(FileNotFoundError, match="no finished run in"):
        assess(tmp_path)


# --------------------------------------------------------------------------- written


def test_the_report_has_the_figures_and_readable_pictures(assessed, tmp_path):
    (tmp_path / "unfamiliar-doubt.png").write_bytes(b"of an earlier one")
    text = assessed.write(tmp_path).read_text()
    pictures = sorted(path.stem for path in tmp_path.glob("*.png"))
    own = ["unfamiliar-mutual-information"] if len(assessed.table) > 1 else []
    assert pictures == [
        "rejection", "reliability", "unfamiliar-doubt", "unfamiliar-entropy", *own
    ]  # fmt: skip
    for name in pictures:
        assert f"]({name}.png)" in text
        picture = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
        assert 0.005 < (picture < 200).mean() < 0.5  # neither empty nor covered
    first = assessed.table.iloc[0]
    assert f"| {100 * first.accuracy:.1f} " in text
    assert f"| {first.ece:.4f} " in text
    assert ("mean of the models" in text) == (len(assessed.table) > 1)
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["models"][assessed.table.index[0]]["ece"] == first.ece
    assert written["sets"]["test_coverage"] == assessed.sets.test_coverage
    read = pd.read_parquet(tmp_path / "examples.parquet")
    pd.testing.assert_frame_equal(read, assessed.examples)
    assert len(pd.read_parquet(tmp_path / "unfamiliar.parquet")) == 120
    assert len(pd.read_csv(tmp_path / "rejection.csv")) == len(assessed.rejection)
    assert r"\\" in (tmp_path / "table.tex").read_text()


def test_the_best_model_says_what_chose_it(finished, tmp_path):
    """Without unfamiliar examples none of an earlier assessment stay."""
    for name in ("unfamiliar.parquet", "unfamiliar-entropy.png"):
        (tmp_path / name).write_bytes(b"old")
    found, best = assess(finished, which="best"), finished.summary["best"]
    text = found.write(tmp_path).read_text()
    assert not list(tmp_path.glob("unfamiliar*"))
    assert "AUROC" not in text
    assert "Prediction sets" not in text
    assert json.loads((tmp_path / "metrics.json").read_text())["sets"] is None
    assert "chosen on these test examples" in text
    assert f"the best model, of round {best['round']}" in text
    assert found.table.accuracy.iloc[0] == best["value"]


def line(figure, number):
    return figure.axes[0].lines[number].get_xydata()


def test_the_pictures_draw_the_tables(assessed):
    figures = assessed.figures()
    table = next(iter(assessed.reliability.values()))
    shown = 100 * table[table.examples >= 10][["confidence", "accuracy"]]
    np.testing.assert_allclose(line(figures["reliability"], 1), shown)
    curve = assessed.rejection[assessed.rejection.measure == "entropy"].iloc[:100]
    np.testing.assert_allclose(
        line(figures["rejection"], 0), 100 * curve[["rejected", "accuracy"]], rtol=1e-12
    )
    steps = figures["unfamiliar-entropy"].axes[0].patches[0].get_data()
    assert steps.values.sum() == pytest.approx(100)
    assert steps.edges[0] == 0


@pytest.mark.parametrize("private", [True, False])
def test_clients_parts_of_the_test_set_choose_on_it_too(tmp_path, private):
    """Which evaluations on validation examples, or on the clients' own, do not."""
    config = SMALL.replace(
        rounds=1, clients_per_evaluation=5, monitor="client-accuracy-mean", private_test=private,
        local_test_fraction=0.2, min_partition_size=10, validation_clients=0,
    )  # fmt: skip
    text = assess(run(config, out=tmp_path, progress=False), which="best").write().read_text()
    assert (tmp_path / "uncertainty" / "report.md").exists()
    assert ("chosen on these test examples" in text) == private


def test_the_command(finished, noise, tmp_path):
    options = ["--unfamiliar", noise, "--coverage", "0.9", "--calibrate-on", "examples"]
    done = CliRunner().invoke(app, ["assess", str(finished.folder), *options, "--out", tmp_path])
    assert done.exit_code == 0, done.output
    assert "Prediction sets" in done.output
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["sets"]["calibrated_on"] == "150 held-out examples"
    assert found["unfamiliar"] == noise


# ------------------------------------------------------------------------- real data


def test_handwritten_digits_are_unfamiliar_to_models_of_clothes(shared_data, tmp_path):
    """Five models trained on Fashion-MNIST disagree about MNIST more than about their own test set.

    A measure that told nothing would have an AUROC of 1/2 with the standard deviation of the
    Mann-Whitney statistic, sqrt((m + n + 1) / (12 m n)) = 0.0129 for m = n = 1,000. Five of them,
    which chance exceeds once in 3.5 million, are asked for: 0.565.
    """
    config = Config(
        method="fed-ensemble", dataset="fashion-mnist", data_dir=shared_data, alpha=1.0,
        num_clients=10, clients_per_round=10, clients_per_evaluation=0, train_examples=1500,
        test_examples=1000, rounds=6, local_epochs=5, learning_rate=0.1,
    )  # fmt: skip
    found = assess(run(config, out=tmp_path, progress=False), unfamiliar="mnist")
    assert len(found.examples) == len(found.unfamiliar) == 1000
    least = 0.5 + 5 * math.sqrt((1000 + 1000 + 1) / (12 * 1000 * 1000))
    assert found.table.auroc_mutual_information["ensemble"] > least
    ours, theirs = found.examples.mutual_information, found.unfamiliar.mutual_information
    assert theirs.mean() > ours.mean()
