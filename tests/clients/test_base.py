"""What all clients share: weights in, weights out, evaluation, and models that they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import (
    DFedSAMClient,
    DittoClient,
    LocalSGD,
    ModelClient,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    get_weights,
    set_weights,
)
from fedntk.clients.core.base import candidate_losses

from ..conftest import refused
from ..strategies.federation import assert_near, network
from .problem import X, Y, named

N = 9
TOKENS = torch.randint(0, 6, (N, 4), generator=torch.Generator().manual_seed(0))


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


def test_weights_that_do_not_fit_are_refused():
    model = nn.Linear(4, 3)
    weight, bias = get_weights(model)
    refused("the model has 2 arrays, got 1", set_weights, model, [weight])
    text = r"weight has the shape \(3, 4\), got \(4, 3\)"
    refused(text, set_weights, model, [weight.T, bias])


def test_evaluation_is_that_of_the_weights_sent_on_the_test_examples():
    """Identity network: outputs are the inputs, so accuracy is known."""
    x_test, y_test = 100 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1])
    client = ModelClient(nn.Linear(3, 3), X[:, :3], Y, x_test=x_test, y_test=y_test)
    identity = [np.eye(3, dtype=np.float32), np.zeros(3, dtype=np.float32)]
    loss, count, metrics = client.evaluate(identity, {})
    assert (count, metrics) == (4, {"accuracy": 0.75})
    assert loss == pytest.approx(25.0)  # one of four misses by a logit of 100


def test_a_loss_that_is_no_number_counts_as_infinite():
    model = nn.Linear(4, 3)
    client = ModelClient(model, X, Y)
    good, bad = get_weights(model), [np.full((3, 4), np.nan, np.float32), np.zeros(3, np.float32)]
    finite, infinite = candidate_losses(client, [good, bad], client.inputs, client.targets)
    assert np.isfinite(finite)
    assert infinite == np.inf


def test_the_model_stays_as_it_is_and_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    ModelClient(model.train(), X, Y)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training


# ------------------------------------------------------------------ models that are refused


class Returning(nn.Module):
    """Returns what a function makes of the scores, in all modes or only while it trains."""

    def __init__(self, made, *, only_training=False):
        super().__init__()
        self.linear, self.made, self.only_training = nn.Linear(4, 3), made, only_training

    def forward(self, x):
        scores = self.linear(x)
        return scores if self.only_training and not self.training else self.made(scores)


def test_bfloat16_cannot_travel_and_float16_is_for_methods_that_send_weights():
    """The server takes Jacobians of float32 and float64 only."""
    mixed = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    mixed[1].running_mean = mixed[1].running_mean.bfloat16()
    refused(r"got bfloat16 in 1\.running_mean; convert it", ModelClient, mixed, X, Y)
    model = nn.Linear(4, 3).half()
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
        (lambda f: f[..., None], r"expected scores of shape \(2, C\) .* shape \(2, 3, 1\); have"),
        (lambda f: f.mean(0, keepdim=True), r"got float32 of shape \(1, 3\); have its forward"),
        (lambda f: (f > 0).long(), r"got int64 of shape \(2, 3\); have its forward"),
    ],
)
def test_other_outputs_than_scores_of_classes_are_refused(made, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelClient(Returning(made), X, Y)
    assert "\n" not in str(caught.value)


OUTPUTS = {
    "a tuple": lambda scores: (scores, scores),
    "a list": lambda scores: [scores],
    "a dict": lambda scores: {"logits": scores, "aux": scores},
    r"a Tensor of shape \(9, 4\)": lambda scores: torch.cat([scores, scores[:, :1]], 1),
    r"a Tensor of shape \(9, 3, 1\)": lambda scores: scores.unsqueeze(2),
    r"a Tensor of shape \(8, 3\)": lambda scores: scores[1:],
}


@pytest.mark.parametrize("text", sorted(OUTPUTS))
@pytest.mark.parametrize("make", [SGDClient, DittoClient, DFedSAMClient])
def test_other_outputs_in_training_are_refused_before_a_step(text, make):
    client = make(Returning(OUTPUTS[text], only_training=True), X[:N], Y[:N], seed=0)
    before, text = client.model_weights(), rf"scores \(9, 3\) in training mode.* got {text};"
    arrays = list(before.values())
    refused(text, client.sgd.descend, client, arrays, X[:N], client.targets, {})
    assert_near(client.model_weights(), before)


def test_images_without_a_channel_are_not_taken_for_one_image():
    """A convolution takes (1, 6, 6) for one image of one channel; two of them, it does not."""
    model = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(0), nn.Unflatten(0, (-1, 8)))
    assert model(torch.zeros(1, 6, 6)).shape == (1, 8)
    refused(r"try x\.unsqueeze\(1\)", ModelClient, model, torch.zeros(20, 6, 6), Y)


@pytest.mark.parametrize(("n", "batch_size", "rate"), [(1, 32, 1.0), (9, 1, 1.0), (9, 32, 0.1)])
def test_one_example_under_batch_norm_is_refused(n, batch_size, rate):
    """Several values per channel of an image can be normalised."""
    rows = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    images = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    options = {"sgd": LocalSGD(batch_size=batch_size), "sampling_rate": rate}
    client, able = (SGDClient(model, X[:n], Y[:n], **options) for model in (rows, images))
    text = r"x: expected batches of at least 2.*BatchNorm.* GroupN"
    refused(text, client.fit, client.get_parameters({}), {})
    able.fit(able.get_parameters({}), {})


# ------------------------------------------------------------------ sparse embeddings


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def embedding(kind, *, sparse):
    torch.manual_seed(0)
    mean = [] if kind is nn.EmbeddingBag else [Mean()]
    return nn.Sequential(kind(6, 5, sparse=sparse), *mean, nn.Linear(5, 3))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("momentum", "option"), [(0.0, None), (0.9, None), (0.0, "I")])
def test_sparse_embeddings_are_trained_as_dense_ones(kind, momentum, option):
    """With equal tokens in a batch, whose rows a sparse gradient has twice."""
    make, more = (SCAFFOLDClient, {"option": option}) if option else (SGDClient, {})
    sgd, replies = LocalSGD(batch_size=4, momentum=momentum, weight_decay=momentum / 9), []
    for sparse in (False, True):
        client = make(embedding(kind, sparse=sparse), TOKENS, Y[:N], sgd=sgd, **more)
        arrays = client.model_weights()
        zero = {name: np.zeros_like(array) for name, array in arrays.items()}
        sent = {"arrays": arrays} | ({"corrections": zero} if option else {})
        replies.append(client.fit(named(**sent), {"proximal-mu": 0.0})[0])
    for dense, sparse in zip(*replies, strict=True):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # bags, dense ones as well
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_sparse_embeddings_have_the_rows_of_dense_ones(kind, structure):
    dense, sparse = (
        NTKFLClient(embedding(kind, sparse=sparse), TOKENS, Y[:N], structure=structure)
        for sparse in (False, True)
    )
    expected, actual = (
        client.upload(client.get_parameters({}), {}).jacobian.dense() for client in (dense, sparse)
    )
    for name, rows in expected.items():
        assert actual[name].layout == torch.strided
        torch.testing.assert_close(actual[name], rows)
