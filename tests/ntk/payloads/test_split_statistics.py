"""Sums in two parts: which examples are held out, and what a hostile reply may hold."""

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat
from fedntk.ntk.payloads.split_statistics import SplitStatistics, draw_held_out

from ...conftest import refused

WIDTH, CLASSES = 4, 3
FORMAT = SumFormat(WIDTH, CLASSES)


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, generator=generator), torch.arange(n) % CLASSES


def split(n=20, *, fixed_point=None, seed=0):
    z, y = rows(n, seed)
    held = draw_held_out(y, 0.25, [seed])
    parts = (
        FeatureStatistics.of([z[rows_of_part]], y[rows_of_part], CLASSES, fixed_point=fixed_point)
        for rows_of_part in (~held, held)
    )
    return SplitStatistics(*parts)


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
    first, same, other = (draw_held_out(rows(50)[1], 0.2, [3, k]) for k in (4, 4, 5))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    drawn = [draw_held_out(torch.zeros(1, dtype=torch.int64), 0.3, [s]) for s in range(2000)]
    assert abs(float(torch.cat(drawn).double().mean()) - 0.3) < 0.05


@pytest.mark.parametrize("fixed_point", [None, FixedPoint(np.full(WIDTH, 0.25, np.float32), 8)])
def test_what_travels_comes_back_and_both_parts_are_all_examples(fixed_point):
    """Integers add up to the same bits; in float64 20 products differ by roundings."""
    statistics = split(fixed_point=fixed_point)
    expected = SumFormat(WIDTH, CLASSES, fixed_point=fixed_point)
    again = SplitStatistics.from_arrays(statistics.to_arrays(fixed_point), expected, 20)
    z, y = rows(20)
    together = FeatureStatistics.of([z], y, CLASSES, fixed_point=fixed_point)
    if fixed_point is not None:
        assert np.array_equal(again.everyone.gram, together.gram)
    np.testing.assert_allclose(again.everyone.gram, together.gram, rtol=1e-12, atol=1e-12)
    assert again.everyone.counts.tolist() == together.counts.tolist()
    assert again.size == max(again.fitting.size, again.held_out.size)


def test_a_part_may_be_of_no_example_and_its_sums_are_zero():
    z, y = rows(1)
    statistics = SplitStatistics(*(FeatureStatistics.of([z[:n]], y[:n], CLASSES) for n in (0, 1)))
    again = SplitStatistics.from_arrays(statistics.to_arrays(), FORMAT, 1)
    assert again.size == statistics.held_out.size
    assert (again + split()).fitting.gram.tolist() == split().fitting.gram.tolist()
    arrays = statistics.to_arrays()
    arrays["gram"] = arrays["held-out-gram"]
    with pytest.raises(BadReply, match=r"gram: expected \(0, 4\), got \(1, 4\)"):
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
    arrays = split().to_arrays()
    arrays[part + name] = change(arrays[part + name])
    refused(f"^{reason}: ", SplitStatistics.from_arrays, arrays, FORMAT, 20, error=BadReply)
    words, arrays = r"^arrays: expected .*held-out-counts, got", split().fitting.to_arrays()
    refused(words, SplitStatistics.from_arrays, arrays, FORMAT, error=BadReply)
