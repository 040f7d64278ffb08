"""What all clients share: weights in, weights out, evaluation, and models that they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import ModelClient, NTKFLClient, SGDClient, get_weights, set_weights
from fedntk.clients.core.base import candidate_losses

from ..conftest import refused
from ..strategies.federation import network


def test_weights_round_trip_with_buffers_and_dtypes():
    model, other = network(), network(1)
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
    refused(message, set_weights, model, damage(get_weights(model)))


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
    losses = candidate_losses(client, [good, bad], client.inputs, client.targets)
    assert np.isfinite(losses[0])
    assert losses[1] == np.inf


# ------------------------------------------------------------------ models that are refused

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2


class Returning(nn.Module):
    """Returns what a function makes of the scores."""

    def __init__(self, made):
        super().__init__()
        self.linear, self.made = nn.Linear(4, 2), made

    def forward(self, x):
        return self.made(self.linear(x))


def test_bfloat16_cannot_travel():
    mixed = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    mixed[1].running_mean = mixed[1].running_mean.bfloat16()
    refused(r"got bfloat16 in 1\.running_mean; convert it", ModelClient, mixed, X, Y)


def test_float16_is_for_methods_that_send_weights():
    """The server takes Jacobians of float32 and float64 only."""
    model = nn.Linear(4, 2).half()
    refused(r"float32 or float64, which .*, got float16 in weig", NTKFLClient, model, X, Y)
    client = SGDClient(model, X, Y)
    assert client.inputs.dtype == torch.float16
    assert client.evaluate(client.get_parameters({}), {})[0] > 0


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda f: f[:, 0], r"one number per example \(shape \(2,\) for 2 .* give its last lay"),
        (lambda f: f[:, :1], r"at least two classes, got one number per example \(shape \(2, 1\)"),
        (lambda f: (f, f), r"expected one tensor of scores \(n, C\), got a tuple; .* the scores"),
        (lambda f: SimpleNamespace(logits=f), r"got a SimpleNamespace; .* returns output\.logits$"),
        (lambda f: f[..., None], r"expected scores of shape \(2, C\) .* shape \(2, 2, 1\); have"),
        (lambda f: f.mean(0, keepdim=True), r"got float32 of shape \(1, 2\); have its forward"),
        (lambda f: (f > 0).long(), r"got int64 of shape \(2, 2\); have its forward"),
    ],
)
def test_other_outputs_than_scores_of_classes_are_refused(made, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelClient(Returning(made), X, Y)
    assert "\n" not in str(caught.value)


def test_images_without_a_channel_are_not_taken_for_one_image():
    """A convolution takes (1, 6, 6) for one image of one channel; two of them, it does not."""
    network = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(0), nn.Unflatten(0, (-1, 8)))
    assert network(torch.zeros(1, 6, 6)).shape == (1, 8)
    refused(r"try x\.unsqueeze\(1\)", ModelClient, network, torch.zeros(6, 6, 6), Y)


def test_the_model_stays_as_it_is_and_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    ModelClient(model.train(), X, Y)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
