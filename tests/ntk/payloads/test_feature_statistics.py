"""Sums over features on the wire: what is exact, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads import feature_statistics
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.payloads.npy import from_npy, to_npy
from fedntk.ntk.payloads.split_statistics import SplitStatistics, draw_held_out

from ...conftest import refused

N, P, C = 12, 5, 3
LABELS = torch.arange(N) % C
Z = torch.randn(N, P, generator=torch.Generator().manual_seed(0))
Z9 = torch.randn(N, 9, generator=torch.Generator().manual_seed(0))
FIXED = FixedPoint.of(Z, 8)
WEIGHTS = np.array([1.0, 2.5, 0.1])
Arrays = dict[str, np.ndarray]
WHOLE = np.array([1.0, 10_000.0, 3.0])
WAYS = {
    "float64": {},
    "integers": {"fixed_point": FIXED},
    "weighted": {"weights": WEIGHTS},
    "weighted integers": {"fixed_point": FIXED, "weights": WHOLE},
}


def of(way: str) -> FeatureStatistics:
    return FeatureStatistics.of([Z], LABELS, C, **WAYS[way])


def wire(way: str) -> Arrays:
    """As the server receives it: arrays that cannot be written to."""
    fixed = WAYS[way].get("fixed_point")
    return {name: from_npy(to_npy(array)) for name, array in of(way).to_arrays(fixed).items()}


def parse(arrays: Arrays, way: str) -> FeatureStatistics:
    return FeatureStatistics.from_arrays(arrays, SumFormat(P, C, **WAYS[way]), N)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_what_arrives_is_what_was_sent(way):
    sent, actual = of(way), parse(wire(way), way)
    for name in ("gram", "class_sums", "counts", "weights"):
        assert np.array_equal(getattr(sent, name), getattr(actual, name))
    assert np.array_equal((actual + actual).gram, 2 * sent.gram)
    mean_square = np.diag(sent.matrix()).sum() / (sent.counts @ sent.weights)
    assert actual.size == pytest.approx(np.sqrt(mean_square))


def test_the_sums_of_few_examples_travel_as_a_root_that_tells_no_more():
    """n <= p / 2. Rotated examples have the same Z^T Z, and give the same root, to rounding."""
    z = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).double()
    rotation, _ = torch.linalg.qr(z[:, :4])
    actual, more, whole = (
        FeatureStatistics.of([part], LABELS[: len(part)], C) for part in (z, rotation @ z, Z9)
    )
    assert actual.gram.shape == (4, 9)
    for stats, parts in ((actual, [z]), (actual + actual, [z, z]), (actual + whole, [z, Z9])):
        part = torch.cat(parts).double()
        np.testing.assert_allclose(stats.matrix(), part.T @ part, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(stats.diagonal, part.square().sum(0), rtol=1e-12)
    np.testing.assert_allclose(more.gram, actual.gram, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose((actual + whole - actual).gram, whole.gram, rtol=1e-12, atol=1e-12)
    again = FeatureStatistics.from_arrays(actual.to_arrays(), SumFormat(9, C), 4)
    assert again.gram.tobytes() == actual.gram.tobytes()
    with pytest.raises(BadReply, match=r"gram: expected \(5, 9\)|claims 5, counts 4"):
        FeatureStatistics.from_arrays(actual.to_arrays(), SumFormat(9, C), 5)


def test_a_root_does_not_tell_in_which_directions_alike_examples_lie():
    """Orthogonal examples of one norm: any rotation of them has the same Z^T Z, 4 I."""
    z = torch.zeros(4, 9, dtype=torch.float64)
    z[:, ::2][:, :4] = 2 * torch.eye(4)
    turn = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=torch.float64)
    rotated = torch.block_diag(turn, turn.flip(0)) @ z
    roots = [FeatureStatistics.of([statistics], LABELS[:4], C).gram for statistics in (z, rotated)]
    np.testing.assert_allclose(*roots, atol=1e-14)


FEW, MANY = 5, 20  # examples, features: n <= p / 4
GRID = FixedPoint(np.ones(MANY, np.float32), 8)
ROWS = {
    "random": torch.randn(FEW, MANY, generator=torch.Generator().manual_seed(2)) * 40,
    "dependent": torch.arange(MANY).repeat(FEW, 1) - 9.0,
    "orthogonal": 2 * torch.eye(MANY)[3 : 3 + FEW],
    "largest": torch.full((FEW, MANY), -127.0).triu(),
    "nearly dependent": torch.full((FEW, MANY), 127.0) - torch.eye(MANY)[:FEW],
    "zero": torch.zeros(FEW, MANY),
    "none": torch.zeros(0, MANY),
}


def whole(rows: torch.Tensor) -> FeatureStatistics:
    return FeatureStatistics.of([rows], LABELS[: len(rows)], C, fixed_point=GRID)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("weights", [[1.0, 3.0, 2.0], [10_000.0, 1.0, 7.0]])
def test_a_row_of_class_c_counts_w_c_times(weights, bits):
    """To the bit, as if it was there so often; in int32 if any such sums of n rows fit."""
    fixed, w = FixedPoint.of(Z, bits), np.array(weights)
    often = torch.from_numpy(w)[LABELS].long()
    rows, labels = Z.repeat_interleave(often, 0), LABELS.repeat_interleave(often)
    expected = FeatureStatistics.of(rows.split(999), labels, C, fixed_point=fixed)
    actual = FeatureStatistics.of(Z.split(7), LABELS, C, weights=w, fixed_point=fixed)
    for name in ("gram", "class_sums"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name))
    assert actual.counts.tolist() == [4, 4, 4]
    assert actual.size == pytest.approx(expected.size)
    fits = N * max(weights) * fixed.largest**2 < 2**31
    assert actual.gram.dtype == (np.int32 if fits else np.int64)
    some = actual - FeatureStatistics.of([Z[:5]], LABELS[:5], C, weights=w, fixed_point=fixed)
    rest = FeatureStatistics.of([Z[5:]], LABELS[5:], C, weights=w, fixed_point=fixed)
    assert np.array_equal(some.to_words(np.uint64), rest.to_words(np.uint64))


def test_weights_with_which_sums_would_not_be_exact_are_refused():
    for weights in ([1.0, 2.5, 1.0], [1.0, 0.0, 1.0], [1.0, 10_001.0, 1.0], [1.0, np.nan, 1.0]):
        words = r"class_weights: expected whole numbers of 1 ... 10000.*for 1, 2.5 take 2, 5"
        options = {"weights": np.array(weights), "fixed_point": FIXED}
        refused(words, FeatureStatistics.of, [Z], LABELS, C, **options)
    words = "weights: expected those of 3 classes"
    refused(words, FeatureStatistics.of, [Z], LABELS, C, weights=np.ones(2))


@pytest.mark.parametrize("n", [5, 13, 14])
def test_weighted_whole_numbers_of_few_examples_come_back(n):
    """From a root up to n = 13, with sums below 2^31; a larger product may be off by over 1/4."""
    rows = torch.randn(n, 4 * n, generator=torch.Generator().manual_seed(n)) * 60
    labels, grid = torch.arange(n) % C, FixedPoint(np.ones(4 * n, np.float32), 8)
    sums = FeatureStatistics.of([rows], labels, C, weights=WHOLE, fixed_point=grid)
    arrays = sums.to_arrays(grid)
    assert (arrays["gram"].ndim, sums.gram.dtype) == ((2, np.int32) if n < 14 else (1, np.int64))
    again = FeatureStatistics.from_arrays(arrays, SumFormat(4 * n, C, WHOLE, grid), n)
    assert again.gram.tobytes() == sums.gram.tobytes()


@pytest.mark.parametrize("kind", ROWS)
def test_whole_numbers_of_few_examples_come_back_from_a_root_of_their_sums(kind):
    """Examples in another order, with other signs, have the same sums and the same root."""
    statistics, turned = whole(ROWS[kind]), whole(-ROWS[kind].flip(0))
    sent = statistics.to_arrays(GRID)
    assert sent["gram"].shape == ROWS[kind].shape
    assert sent["gram"].nbytes < statistics.to_arrays(GRID, packed=True)["gram"].nbytes
    assert sent["gram"].tobytes() == turned.to_arrays(GRID)["gram"].tobytes()
    expected = SumFormat(MANY, C, fixed_point=GRID)
    for arrays in (sent, statistics.to_arrays(GRID, packed=True)):
        actual = FeatureStatistics.from_arrays(arrays, expected)
        assert actual.gram.dtype == statistics.gram.dtype == np.int32
        assert actual.gram.tobytes() == statistics.gram.tobytes()


def test_a_root_that_would_not_give_the_sums_back_is_not_sent(monkeypatch):
    """Nor that of a matrix that is none of inner products, as a hostile client's may be."""
    statistics = whole(ROWS["random"])
    negative = replace(statistics, gram=-statistics.gram)
    assert np.array_equal(negative.to_arrays(GRID)["gram"], negative.gram)
    root = statistics.to_arrays(GRID)["gram"]
    for off in (root * np.sqrt(2), root * 1.001, root * np.nan):
        monkeypatch.setattr(feature_statistics, "_root", lambda *_, off=off: off)
        assert np.array_equal(statistics.to_arrays(GRID)["gram"], statistics.gram)


@pytest.mark.parametrize("kind", [*ROWS, "blocks of pivots"])
def test_a_root_from_examples_is_that_from_their_sums(kind, monkeypatch):
    """To the bit, as products of whole numbers are exact; sums are packed if it does not fit."""
    rows = ROWS.get(kind, torch.randn(150, 600, generator=torch.Generator().manual_seed(3)) * 40)
    labels, grid = torch.arange(len(rows)) % C, FixedPoint(np.ones(rows.shape[1], np.float32), 8)
    sums, direct = (
        FeatureStatistics.of([rows], labels, C, fixed_point=grid, as_root=as_root)
        for as_root in (False, True)
    )
    sent = sums.to_arrays(grid)
    assert sent["gram"].shape == direct.gram.shape == rows.shape
    for name, array in direct.to_arrays(grid).items():
        assert array.dtype == sent[name].dtype
        assert array.tobytes() == sent[name].tobytes()
    if len(rows) and rows.any():
        monkeypatch.setattr(feature_statistics, "_root", lambda *_: sent["gram"] * 2)
        more = FeatureStatistics.of([rows], labels, C, fixed_point=grid, as_root=True)
        assert more.to_arrays(grid)["gram"].tobytes() == sums.gram.tobytes()


UNEVEN = np.outer(np.eye(FEW)[0], [0.2**0.5, 14 / 0.2**0.5, *np.zeros(MANY - 2)])
BAD_ROOTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "non-finite got NaN": lambda root: root * np.nan,
    "non-finite got NaN or infinity": lambda root: np.where(root == root.max(), np.inf, root),
    "scale magnitudes": lambda root: root * 1e200,
    "range whole numbers in range": lambda root: root * 1e100,
    "range whole": lambda root: root * 100,  # whole, and beyond n 127^2
    "range numbers": lambda root: root * 1.001,
    "dtype gram: expected float64": lambda root: root.astype(np.float32),
    "dtype gram: expected float64, got int64": lambda root: np.rint(root).astype(np.int64),
    r"shape gram: expected \(5, 20\)": lambda root: root[:-1],
    r"shape gram: expected \(5, 20\), got \(20, 5\)": lambda root: root.T,
    r"shape gram: expected \(210,\)": lambda root: root[None],
    # squares of 0.2, which is 0, and of 980, and the product of both: 14
    "range row 0": lambda root: UNEVEN,
    "range class sums": lambda root: np.eye(*root.shape),
}


@pytest.mark.parametrize("kind", BAD_ROOTS)
def test_what_is_no_root_of_whole_numbers_is_refused(kind):
    reason, words = kind.split(" ", 1)
    arrays = whole(ROWS["random"]).to_arrays(GRID)
    arrays["gram"] = BAD_ROOTS[kind](arrays["gram"])
    with pytest.raises(BadReply, match=f"^{reason}: .*{words}"):
        FeatureStatistics.from_arrays(arrays, SumFormat(MANY, C, fixed_point=GRID))
    # a root of more examples has more bytes than the integers
    arrays = whole(torch.cat([ROWS["random"], ROWS["zero"][:1]])).to_arrays(GRID)
    assert arrays["gram"].shape == (210,)
    arrays["gram"] = np.zeros((6, MANY))
    with pytest.raises(BadReply, match=r"gram: expected \(210,\), got \(6, 20\)"):
        FeatureStatistics.from_arrays(arrays, SumFormat(MANY, C, fixed_point=GRID))


def test_sums_of_features_that_are_not_finite_are_refused_where_they_are_formed():
    """Rounded to integers they would be numbers like any other."""
    for options in WAYS.values():
        words = "features: expected finite numbers"
        refused(words, FeatureStatistics.of, [Z * np.nan], LABELS, C, **options)


def test_integers_are_int32_while_all_sums_fit():
    """n 127^2 < 2^31 up to n = 133,144; what is added up then is int64."""
    arrays = wire("integers")
    assert arrays["gram"].dtype == arrays["class-sums"].dtype == np.int32
    big = FeatureStatistics(
        np.full(1, 133_143 * 127**2), np.zeros((1, 1), np.int64), np.array([133_143]), np.ones(1)
    )
    fixed = FixedPoint(np.ones(1, np.float32), 8)
    sent = big.to_arrays(fixed)
    assert (sent["gram"].dtype, sent["gram"][0]) == (np.int32, big.gram[0])
    assert (big + big).gram.tolist() == [2 * 133_143 * 127**2]
    assert (big + big).to_arrays(fixed)["gram"].dtype == np.int64
    small = FeatureStatistics.from_arrays(sent, SumFormat(1, 1, fixed_point=fixed))
    assert (small + small).gram.tolist() == [2 * 133_143 * 127**2]  # beyond int32


def test_words_of_a_secure_sum_are_the_integers_and_beyond_them_refused():
    """2^32 more is no other number in int32, in which sums over so few examples fit."""
    statistics = of("integers")
    words = statistics.to_words(np.uint64)
    expected = SumFormat(P, C, fixed_point=FIXED)
    actual = FeatureStatistics.from_words(words, expected, N)
    assert np.array_equal(actual.to_words(np.uint64), words)
    assert actual.class_sums.shape == (C, P)
    words[1] += np.uint64(2**32)
    refused("do not fit in int32", FeatureStatistics.from_words, words, expected, N, error=BadReply)


def changed(name: str, index: object, value: object) -> Callable[[Arrays], Arrays]:
    def change(arrays: Arrays) -> Arrays:
        arrays = {key: a.copy() for key, a in arrays.items()}
        arrays[name][index] = value
        return arrays

    return change


BAD: dict[str, Callable[[Arrays], Arrays]] = {
    "arrays gram": lambda a: {"gram": a["gram"], "counts": a["counts"]},
    "arrays class-sums": lambda a: a | {"more": a["gram"]},
    "shape gram": lambda a: a | {"gram": a["gram"][:-1]},
    "shape class sums": lambda a: a | {"class-sums": a["class-sums"].T},
    "shape counts": lambda a: a | {"counts": a["counts"][:-1]},
    "dtype gram": lambda a: a | {"gram": a["gram"].astype(np.float32)},
    "dtype counts": lambda a: a | {"counts": a["counts"].astype(float)},
    "non-finite gram": changed("gram", 1, np.nan),
    "non-finite class sums": changed("class-sums", (0, 0), np.inf),
    "num-examples counts": changed("counts", 0, 1),
    # 2^64 + 12 is 12 in int64
    "num-examples claims 12, counts": changed(
        "counts", slice(None), [2**62 + 6, 2**62 + 7, 2**63 - 1]
    ),
    "range counts": changed("counts", slice(None), [-1, N + 1, 0]),
    "range diagonal": changed("gram", 0, -1),
    "range row 0": changed("gram", 1, 1e6),
    "range class sums": changed("class-sums", (1, 2), 1e6),
}


# the absolute value of the least integer, in its own type, is itself: negative
BAD_INTEGERS = {
    "range row 0": changed("gram", 1, np.iinfo(np.int32).min),
    "range class sums": changed("class-sums", (1, 2), np.iinfo(np.int32).min),
    "range expected a diagonal of 0 ... 193548": changed("gram", 0, N * 127**2 + 1),
    # the Gram matrix would allow 440, but one example has 127
    "range the counts": lambda a: changed("class-sums", (0, 0), 200)(
        changed("gram", 0, N * 127**2)(changed("counts", slice(None), [1, 7, 4])(a))
    ),
}
CASES = [("integers", *case) for case in BAD_INTEGERS.items()]
CASES += [("float64", *case) for case in BAD.items()] + [
    ("weighted", *case) for case in BAD.items()
]
CASES += [("integers", k, change) for k, change in BAD.items() if not k.startswith("non-finite")]


@pytest.mark.parametrize(("way", "kind", "change"), CASES)
def test_what_could_be_no_such_sums_is_refused(way, kind, change):
    reason, words = kind.split(" ", 1)
    refused(f"^{reason}: .*{words}", parse, change(wire(way)), way, error=BadReply)


@pytest.mark.parametrize("step", [np.ones(P), np.ones(P - 1, "f4"), np.full(P, 0.3, "f4"),
                                  np.full(P, -0.5, "f4"), np.full(P, np.nan, "f4")])  # fmt: skip
def test_steps_are_powers_of_two(step):
    with pytest.raises(BadReply):
        FixedPoint.from_arrays(step, 8, P)
    assert FixedPoint.from_arrays(FIXED.step, 8, P).bits == 8


def split(held: torch.Tensor, n: int = N, **options: object) -> SplitStatistics:
    fitting = ~held
    return SplitStatistics(
        *(
            FeatureStatistics.of([Z[:n][part]], LABELS[:n][part], C, **options)
            for part in (fitting, held)
        )
    )


HELD = draw_held_out(LABELS, 0.25, [0])
FORMAT = SumFormat(P, C)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("counts", [(20, 20, 20), (1, 1, 1), (57, 2, 0), (0, 0, 2), (1, 30, 4)])
def test_each_class_has_its_share_to_within_one_example(share, counts):
    """round(share n) of n, but at least one: (1/share)-th places of an order by class.

    With m of n places, a class of k examples has floor or ceil of k m / n.
    """
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    total = max(1, round(share * len(labels)))
    for seed in range(20):
        held = draw_held_out(labels, share, [seed])
        assert int(held.sum()) == total
        for label, count in enumerate(counts):
            drawn = int(held[labels == label].sum())
            assert abs(drawn - count * total / len(labels)) < 1


def test_the_draw_depends_on_the_seed_and_of_one_example_on_the_share():
    """A binomial of 2,000: 5 deviations of 0.01."""
    first, same, other = (draw_held_out(LABELS.repeat(4), 0.2, [3, k]) for k in (4, 4, 5))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    drawn = [draw_held_out(torch.zeros(1, dtype=torch.int64), 0.3, [s]) for s in range(2000)]
    assert abs(float(torch.cat(drawn).double().mean()) - 0.3) < 0.05


@pytest.mark.parametrize("way", ["float64", "integers"])
def test_what_travels_in_parts_comes_back_and_both_parts_are_all_examples(way):
    """Integers add up to the same bits; in float64 12 products differ by roundings."""
    fixed = WAYS[way].get("fixed_point")
    arrays = split(HELD, **WAYS[way]).to_arrays(fixed)
    again = SplitStatistics.from_arrays(arrays, SumFormat(P, C, fixed_point=fixed), N)
    if fixed is not None:
        assert np.array_equal(again.everyone.gram, of(way).gram)
    np.testing.assert_allclose(again.everyone.gram, of(way).gram, rtol=1e-12, atol=1e-12)
    assert again.everyone.counts.tolist() == of(way).counts.tolist()
    assert again.size == max(again.fitting.size, again.held_out.size)


def test_a_part_may_be_of_no_example_and_its_sums_are_zero():
    one_sided, whole = split(torch.ones(1, dtype=torch.bool), 1), split(HELD)
    again = SplitStatistics.from_arrays(one_sided.to_arrays(), FORMAT, 1)
    assert again.size == one_sided.held_out.size
    assert (again + whole).fitting.gram.tolist() == whole.fitting.gram.tolist()
    arrays = one_sided.to_arrays()
    arrays["gram"] = arrays["held-out-gram"]
    with pytest.raises(BadReply, match=r"gram: expected \(0, 5\), got \(1, 5\)"):
        SplitStatistics.from_arrays(arrays, FORMAT, 1)


@pytest.mark.parametrize("part", ["", "held-out-"])
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gram", lambda a: a + 1e9 * (np.arange(len(a)) == 1), "range"),
        ("class-sums", lambda a: 1e3 * a + 1e6, "range"),
        ("counts", lambda a: a + 1, "num-examples"),
    ],
)
def test_either_part_refuses_the_whole_and_cannot_come_by_itself(part, name, change, reason):
    arrays = split(HELD).to_arrays()
    arrays[part + name] = change(arrays[part + name])
    refused(f"^{reason}: ", SplitStatistics.from_arrays, arrays, FORMAT, N, error=BadReply)
    words, arrays = r"^arrays: expected .*held-out-counts, got", split(HELD).fitting.to_arrays()
    refused(words, SplitStatistics.from_arrays, arrays, FORMAT, error=BadReply)
