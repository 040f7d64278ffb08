"""Real targets: their units, metrics and intervals, and least squares from sums with them."""

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score

from fedntk.ntk import NetworkPredictor, Normaliser, calibrate_intervals, regression_metrics
from fedntk.ntk.convex.pooled_statistics import NormalEquations, normaliser_of
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.target_columns import LARGEST, target_steps, with_targets
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.predictors.conformal import rank
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.predictors.targets import TargetTransform, real_targets

from ..conftest import refused

RNG = np.random.default_rng(0)
N, P, C = 60, 5, 2
Z = torch.from_numpy(RNG.normal(size=(N, P)).astype(np.float32))
Y = torch.from_numpy(RNG.normal(size=(N, C)).astype(np.float32)) * torch.tensor([1.0, 9.0])


def statistics(z=Z, y=Y, fixed_point=None):
    labels = torch.zeros(len(y), dtype=torch.int64)
    chunks = with_targets(z.split(7), y, fixed_point)
    return FeatureStatistics.of(chunks, labels, 1, fixed_point=fixed_point)


def test_metrics_are_those_of_scikit_learn():
    f = Y + torch.from_numpy(RNG.normal(size=(N, C)))
    metrics = regression_metrics(f, Y, [1.0, 10.0])
    unit = np.array([1.0, 10.0])
    assert metrics["mae"] == pytest.approx(
        mean_absolute_error(Y.numpy() * unit, f.numpy() * unit), rel=1e-12
    )
    assert metrics["r2"] == pytest.approx(
        r2_score(Y.double().numpy(), f.double().numpy()), rel=1e-12
    )


def test_targets_that_do_not_vary_have_no_r2():
    """Also those that differ by rounding only; beside others, which count alone."""
    constant = torch.full((N, 1), 0.1)
    assert regression_metrics(constant + 1, constant).keys() == {"mae"}
    assert regression_metrics(Y[:1], Y[:1]) == {"mae": 0.0}
    both = regression_metrics(torch.cat([constant, 2 * Y], 1), torch.cat([constant, Y], 1))
    assert both["r2"] == pytest.approx(
        r2_score(Y.double().numpy(), 2 * Y.double().numpy()), rel=1e-12
    )


def test_a_predictor_gives_predictions_their_units(tmp_path):
    """Also one that was saved; far from 0 no digit is lost."""
    raw = np.array([[1e6 + 1, 1.0], [1e6 + 2, -3.0], [1e6 + 4, 5.0]])
    targets = TargetTransform.fit(raw)
    assert targets(raw).double().mean(0).abs().max() < 1e-6
    np.testing.assert_allclose(targets.restore(targets(raw)), raw, rtol=1e-12, atol=1e-6)
    network = torch.nn.Linear(P, C)
    predictor = NetworkPredictor(network, loss="mse")
    predictor.targets = targets
    predictor.inputs = InputTransform.fit(Z.numpy(), classes=("a", "b"), targets=targets)
    f = predictor.predict(Z)
    assert f.dtype == torch.float64
    evaluation = predictor.evaluate(Z, (y := f + 0.5).numpy())
    assert evaluation.accuracy is None
    assert evaluation.more["mae"] == pytest.approx(0.5, rel=1e-6)
    assert evaluation.score == pytest.approx(r2_score(y.numpy(), f.numpy()), rel=1e-6)
    predictor.save(tmp_path)
    loaded = NetworkPredictor.load(tmp_path, network)
    assert torch.equal(loaded.predict(Z), f)
    assert loaded.inputs.digest == predictor.inputs.digest


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.ones((3, 1)), "expected numbers that differ"),
        (np.array([[1e300], [-1e300]]), "variance is finite"),
    ],
)
def test_targets_without_a_variance_are_refused(y, message):
    with np.errstate(over="ignore"):
        refused(message, TargetTransform.fit, y)


def test_targets_of_another_form_are_refused():
    targets = TargetTransform.fit(Y.double().numpy())
    refused(r"shape \(n, 2\)", targets, np.ones(3))
    refused("finite numbers", targets, np.full((3, 2), np.nan))
    refused("finite numbers", targets, np.full((3, 2), "a"))
    refused("one for each of the model's outputs", real_targets, torch.ones(3), 2)
    refused("NaN", real_targets, torch.tensor([np.nan]), 1)


@pytest.mark.parametrize("n", [1, 9, 20])
@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_of_exchangeable_examples_intervals_hold_exactly_their_share(n, coverage):
    """With n + 1 different residuals, and each left out in turn, k of them are within the k-th.

    So the probability that the interval of a new one holds it is k / (n + 1), the coverage or more.
    """
    k = rank(n, coverage)
    y = torch.from_numpy(RNG.normal(size=(n + 1, C)))
    if k > n:
        refused("calibration examples", calibrate_intervals, y[1:], y[1:], coverage)
        return
    f = torch.zeros_like(y)
    within = torch.zeros(C)
    for left_out in range(n + 1):
        others = torch.arange(n + 1) != left_out
        q = calibrate_intervals(f[others], y[others], coverage)
        within += y[left_out].abs() <= q
    assert within.tolist() == [k, k]
    assert k / (n + 1) >= coverage


def test_calibration_on_other_shapes_is_refused():
    refused("one shape", calibrate_intervals, Y, Y[:, :1], 0.5)
    refused("finite", calibrate_intervals, Y * np.nan, Y, 0.5)


@pytest.mark.parametrize("bias", [False, True])
def test_sums_with_targets_give_the_pooled_ridge_regression(bias):
    """Against (Z^T Z + rho I)^-1 Z^T Y in float64; also the loss, which is from the sums alone."""
    sums = statistics()
    normaliser = normaliser_of(sums, C)
    equations = NormalEquations.of(sums, normaliser, bias=bias, num_targets=C)
    z, y = normaliser(Z).double(), Y.double()
    mean, inv_std = (torch.from_numpy(a).double() for a in (normaliser.mean, normaliser.inv_std))
    z = (Z.double() - mean) * inv_std
    z = torch.cat([z, torch.ones(N, 1)], 1) if bias else z
    gram = z.T @ z
    rho = 0.1 * float(gram.diagonal().sum()) / N
    expected = torch.linalg.solve(gram + rho * torch.eye(len(gram)).double(), z.T @ y)
    actual = equations.solve(0.1)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
    loss = (z @ actual - y).square().sum() / (2 * N)
    assert equations.loss(actual) == pytest.approx(float(loss), rel=1e-10)


def test_one_hot_targets_give_the_equations_of_their_classes():
    labels = torch.from_numpy(RNG.integers(0, C, N))
    one_hot = torch.nn.functional.one_hot(labels, C).float()
    normaliser = Normaliser.identity(P)
    of_classes = FeatureStatistics.of([Z], labels, C)
    classes = NormalEquations.of(of_classes, normaliser, bias=True, centred=False)
    real = NormalEquations.of(statistics(y=one_hot), normaliser, bias=True, num_targets=C)
    for name in ("gram", "cross", "squared_targets", "total", "squared_weights"):
        np.testing.assert_allclose(getattr(real, name), getattr(classes, name), rtol=1e-14)


@pytest.mark.parametrize("bits", [4, 8])
def test_two_digits_hold_a_target_to_half_of_the_fine_step(bits):
    """As y - a is at most half of the coarse step, so b is not clipped; up to 63 deviations."""
    y = torch.linspace(-LARGEST, LARGEST, 999)[:, None]
    step = np.concatenate([np.ones(1, np.float32), target_steps(1, bits)])
    fixed_point = FixedPoint(step, bits)
    (columns,) = with_targets([torch.ones(len(y), 1)], y, fixed_point)
    whole = fixed_point(columns) * torch.from_numpy(step)
    assert (whole[:, 1:].sum(1) - y[:, 0]).abs().max() <= step[2] / 2


def test_folded_sums_are_those_of_the_rounded_targets():
    """In float64: z from fixed-point numbers, and y = a + b."""
    step = np.concatenate([np.full(P, 2.0**-5, np.float32), target_steps(C, 8)])
    fixed_point = FixedPoint(step, 8)
    sums = statistics(fixed_point=fixed_point).scaled(fixed_point).folded(C)
    (columns,) = with_targets([Z], Y, fixed_point)
    rounded = (fixed_point(columns) * torch.from_numpy(step)).double()
    joint = torch.cat([rounded[:, :P], rounded[:, P : P + C] + rounded[:, P + C :]], 1)
    np.testing.assert_allclose(sums.matrix(), joint.T @ joint, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sums.class_sums[0], joint.sum(0), rtol=1e-12, atol=1e-12)
    assert sums.counts.tolist() == [N]
