"""Sums over features: least squares from them are those from the features themselves."""

import numpy as np
import pytest
import torch

from fedntk.ntk import Normaliser, NotEnoughMemory, one_hot
from fedntk.ntk.convex import pooled_statistics
from fedntk.ntk.convex.pooled_statistics import (
    NormalEquations,
    best_ridge,
    class_weights,
    normaliser_of,
    personal_model,
    sandwiched_ridge,
)
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads import feature_statistics
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.split_statistics import SplitStatistics

from ...conftest import refused

N, P, C = 60, 9, 4
LABELS = torch.arange(N) % (C - 1)  # nobody has the last class


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def features(seed: int = 0) -> torch.Tensor:
    """Scales from 1e-3 to 1e3, means of the same size, one feature constant, one zero."""
    z = (random(N, P, seed=seed) + 1) * torch.logspace(-3, 3, P)
    z[:, 3], z[:, 5] = -2.5, 0
    return z


def statistics(z: torch.Tensor, labels: torch.Tensor = LABELS, **options: object):
    return FeatureStatistics.of(z.split(7), labels, C, **options)  # type: ignore[arg-type]


def split(z: torch.Tensor, parts: list[torch.Tensor], **options: object) -> FeatureStatistics:
    return FeatureStatistics.join(statistics(z[rows], LABELS[rows], **options) for rows in parts)


SPLITS = {
    "one class each": [torch.nonzero(c == LABELS).flatten() for c in range(C - 1)],
    "one by one": list(torch.arange(N).split(1)),
    "other order": list(torch.randperm(N, generator=torch.Generator().manual_seed(1)).split(11)),
}


def solution(sums: FeatureStatistics, ridge: float = 1e-2, **options: bool) -> np.ndarray:
    normaliser = normaliser_of(sums)
    return NormalEquations.of(sums, normaliser, **options).solve(ridge).numpy()


def by_rows(z: torch.Tensor, ridge: float, bias: str, weights: torch.Tensor) -> np.ndarray:
    """Weighted least squares on the normalised rows themselves, in float64."""
    z, total = z.double(), weights.sum()
    mean = (weights[:, None] * z).sum(0) / total
    std = ((weights[:, None] * (z - mean) ** 2).sum(0) / total).sqrt()
    std[std < 1e-9] = torch.inf
    z = (z - mean) / std
    z = torch.cat([z, torch.ones(len(z), 1).double()], 1) if bias else z
    y = one_hot(LABELS, C).double() - 1 / C
    gram = z.T @ (weights[:, None] * z)
    counted = torch.ones(len(gram)).double()
    counted[P:] = bias != "free"
    rho = ridge * (counted @ gram.diagonal()) / total * (weights @ weights) / total
    cross = z.T @ (weights[:, None] * y)
    return torch.linalg.solve(gram + torch.diag(rho * counted), cross).numpy()


@pytest.mark.parametrize("bias", ["", "counted", "free"])
@pytest.mark.parametrize(("ridge", "balanced"), [(1e-6, False), (1e-2, True), (1.0, False)])
def test_the_solution_is_that_of_the_rows(ridge, bias, balanced):
    """Mean and inverse deviation are rounded to float32: 2^-24 of each, and means are as large.

    Means of about one deviation make features wrong by 2^-23 of a deviation; the solution, of
    condition 1 / 1e-6 at most along features that are independent, by a few times that.
    """
    weights = np.ones(C)
    if balanced:
        counts = np.array([50, 5, 5, 0])
        weights = class_weights(counts)
        np.testing.assert_allclose(weights * counts, [20, 20, 20, 0])
        assert weights[3] == 1  # nobody's
    sums = statistics(features(), weights=weights if balanced else None)
    actual = solution(sums, ridge, bias=bool(bias), free_bias=bias == "free")
    expected = by_rows(features(), ridge, bias, torch.from_numpy(weights)[LABELS])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_split_has_the_same_solution(name):
    """Sums differ by float64's rounding: 1e-16 times a condition of at most 1e4."""
    expected = solution(statistics(features()))
    actual = solution(split(features(), SPLITS[name]))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("name", sorted(SPLITS))
@pytest.mark.parametrize(("bits", "block"), [(2, 1024), (8, 1024), (8, 2)])
def test_sums_of_fixed_point_numbers_are_exact(name, bits, block, monkeypatch):
    """In any blocks of products, and without the first 13 examples again."""
    monkeypatch.setattr(feature_statistics, "ROWS", block)
    monkeypatch.setattr(feature_statistics, "COLUMNS", 2 * block)
    z, y = features(), one_hot(LABELS, C).long()
    fixed = FixedPoint.of(z[:20], bits)
    q = (z / torch.from_numpy(fixed.step)).round().clamp(-fixed.largest, fixed.largest).long()
    every = split(z, SPLITS[name], fixed_point=fixed)
    rest = every - statistics(z[:13], LABELS[:13], fixed_point=fixed)
    for actual, rows in ((every, slice(None)), (rest, slice(13, None))):
        assert actual.gram.dtype == np.int64
        assert np.array_equal(actual.gram, (q[rows].T @ q[rows])[*torch.triu_indices(P, P)])
        assert np.array_equal(actual.class_sums, y[rows].T @ q[rows])
        assert np.array_equal(actual.counts, y[rows].sum(0))


def test_the_largest_fixed_point_numbers_add_up_exactly():
    """1,024 products of 127^2 stay under 2^24; one more bit of a number would not."""
    fixed = FixedPoint(np.ones(2, np.float32), 8)
    z, labels = torch.full((1500, 2), 1e9), torch.zeros(1500, dtype=torch.long)
    actual = FeatureStatistics.of([z], labels, 1, fixed_point=fixed)
    assert actual.gram.tolist() == [1500 * 127**2] * 3


def test_fixed_point_numbers_are_right_to_half_a_step():
    z = features()
    fixed = FixedPoint.of(z, 8)
    step = torch.from_numpy(fixed.step)
    assert bool(((fixed(z) * step - z).abs() <= step / 2).all())
    assert bool((fixed(1e9 * z[:, [4]].expand(N, P)).abs() == 127).all())
    assert (np.frexp(fixed.step)[0] == 0.5).all()
    zero = FixedPoint.of(torch.zeros(3, 2), 8)
    assert np.isfinite(zero.step).all()
    exact, scaled = statistics(fixed(z) * step), statistics(z, fixed_point=fixed).scaled(fixed)
    np.testing.assert_allclose(scaled.gram, exact.gram, rtol=1e-12)
    np.testing.assert_allclose(scaled.class_sums, exact.class_sums, rtol=1e-12, atol=1e-12)


def test_the_loss_is_that_of_the_rows():
    z = features(seed=3)
    normaliser = normaliser_of(statistics(features()))
    linear = random(P + 1, C).double()
    equations = NormalEquations.of(statistics(z), normaliser, bias=True)
    rows = torch.cat([normaliser(z), torch.ones(N, 1)], 1).double()
    error = rows @ linear - (one_hot(LABELS, C).double() - 1 / C)
    expected = float(error.square().sum(1).mean() / 2)
    assert equations.loss(linear) == pytest.approx(expected, rel=1e-5)  # float32 normalises


def test_the_best_ridge_has_the_least_validation_loss():
    """With noise for features a large ridge is best."""
    noise = [
        NormalEquations.of(statistics(random(N, P, seed=k)), Normaliser.identity(P)) for k in (0, 1)
    ]
    assert best_ridge(*noise) == pooled_statistics.RIDGES[-1]
    grid = (1e-4, 0.1, 1.0)
    losses = [noise[1].loss(noise[0].solve(ridge)) for ridge in grid]
    assert best_ridge(*noise, grid) == grid[int(np.argmin(losses))]


def test_a_ridge_too_small_is_said_so_and_passed_over():
    """Sums that float32 has rounded need not be inner products of anything."""
    z = torch.ones(N, 2).double()
    sums = statistics(z)
    sums.gram[1] += 1.0  # |<a, b>| is above |a||b|
    broken = NormalEquations.of(sums, Normaliser.identity(2))
    refused("ridge = 1e-06 is too small for these features; raise it", broken.solve, 1e-6)
    assert best_ridge(broken, broken, (1e-6, 1.0)) == 1.0
    refused(r"none of 1e-09 \.\.\. 1e-06 has a solution", best_ridge, broken, broken, (1e-9, 1e-6))


def test_sizes_are_refused_before_they_are_allocated(monkeypatch):
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 100)
    refused(r"GB .* lower num_features", statistics, features(), error=NotEnoughMemory)


def test_what_does_not_fit_together_is_refused():
    z, w = features(), np.ones(C)
    for size, labels in ((N, LABELS[1:]), (N - 1, LABELS)):
        refused(f"labels: {len(labels)} of them for", statistics, z[:size], labels)
    with pytest.raises(ValueError, match="class_weights: expected whole numbers"):
        statistics(z, weights=w + 0.5, fixed_point=FixedPoint.of(z, 8))
    with pytest.raises(ValueError, match="weights: expected the same"):
        statistics(z) + statistics(z, weights=2 * w)
    refused(r"bits: expected 2 \.\.\. 8, got 9", FixedPoint.of, z, 9)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("deficient", [False, True])
@pytest.mark.parametrize("weight", [1, 1e15])
def test_least_norm_is_the_pseudo_inverse_on_the_rows(bias, deficient, weight):
    """With two equal features and a zero one the matrix is singular; one weight changes nothing.

    The rows' condition number, without these, is below 100: 1e4 for the matrix, 1e-12 rounded.
    """
    z = random(N, P, seed=2)
    if deficient:
        z[:, 3], z[:, 5] = z[:, 2], 0
    sums = statistics(z, weights=np.full(C, float(weight)))
    actual = NormalEquations.of(sums, Normaliser.identity(P), bias=bias, centred=False)
    rows = torch.cat([z, torch.ones(N, 1)], 1) if bias else z
    expected = torch.linalg.pinv(rows.double(), rtol=1e-10) @ one_hot(LABELS, C).double()
    np.testing.assert_allclose(actual.least_norm(), expected, rtol=1e-9, atol=1e-11)


def group(n: int, seed: int, shift: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of a problem that the client has, but for a shift in others'."""
    z, noise = random(n, P, seed=seed), random(n, C, seed=seed + 1)
    linear = random(P, C, seed=9) + shift * random(P, C, seed=8)
    return z, (z @ linear + noise).argmax(1)


OTHERS, OWN, HELD = group(60, 0), group(30, 2, 0), group(10, 4, 0)
CLIENT = SplitStatistics(statistics(*OWN), statistics(*HELD))
TOTAL = SplitStatistics(statistics(*OTHERS) + CLIENT.fitting, CLIENT.held_out)


def rows_of(z: torch.Tensor, y: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Features with a bias, and labels minus 1/C."""
    return np.c_[z.numpy(), np.ones(len(z))], np.eye(C)[y] - 1 / C


def solved(parts: list[tuple[float, tuple[torch.Tensor, torch.Tensor]]], ridge: float):
    """Solve with each example's weight, in float64."""
    weight = np.concatenate([np.full(len(y), w) for w, (_, y) in parts])
    z, y = (np.concatenate(part) for part in zip(*(rows_of(*g) for _, g in parts), strict=True))
    rho = ridge * (weight @ np.square(z).sum(1)) / weight.sum()
    return np.linalg.solve((z.T * weight) @ z + rho * np.eye(P + 1), (z.T * weight) @ y)


def test_a_personal_model_solves_the_weighted_problem_that_held_out_examples_choose():
    weights, (z, y) = (0.0, 0.5, 2.0, 20.0), rows_of(*HELD)
    models = [solved([(1, OTHERS), (1 + w, OWN)], 0.1) for w in weights]
    best = weights[int(np.argmin([np.square(z @ linear - y).sum() for linear in models]))]
    assert 0 < best < 20  # neither end is chosen
    linear, weight = personal_model(TOTAL, CLIENT, 0.1, bias=True, weights=weights)
    assert weight == best
    parts = [(1, OTHERS), (1 + best, OWN), (1 + best, HELD)]
    np.testing.assert_allclose(linear, solved(parts, 0.1), rtol=1e-9, atol=1e-11)


def test_limits_of_personal_models_are_the_joint_one_and_the_clients_own():
    """With w = 1.5e7 the others are 60 / (40 w) = 1e-7 of the weight."""
    joint, _ = personal_model(TOTAL, CLIENT, 0.1, bias=True, weights=(0.0,))
    parts = [(1.0, OTHERS), (1.0, OWN), (1.0, HELD)]
    np.testing.assert_allclose(joint, solved(parts, 0.1), rtol=1e-9, atol=1e-11)
    local, _ = personal_model(TOTAL, CLIENT, 1e-9, bias=True, weights=(1.5e7,))
    np.testing.assert_allclose(local, solved(parts[1:], 1e-9), rtol=1e-4, atol=1e-6)
    empty = SplitStatistics(CLIENT.fitting, statistics(OWN[0][:0], OWN[1][:0]))
    assert personal_model(TOTAL, empty, 0.1)[1] == 0


@pytest.mark.parametrize(("p", "num_classes"), [(5, 3), (3, 5)])
def test_deep_afls_omega_solves_the_normal_equations(p, num_classes):
    """vec(F Omega W) = (F kron W^T) vec(Omega), by rows; the condition number is below 1e4."""
    f, r = random(20, 4).double(), random(20, num_classes, seed=1).double()
    w = random(p, num_classes, seed=2).double()
    rho = 0.1 * f.square().sum(1).mean() * w.square().sum(0).mean()
    system = torch.kron(f, w.T.contiguous())
    gram = system.T @ system + rho * torch.eye(4 * p).double()
    expected = torch.linalg.solve(gram, system.T @ r.flatten()).view(4, p)
    actual = sandwiched_ridge(f.T @ f, f.T @ r, w, 0.1, 20)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
