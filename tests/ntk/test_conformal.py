"""Split-conformal sets: the coverage that theory gives, small cases by hand, what is refused."""

import numpy as np
import pytest
import torch
from scipy.stats import betabinom

from fedntk.ntk import calibrate, conformal_scores, examples_needed, prediction_sets
from fedntk.ntk.predictors.conformal import rank

from ..conftest import refused

SCORES = ["threshold", "adaptive"]


def exchangeable(n, seed, *, sharpness=1.0, classes=5):
    """Independent examples: probabilities of a model, and labels drawn from other probabilities.

    The model is wrong on purpose: its logits are `sharpness` times those that the labels come
    from, and noise. All scores differ with probability 1.
    """
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(n, classes))
    truth = np.exp(2 * logits)
    truth /= truth.sum(1, keepdims=True)
    labels = (generator.random(n)[:, None] > truth.cumsum(1)).sum(1).clip(max=classes - 1)
    model = torch.from_numpy(sharpness * logits + generator.normal(size=(n, classes)))
    return model.softmax(1), torch.from_numpy(labels), torch.from_numpy(generator.random(n))


def covered(score, coverage, n, m, seed, **options):
    """Number of m new examples whose set holds their class, with n to calibrate on."""
    p, labels, draws = exchangeable(n + m, seed, **options)
    draws = draws if score == "adaptive" else None
    parts = [None, None] if draws is None else [draws[:n], draws[n:]]
    q = calibrate(p[:n], labels[:n], coverage, score=score, draws=parts[0])
    sets = prediction_sets(p[n:], q, score=score, draws=parts[1])
    return int(sets.gather(1, labels[n:, None]).sum())


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((0.9, 40, -3.0), (0.6, 25, 1.0))]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("coverage", "n", "sharpness"), [(0.9, 40, 1.0), (0.6, 25, -3.0), *SLOW])
def test_coverage_is_that_of_theory_whatever_the_model(score, coverage, n, sharpness):
    """Of m = 50 new examples BetaBinomial(m, k, n + 1 - k) are covered: see the module.

    400 independent draws. Their mean is within 5 standard errors of m k / (n + 1), which fails by
    chance once in 1.7 million normal draws. And their distribution function is within 0.1 of that
    of theory everywhere: by the inequality of Dvoretzky, Kiefer and Wolfowitz it is further off
    with probability at most 2 exp(-2 400 0.1^2) = 7e-4; the seeds are fixed.
    """
    m, draws = 50, 400
    k = rank(n, coverage)
    actual = np.array(
        [covered(score, coverage, n, m, s, sharpness=sharpness) for s in range(draws)]
    )
    theory = betabinom(m, k, n + 1 - k)
    assert abs(actual.mean() - m * k / (n + 1)) < 5 * theory.std() / np.sqrt(draws)
    steps = np.arange(m + 1)
    empirical = (actual[:, None] <= steps).mean(0)
    assert np.abs(empirical - theory.cdf(steps)).max() < 0.1
    assert coverage <= k / (n + 1) <= coverage + 1 / (n + 1)


@pytest.mark.parametrize(("score", "drawn"), [("threshold", 0), ("adaptive", 0), ("adaptive", 1)])
def test_scores_thresholds_and_sets_are_a_loop_in_float64(score, drawn):
    """Sums of at most 6 numbers below 1, in two orders: 6 roundings of 1.1e-16 each way."""
    p, labels, draws = exchangeable(60, 3, classes=6)
    p = p.float()
    options = {"score": score, "draws": draws if drawn else None}
    share = draws.numpy() if drawn else np.ones(60)
    expected = np.empty((60, 6))
    for i, row in enumerate(p.double().numpy()):
        for y in range(6):
            above = sum(row[c] for c in range(6) if row[c] > row[y])
            adaptive = min(1, above + share[i] * row[y])
            expected[i, y] = 1 - row[y] if score == "threshold" else adaptive
    actual = conformal_scores(p, **options)
    assert actual.dtype == torch.float64
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=2e-15)
    ordered = np.sort(expected[np.arange(60), labels.numpy()])
    for coverage in (0.1, 0.5, 0.77, 0.9, 0.98):
        q = calibrate(p, labels, coverage, **options)
        assert q == pytest.approx(ordered[int(np.ceil(61 * coverage)) - 1], abs=2e-15)
        assert torch.equal(prediction_sets(p, q, **options), actual <= q)


@pytest.mark.parametrize("coverage", [0.01, 0.7, 0.9, 0.999])
def test_too_few_examples_say_how_many_are_needed(coverage):
    assert [rank(99, c / 100) for c in range(1, 100)] == list(range(1, 100))  # 0.07 x 100 > 7
    needed = examples_needed(coverage)
    p, labels = torch.full((needed, 2), 0.5), torch.zeros(needed, dtype=torch.int64)
    calibrate(p, labels, coverage)
    wrong = f"{coverage} needs at least {needed} calibration examples, got {needed - 1}; hold out"
    refused(wrong, calibrate, p[1:], labels[1:], coverage)


P, LABELS = torch.full((20, 4), 0.25), torch.arange(20) % 4
ADAPTIVE = {"score": "adaptive", "draws": torch.ones(3)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibrate(P, LABELS, 1.0), "coverage: expected a number between 0 and 1, got 1.0"),
        (lambda: calibrate(4 * P, LABELS, 0.5), "take the softmax"),
        (lambda: calibrate(P[0], LABELS, 0.5), r"expected shape \(n, C\)"),
        (lambda: calibrate(P, LABELS / 2, 0.5), "labels: expected 20 whole numbers"),
        (lambda: calibrate(P, LABELS + 1, 0.5), r"labels: expected 0 ... 3, got 1 ... 4"),
        (lambda: prediction_sets(P, 0.5, score="best"), "score: expected one of threshold, adapt"),
        (lambda: prediction_sets(P, 0.5, draws=torch.ones(20)), "draws: expected none"),
        (lambda: prediction_sets(P, 0.5, **ADAPTIVE), r"draws: expected 20 .*, got shape \(3,\)"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    refused(message, call)
