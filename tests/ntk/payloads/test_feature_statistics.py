"""Sums over features on the wire: what is exact, and what is refused."""

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply
from fedntk.ntk.features import FixedPoint
from fedntk.ntk.payloads import FeatureStatistics, from_npy, to_npy

N, P, C = 12, 5, 3
LABELS = torch.arange(N) % C
Z = torch.randn(N, P, generator=torch.Generator().manual_seed(0))
FIXED = FixedPoint.of(Z, 8)
WEIGHTS = np.array([1.0, 2.5, 0.1])
WAYS = {"float64": {}, "integers": {"fixed_point": FIXED}, "weighted": {"weights": WEIGHTS}}


def of(way: str) -> FeatureStatistics:
    return FeatureStatistics.of([Z], LABELS, C, **WAYS[way])


def wire(way: str) -> list[np.ndarray]:
    """As the server receives it: arrays that cannot be written to."""
    fixed = WAYS[way].get("fixed_point")
    return [from_npy(to_npy(array)) for array in of(way).to_arrays(fixed)]


def parse(arrays: list[np.ndarray], way: str, n: int = N) -> FeatureStatistics:
    return FeatureStatistics.from_arrays(arrays, n, P, C, **WAYS[way])


@pytest.mark.parametrize("way", sorted(WAYS))
def test_what_arrives_is_what_was_sent(way):
    sent, found = of(way), parse(wire(way), way)
    for name in ("gram", "class_sums", "counts", "weights"):
        assert np.array_equal(getattr(sent, name), getattr(found, name))
    assert found.num_examples == N
    twice = found + found  # of arrays that cannot be written to
    assert np.array_equal(twice.gram, 2 * sent.gram)
    assert found.size == pytest.approx(np.sqrt(np.diag(sent.matrix()).sum() / N))


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sums_of_features_that_are_not_finite_are_refused_where_they_are_formed(way, value):
    """Rounded to integers they would be numbers like any other."""
    features = Z.clone()
    features[3, 1] = value
    with pytest.raises(ValueError, match="features: expected finite numbers"):
        FeatureStatistics.of([features], LABELS, C, **WAYS[way])


def test_integers_are_int32_while_all_sums_fit():
    """n 127^2 < 2^31 up to n = 133,144; what is added up then is int64."""
    arrays = wire("integers")
    assert {a.dtype for a in arrays[:2]} == {np.dtype(np.int32)}
    big = FeatureStatistics(
        np.full(1, 133_143 * 127**2), np.zeros((1, 1), np.int64), np.array([133_143]), np.ones(1)
    )
    fixed = FixedPoint(np.ones(1, np.float32), 8)
    assert big.to_arrays(fixed)[0].dtype == np.int32
    assert big.to_arrays(fixed)[0][0] == big.gram[0]
    assert (big + big).gram.tolist() == [2 * 133_143 * 127**2]
    assert (big + big).to_arrays(fixed)[0].dtype == np.int64
    small = FeatureStatistics.from_arrays(big.to_arrays(fixed), 133_143, 1, 1, fixed_point=fixed)
    assert (small + small).gram.tolist() == [2 * 133_143 * 127**2]  # beyond int32


def changed(position: int, index: object, value: object) -> object:
    def change(arrays: list[np.ndarray]) -> list[np.ndarray]:
        arrays = [a.copy() for a in arrays]
        arrays[position][index] = value
        return arrays

    return change


BAD = {
    "arrays gram": lambda a: a[:2],
    "shape gram": lambda a: [a[0][:-1], *a[1:]],
    "shape class sums": lambda a: [a[0], a[1].T, a[2]],
    "shape counts": lambda a: [*a[:2], a[2][:-1]],
    "dtype gram": lambda a: [a[0].astype(np.float32), *a[1:]],
    "dtype counts": lambda a: [*a[:2], a[2].astype(float)],
    "non-finite gram": changed(0, 1, np.nan),
    "non-finite class sums": changed(1, (0, 0), np.inf),
    "num-examples counts": changed(2, 0, 1),
    "range counts": changed(2, slice(None), [-1, N + 1, 0]),
    "range diagonal": changed(0, 0, -1),
    "range row 0": changed(0, 1, 1e6),
    "range class sums": changed(1, (1, 2), 1e6),
}


@pytest.mark.parametrize("kind", sorted(BAD))
@pytest.mark.parametrize("way", sorted(WAYS))
def test_what_could_be_no_such_sums_is_refused(way, kind):
    if way == "integers" and kind.startswith("non-finite"):
        pytest.skip("whole numbers are finite")
    reason, words = kind.split(" ", 1)
    with pytest.raises(BadReply, match=words) as caught:
        parse(BAD[kind](wire(way)), way)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("place", "words"), [((0, 1), "row 0"), ((1, (1, 2)), "class sums")])
def test_the_least_integer_is_no_small_one(place, words):
    """Its absolute value, in its own type, is itself: negative."""
    arrays = wire("integers")
    least = np.iinfo(arrays[place[0]].dtype).min
    with pytest.raises(BadReply, match=words):
        parse(changed(*place, least)(arrays), "integers")


def test_integers_beyond_what_examples_can_add_up_to_are_refused():
    with pytest.raises(BadReply, match=r"expected a diagonal of 0 \.\.\. 193548, got"):
        parse(changed(0, 0, N * 127**2 + 1)(wire("integers")), "integers")


def test_counts_must_be_those_that_are_claimed():
    with pytest.raises(BadReply, match="claims 13, counts 12"):
        parse(wire("float64"), "float64", n=13)


def test_counts_that_overflow_are_refused():
    """2^63 + 2^63 + n is n in int64."""
    arrays = wire("float64")
    arrays[2] = np.array([2**62, 2**62, 2**63 - 1], np.int64)
    with pytest.raises(BadReply, match="counts"):
        parse(arrays, "float64")


@pytest.mark.parametrize("step", [np.ones(P), np.ones(P - 1, "f4"), np.full(P, 0.3, "f4"),
                                  np.full(P, -0.5, "f4"), np.full(P, np.nan, "f4")])  # fmt: skip
def test_steps_are_powers_of_two(step):
    with pytest.raises(BadReply):
        FixedPoint.from_arrays(step, 8, P)
    assert FixedPoint.from_arrays(FIXED.step, 8, P).bits == 8
