"""The offset by which class shares are taken out of what a network learns."""

import pytest
import torch

from fedntk.ntk.losses import OUTPUT_OFFSET, log_class_prior, offset_of

from ..conftest import refused


def test_it_is_the_logarithm_of_the_smoothed_shares_relative_to_others():
    targets = torch.eye(3, dtype=torch.float64)[[0, 0, 0, 1]]
    shares = torch.tensor([(3 + 1 / 3) / 5, (1 + 1 / 3) / 5, (1 / 3) / 5], dtype=torch.float64)
    assert float(shares.sum()) == pytest.approx(1)
    prior = log_class_prior(targets)
    torch.testing.assert_close(prior, (3 * shares).log())
    torch.testing.assert_close(log_class_prior(targets.float()), prior.float())
    counts = torch.tensor([30.0, 20.0, 50.0])
    others = (counts.double() + 1 / 3) / 101
    torch.testing.assert_close(log_class_prior(targets, counts), prior - (3 * others).log())
    same = log_class_prior(targets, targets.sum(0))
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-15)


def test_a_messages_offset_is_read_or_refused():
    torch.testing.assert_close(offset_of({OUTPUT_OFFSET: [0.5, -1.0]}, 2), torch.tensor([0.5, -1]))
    assert torch.equal(offset_of({}, 3), torch.zeros(3))
    for bad in ([0.5], [0.5, float("nan")], [1.0, "a"], 0.5, [1, 2]):
        refused("output-offset: expected 2 finite numbers, got", offset_of, {OUTPUT_OFFSET: bad}, 2)
