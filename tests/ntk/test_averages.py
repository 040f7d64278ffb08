"""What all models hold alike stays to the bit in every mean; whole numbers are rounded exactly."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from fedntk.ntk.averages import (
    are_finite,
    change_size,
    convex_combination,
    equal_mean,
    masked_mean,
    mixtures,
    moving_mean,
    weighted_mean,
    weighted_sum,
)
from fedntk.ntk.payloads.masked_average import average_of, average_words
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import robust_mean, screen_by_loss

COUNTS = [3, 17, 29, 7, 11, 5, 13]  # of seven clients; no share of 85 is a binary fraction
SHARES = [count / 85 for count in COUNTS]
generator = np.random.default_rng(0)
FROZEN = {
    "single": generator.standard_normal(200).astype(np.float32),
    "half": generator.standard_normal(200).astype(np.float16),
    "double": generator.standard_normal(200),
    "infinite": np.array([[0.0, -np.inf], [-0.0, np.inf]], np.float32),
    "nan": np.array([np.nan, 0.1]),
    "signed": np.array([-(2**63), 2**53 + 1, 2**61 - 1, 2**63 - 1]),
    "unsigned": np.array([2**64 - 1, 2**53 + 1], np.uint64),
    "bytes": np.array([255, 254], np.uint8),
    "mask": np.array([True, False]),
    "complex": np.exp(1j * np.arange(9)).astype(np.complex64),
    "wide": np.exp(1j * np.arange(9)),
    "scalar": np.array(0.1, np.float32),
    "big scalar": np.array(2**61 - 1),
    "empty": np.zeros((0, 3)),
}
MODELS = [  # beside a weight that all train, but for one of its numbers
    {**FROZEN, "w": np.append(generator.standard_normal(5), -0.0)} for _ in COUNTS
]


BEFORE = FROZEN | {"w": np.append(np.zeros(5), -0.0)}


def masked(models):
    pairs = zip(models, COUNTS, strict=True)
    words = sum(average_words(BEFORE, model, n, None) for model, n in pairs)
    return average_of(words, BEFORE, len(models))[0]


def moving(models):
    mean = None
    for k, model in enumerate(models):
        mean = moving_mean(mean, model, 1 / (k + 1))
    return mean


MEANS = {
    "weighted_mean": lambda models: weighted_mean(models, COUNTS),
    "weighted_sum": lambda models: weighted_sum(models, SHARES),
    "equal_mean": equal_mean,
    "convex_combination": lambda models: convex_combination(models, SHARES),
    "moving_mean": moving,
    "mixtures": lambda models: next(mixtures(np.array([SHARES]), models)),
    "masked_mean": lambda models: masked_mean(
        models, [{"double": np.ones(200, bool)} for _ in models], SHARES
    ),
    "under masks": masked,
    **{
        rule: partial(lambda rule, models: robust_mean(BEFORE, models, COUNTS, rule, 1), rule)
        for rule in ("median", "trimmed-mean", "krum", "multi-krum", "bulyan", "nnm", "norm-bound")
    },
}


@pytest.mark.parametrize("name", MEANS)
def test_what_all_models_hold_alike_stays_to_the_bit(name):
    mean = MEANS[name](MODELS)
    assert list(mean) == list(MODELS[0])
    for array, frozen in FROZEN.items():
        actual = np.asarray(mean[array])
        assert actual.shape == frozen.shape
        assert actual.astype(frozen.dtype).tobytes() == frozen.tobytes(), array
    assert np.signbit(mean["w"][-1])  # -0.0, in an array that else changed
    assert mean["w"][:-1].all()


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "bulyan", "nnm"])
def test_one_false_model_does_not_move_what_all_others_left(rule):
    false = {**MODELS[0], "double": FROZEN["double"] + 1e9}
    mean = robust_mean(BEFORE, [*MODELS[1:], false], COUNTS, rule, 1)
    assert mean["double"].tobytes() == FROZEN["double"].tobytes()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.uint8, np.int32])
def test_whole_numbers_become_the_nearest_to_their_exact_mean(dtype):
    """Oracle: fractions; ``round`` gives halves the even number, as the docstring says."""
    limits = np.iinfo(dtype)
    far = min(2**40, int(limits.max) // 2)
    starts = [limits.min, limits.max - far, (limits.max + 1) // 2 - far // 2]
    for start in map(int, starts):
        draws = generator.integers(0, far, (6, 50)).tolist()
        models = [{"k": np.array([start + shift for shift in shifts], dtype)} for shifts in draws]
        for counts in (COUNTS[:-1], [1] * 6):  # of six equal ones, many means end in a half
            actual = weighted_mean(models, counts)["k"]
            for i, number in enumerate(actual):
                pairs = zip(models, counts, strict=True)
                exact = Fraction(sum(int(shifts["k"][i]) * n for shifts, n in pairs), sum(counts))
                assert number == round(exact)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numbers_at_both_ends_have_a_mean_between_them(dtype):
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    ends = [{"k": np.array([end], dtype)} for end in (low, high)]
    for counts in ([1, 1], [1, 10**6], [10**6, 1]):
        mean = int(weighted_mean(ends, counts)["k"][0])
        exact = Fraction(low * counts[0] + high * counts[1], sum(counts))
        assert low <= mean <= high
        assert abs(mean - exact) <= 2**12  # differences of 2^64 in float64


def test_booleans_go_by_the_larger_share():
    models = [{"m": np.array([a, b])} for a, b in ((True, True), (False, True), (False, False))]
    assert weighted_mean(models, [2, 1, 1])["m"].tolist() == [False, True]  # a tie; three quarters


def test_a_mask_of_infinity_does_not_switch_screening_off():
    """inf - inf is no distance, and of sizes that are NaN none is an outlier."""
    far = {**MODELS[0], "w": MODELS[0]["w"] + 1e6}
    verdicts = screen_changes(BEFORE, [*MODELS, far])
    assert [bad is None for bad in verdicts] == [True] * len(MODELS) + [False]
    assert np.isfinite(change_size(BEFORE, far))
    assert np.isinf(change_size({"w": np.zeros(2)}, {"w": np.array([0.0, np.inf])}))
    false = [{**model, "w": model["w"] + 100 * (k == 2)} for k, model in enumerate(MODELS)]
    assert abs(robust_mean(BEFORE, false, COUNTS, "krum", 1)["w"]).max() < 10


def test_the_validation_loss_is_of_frozen_arrays_as_they_are():
    def loss(arrays):
        for name, frozen in FROZEN.items():
            assert np.asarray(arrays[name]).astype(frozen.dtype).tobytes() == frozen.tobytes(), name
        return float(np.square(arrays["w"]).sum())

    false = {**MODELS[0], "w": MODELS[0]["w"] + 1e3}
    verdicts = screen_by_loss([*MODELS[1:], false], COUNTS, loss, 1)
    assert [bad is None for bad in verdicts] == [True] * 6 + [False]


def test_what_was_infinite_before_may_stay_so():
    assert are_finite(MODELS[0], BEFORE)
    assert not are_finite({"w": np.array([np.inf])}, {"w": np.zeros(1)})
    assert not are_finite({"w": np.array([np.inf])}, {"w": np.array([-np.inf])})
