"""What all clients share: weights in, weights out, evaluation."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import ModelClient, get_weights, set_weights


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_weights_round_trip_with_buffers_and_dtypes():
    model, other = batch_norm(), batch_norm()
    model(torch.randn(6, 4))  # moves the running statistics and the counter
    arrays = get_weights(model)
    assert [a.dtype for a in arrays].count(np.dtype(np.int64)) == 1
    before = arrays[0].copy()
    set_weights(other, [a.astype(np.float64) for a in arrays])  # as averaging returns them
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    arrays[0][:] = 7  # a copy
    assert np.array_equal(model[0].weight.detach(), before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a[:-1], "the model has 2 arrays, got 1"),
        (lambda a: [a[0].T, a[1]], r"weight has the shape \(3, 4\), got \(4, 3\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(damage, message):
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=message):
        set_weights(model, damage(get_weights(model)))


def test_evaluation_is_that_of_the_weights_sent_on_the_test_examples():
    """Identity network: outputs are the inputs, so accuracy is known."""
    x_test, y_test = 100 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1])
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    client = ModelClient(nn.Linear(3, 3), x, y, x_test=x_test, y_test=y_test)
    identity = [np.eye(3, dtype=np.float32), np.zeros(3, dtype=np.float32)]
    loss, count, metrics = client.evaluate(identity, {})
    assert (count, metrics) == (4, {"accuracy": 0.75})
    assert loss == pytest.approx(25.0)  # one of four misses by a logit of 100


def test_a_loss_that_is_no_number_counts_as_infinite():
    model = nn.Linear(3, 3)
    client = ModelClient(model, torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    good, bad = get_weights(model), [np.full((3, 3), np.nan, np.float32), np.zeros(3, np.float32)]
    losses = client.candidate_losses([good, bad], client.inputs, client.targets)
    assert np.isfinite(losses[0])
    assert losses[1] == np.inf
