"""Averages from sums of whole numbers: how far rounding moves them, and what is no such sum."""

import numpy as np
import pytest

from fedntk.ntk import BadReply
from fedntk.ntk.averages import weighted_sum
from fedntk.ntk.payloads.masked_average import (
    BESIDE,
    LIMIT,
    STEP,
    average_digest,
    average_of,
    average_words,
)

from ...conftest import refused

EXAMPLES = (7, 1, 40)
MODEL = {
    "w": np.random.default_rng(0).standard_normal((3, 4)),  # float64: shows the rounding
    "count": np.array(5, np.int64),
    "1.running_var": np.zeros(2, np.float32),
    "mask": np.array([-np.inf, 0.0], np.float32),
}
NUMBERS = 12 + 1 + 2 + 2


def trained(client, size=1.0):
    rng = np.random.default_rng(client)
    return MODEL | {
        "w": MODEL["w"] + size * rng.standard_normal((3, 4)),
        "count": MODEL["count"] + 3 * client,
    }


def total(models, losses=(0.5, 1.0, None)):
    every = [average_words(MODEL, *row) for row in zip(models, EXAMPLES, losses, strict=True)]
    return np.sum(every, axis=0, dtype=np.uint64)


def test_the_mean_is_within_the_bound_of_the_one_in_float64():
    """K clients with N examples: K s / (2 N), and a few roundings of float64."""
    models = [trained(k) for k in range(3)]
    mean, metrics = average_of(total(models), MODEL, 3)
    exact = weighted_sum(models, [n / 48 for n in EXAMPLES])
    error = np.abs(mean["w"] - exact["w"]).max()
    assert 0 < error <= 3 * STEP / (2 * 48) + 1e-14
    assert mean["count"] == round(5 + (1 * 3 + 40 * 6) / 48)  # whole numbers are exact
    assert metrics["num-examples"] == 48
    assert metrics["clipped"] == 0
    assert metrics["train-loss"] == pytest.approx((7 * 0.5 + 1.0) / 8, abs=STEP)
    assert mean["mask"].tolist() == [-np.inf, 0.0]  # nobody changed it


def test_a_change_out_of_range_is_clipped_and_counted():
    far = [MODEL | {"w": MODEL["w"] + change} for change in (300.0, -1e9, 255.0)]
    mean, metrics = average_of(total(far), MODEL, 3)
    expected = MODEL["w"] + (7 * 256 - 1 * 256 + 40 * 255) / 48
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
    words = total([trained(k) for k in range(3)])
    words.view(np.int64)[position] = value
    assert len(words) == NUMBERS + BESIDE
    refused("no sums of models", average_of, words, MODEL, 3, error=BadReply)


def test_a_client_refuses_what_it_could_not_send_truly():
    weights = trained(1)
    refused("num-examples: expected 1", average_words, MODEL, weights, 2**24 + 1, None)
    refused("another shape", average_words, MODEL, weights | {"w": weights["w"][1:]}, 1, None)
    bad = weights | {"w": weights["w"] * np.nan}
    refused("expected finite numbers in 'w'", average_words, MODEL, bad, 1, None)


def test_the_digest_depends_on_all_that_clients_are_sent():
    digest = average_digest(MODEL, "run", 1)
    assert digest == average_digest(dict(MODEL), "run", 1)
    other = MODEL | {"w": np.nextafter(MODEL["w"], 9)}
    others = [(other, "run", 1), (MODEL, "other", 1), (MODEL, "run", 2)]
    assert digest not in [average_digest(*row) for row in others]
