"""What all models hold alike stays to the bit in every mean; whole numbers are rounded exactly."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from fedntk.ntk import BadReply
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
from fedntk.ntk.payloads.masked_average import (
    BESIDE,
    LIMIT,
    STEP,
    average_digest,
    average_of,
    average_words,
)
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.robust_averages import robust_mean, screen_by_loss

from ..conftest import refused

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


# sums of whole numbers under masks, of which the server needs only the mean
SIZES = (7, 1, 40)
GLOBAL = {
    "w": np.random.default_rng(0).standard_normal((3, 4)),  # float64: shows the rounding
    "count": np.array(5, np.int64),
    "1.running_var": np.zeros(2, np.float32),
    "mask": np.array([-np.inf, 0.0], np.float32),
}
NUMBERS = 12 + 1 + 2 + 2


def trained(client, size=1.0):
    rng = np.random.default_rng(client)
    return GLOBAL | {
        "w": GLOBAL["w"] + size * rng.standard_normal((3, 4)),
        "count": GLOBAL["count"] + 3 * client,
    }


def words_of(models, losses=(0.5, 1.0, None)):
    every = [average_words(GLOBAL, *row) for row in zip(models, SIZES, losses, strict=True)]
    return np.sum(every, axis=0, dtype=np.uint64)


def test_the_mean_is_within_the_bound_of_the_one_in_float64():
    """K clients with N examples: K s / (2 N), and a few roundings of float64."""
    models = [trained(k) for k in range(3)]
    mean, metrics = average_of(words_of(models), GLOBAL, 3)
    exact = weighted_sum(models, [n / 48 for n in SIZES])
    error = np.abs(mean["w"] - exact["w"]).max()
    assert 0 < error <= 3 * STEP / (2 * 48) + 1e-14
    assert mean["count"] == round(5 + (1 * 3 + 40 * 6) / 48)  # whole numbers are exact
    assert metrics["num-examples"] == 48
    assert metrics["clipped"] == 0
    assert metrics["train-loss"] == pytest.approx((7 * 0.5 + 1.0) / 8, abs=STEP)
    assert mean["mask"].tolist() == [-np.inf, 0.0]  # nobody changed it


def test_a_change_out_of_range_is_clipped_and_counted():
    far = [GLOBAL | {"w": GLOBAL["w"] + change} for change in (300.0, -1e9, 255.0)]
    mean, metrics = average_of(words_of(far), GLOBAL, 3)
    expected = GLOBAL["w"] + (7 * 256 - 1 * 256 + 40 * 255) / 48
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-9)
    assert metrics["clipped"] == 2 * 12


def test_the_largest_sums_fit_in_64_bits():
    """2^24 examples a client, all out of range: 2,047 clients' sums are below 2^63."""
    most = average_words({"w": np.zeros(1)}, {"w": np.full(1, 1e9)}, 2**24, None)
    mean, metrics = average_of(most * np.uint64(2047), {"w": np.zeros(1)}, 2047)
    assert mean["w"] == LIMIT * STEP
    assert metrics["num-examples"] == 2047 * 2**24
    more = most * np.uint64(2048), {"w": np.zeros(1)}, 2048
    refused("no sums of models", average_of, *more, error=BadReply)


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, 2**40), (-4, 2), (-4, -1), (-4, 2**40), (-3, -1), (-2, 49), (-2, -1), (-1, 2**60)],
)
def test_what_is_no_sum_of_models_is_refused(position, value):
    """Numbers, examples, clipped, examples with a loss, losses."""
    words = words_of([trained(k) for k in range(3)])
    words.view(np.int64)[position] = value
    assert len(words) == NUMBERS + BESIDE
    refused("no sums of models", average_of, words, GLOBAL, 3, error=BadReply)


def test_a_client_refuses_what_it_could_not_send_truly():
    weights = trained(1)
    refused("num-examples: expected 1", average_words, GLOBAL, weights, 2**24 + 1, None)
    refused("another shape", average_words, GLOBAL, weights | {"w": weights["w"][1:]}, 1, None)
    bad = weights | {"w": weights["w"] * np.nan}
    refused("expected finite numbers in 'w'", average_words, GLOBAL, bad, 1, None)


def test_the_digest_depends_on_all_that_clients_are_sent():
    digest = average_digest(GLOBAL, "run", 1)
    assert digest == average_digest(dict(GLOBAL), "run", 1)
    other = GLOBAL | {"w": np.nextafter(GLOBAL["w"], 9)}
    others = [(other, "run", 1), (GLOBAL, "other", 1), (GLOBAL, "run", 2)]
    assert digest not in [average_digest(*row) for row in others]
