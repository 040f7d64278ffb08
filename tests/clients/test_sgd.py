"""SGDClient against the update written out."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedProx
from torch import nn

from fedntk.clients import (
    FedDynClient,
    FedNovaClient,
    LocalSGD,
    NamedArrays,
    SGDClient,
    get_weights,
)
from fedntk.clients.core.randomness import torch_seed
from fedntk.ntk import one_hot
from fedntk.ntk.losses import log_class_prior

from ..conftest import refused
from ..strategies.federation import InOrder, app, bits, network, start
from .problem import X, Y, raw

X64, TARGETS = X.double(), one_hot(Y, 3).double()


def exact_client(model, loss="cross-entropy", **sgd):
    """In float64, with one step an epoch unless `batch_size` says otherwise."""
    sgd = LocalSGD(**{"batch_size": 20, "learning_rate": 0.5, **sgd})
    client = SGDClient(model.double(), X64, Y, loss=loss, sgd=sgd)
    client.targets = TARGETS
    return client


class Sometimes(nn.Sequential):
    """A network with a bias that only some batches train."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.rare = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) + self.rare if x[0, 0] > 0 else super().forward(x)


@pytest.mark.parametrize(
    ("loss", "optimizer", "options"),
    [
        ("cross-entropy", "SGD", {}),
        ("mse", "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("cross-entropy", "Adam", {}),
        ("mse", "Adam", {"weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_torchs_optimizer_bit_for_bit(loss, optimizer, options):
    """Two rounds of ten epochs of batches of 6, 6, 6 and 2; the state begins anew in the second.

    With BatchNorm, a frozen and an unused parameter, and one that some batches train. The
    train-loss is the mean of what the steps met, each example counting once: float64, 1e-12.
    """
    models = Sometimes(*network()), Sometimes(*network())
    for model in models:
        model[0].bias.requires_grad_(False)
        model.spare = nn.Parameter(torch.ones(2))
    ours, theirs = models
    kind = {"optimizer": optimizer.lower(), **options}
    sgd = LocalSGD(epochs=10, learning_rate=0.03, batch_size=6, **kind)
    client = SGDClient(ours, X, Y, loss=loss, sgd=sgd)
    trainable, trained = [p for p in theirs.parameters() if p.requires_grad], get_weights(theirs)
    for _ in range(2):
        trained, _, metrics = client.fit(trained, {})
        made = getattr(torch.optim, optimizer)(trainable, lr=0.03, **options)
        drawn, total = torch.Generator().manual_seed(torch_seed(client.seed, {})), 0.0
        for _ in range(10):
            for rows in torch.randperm(20, generator=drawn).split(6):
                made.zero_grad()
                if loss == "mse":
                    value = nn.functional.mse_loss(theirs(X[rows]), one_hot(Y, 3)[rows]) / 2
                else:
                    value = nn.functional.cross_entropy(theirs(X[rows]), Y[rows])
                value.backward()
                made.step()
                total += value.item() * len(rows) / 200
        assert raw(trained) == raw(get_weights(theirs))
        assert metrics["train-loss"] == pytest.approx(total, rel=1e-12)


def test_a_first_step_of_adam_is_as_long_as_the_rate_along_each_sign():
    """m / (1 - beta_1) = g, sqrt(v / (1 - beta_2)) = |g|: eta g / (|g| + 1e-8), float64, 1e-12."""
    model = nn.Linear(4, 3).double()
    nn.functional.cross_entropy(model(X64), Y).backward()
    start, slopes = get_weights(model), [p.grad.numpy().copy() for p in model.parameters()]
    after, _, _ = exact_client(model, optimizer="adam").fit(start, {})
    for new, old, slope in zip(after, start, slopes, strict=True):
        expected = old - 0.5 * slope / (np.abs(slope) + 1e-8)
        np.testing.assert_allclose(new, expected, rtol=0, atol=1e-12)
    refused("momentum: expected 0 with .* adam", LocalSGD, optimizer="adam", momentum=0.9)


def test_proximal_steps_are_those_of_the_formula():
    """Four steps along grad F(w) + mu (w - w_t), and then decay and momentum: float64, 1e-12.

    F(w) = ||x w^T - Y||^2 / (2 n C).
    """
    model = nn.Linear(4, 3, bias=False).double()
    (start,) = get_weights(model)
    x, targets = X64.numpy(), TARGETS.numpy()
    weight, velocity, losses = start.copy(), 0.0, []
    for _ in range(4):
        error = x @ weight.T - targets
        losses.append((error**2).sum() / (2 * 20 * 3))
        velocity = 0.9 * velocity + error.T @ x / (20 * 3) + 0.7 * (weight - start) + 0.3 * weight
        weight = weight - 0.5 * velocity
    options = {"proximal_mu": 0.7, "momentum": 0.9, "weight_decay": 0.3}
    client = exact_client(model, loss="mse", epochs=4, **options)
    (after,), _, metrics = client.fit([start], {})
    np.testing.assert_allclose(after, weight, rtol=1e-12, atol=1e-12)
    assert metrics["train-loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_the_class_prior_is_an_offset_of_the_outputs_only_in_training():
    """One full-batch step against autograd in float64, of outputs plus log(C pi_c)."""
    labels = torch.tensor([0] * 12 + [1] * 7 + [2])
    model = nn.Linear(4, 3).double()
    start, options = get_weights(model), {"learning_rate": 0.5, "batch_size": 20}
    outputs = model(X64) + log_class_prior(one_hot(labels, 3).double())
    loss = nn.functional.cross_entropy(outputs, labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    client = SGDClient(model, X64, labels, sgd=LocalSGD(class_prior=True, **options))
    arrays, _, metrics = client.fit(start, {})
    for after, before, gradient in zip(arrays, start, gradients, strict=True):  # a float32 offset
        np.testing.assert_allclose(after, before - 0.5 * gradient.numpy(), rtol=1e-6, atol=1e-7)
    assert metrics["train-loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert client.evaluate(start, {}) == SGDClient(model, X64, labels).evaluate(start, {})
    text = "class_prior: expected the loss cross-entropy, got mse"
    prior = LocalSGD(class_prior=True)
    refused(text, SGDClient, model, X64, labels, loss="mse", sgd=prior)


def test_a_class_that_weighs_three_is_that_class_three_times():
    """One full-batch step in float64, rtol 1e-12: the rate takes the larger batch into account."""
    model = nn.Linear(4, 3).double()
    start = get_weights(model)
    weighted = exact_client(model, class_weights=(1.0, 3.0, 1.0))
    arrays, _, metrics = weighted.fit(start, {})
    times = torch.where(Y == 1, 3, 1)
    x, y = X64.repeat_interleave(times, 0), Y.repeat_interleave(times)
    sgd = LocalSGD(batch_size=len(y), learning_rate=0.5 * len(y) / 20)
    repeated = SGDClient(model, x, y, sgd=sgd)
    expected, _, repeated_metrics = repeated.fit(start, {})
    for array, other in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-12)
    total = repeated_metrics["train-loss"] * len(y)
    assert metrics["train-loss"] * 20 == pytest.approx(total, rel=1e-12)
    ones = exact_client(model, class_weights=(1.0, 1.0, 1.0)).fit(start, {})[0]
    plain = exact_client(model).fit(start, {})[0]
    np.testing.assert_allclose(ones[0], plain[0], rtol=1e-12)
    for text, options, loss in (
        ("class_weights: expected a factor for each of 3 classes, got 2", (1.0, 2.0), None),
        ("class_weights: expected the loss cross-entropy, got mse", (1.0, 2.0, 1.0), "mse"),
    ):
        sgd = LocalSGD(class_weights=options)
        refused(text, SGDClient, model, X64, Y, loss=loss or "cross-entropy", sgd=sgd)


def test_train_loss_without_epochs_is_that_of_the_received_weights():
    """In evaluation mode: dropout plays no part. Sums of 9 products in float64: 1e-12."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.9), nn.Linear(9, 3)).double()
    start = get_weights(model)
    arrays, _, metrics = exact_client(model, epochs=0).fit(start, {})
    assert raw(arrays) == raw(start)
    expected = nn.functional.cross_entropy(model[2](model[0](X64)), Y)
    assert metrics["train-loss"] == pytest.approx(expected.item(), rel=1e-12)


def test_soft_targets_of_a_client_of_ones_own_are_not_taken_for_classes():
    """Mixed labels: the gradient is sum_i (p_i - y_i) x_i / n, in float64 to 1e-12."""
    model = nn.Linear(4, 3, bias=False)
    client = exact_client(model)
    client.targets = mixed = (X64 @ torch.arange(12.0).double().view(4, 3)).softmax(1)
    start = model.weight.detach().clone()
    (after,), _, _ = client.fit(get_weights(model), {})
    expected = start - 0.5 * (((X64 @ start.T).softmax(1) - mixed).T @ X64 / 20)
    np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_shuffling_and_dropout_follow_seed_and_round_and_nothing_else(dropout):
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(dropout), nn.Linear(9, 3))
    start = get_weights(model)

    def fit(seed, number):
        torch.manual_seed(np.random.default_rng().integers(1 << 30))  # plays no part
        before = torch.get_rng_state()
        client = SGDClient(model, X, Y, sgd=LocalSGD(batch_size=3), seed=seed)
        arrays, _, _ = client.fit(start, {"server-round": number})
        assert torch.equal(before, torch.get_rng_state())
        return tuple(raw(arrays))

    assert fit((0, 1), 1) == fit((0, 1), 1)
    assert len({fit((0, 1), 1), fit((0, 1), 2), fit((0, 2), 1), fit((1, 1), 1)}) == 4


def test_batch_norm_takes_a_last_batch_of_one_with_the_batch_before():
    """20 examples in batches of 19: one step on all 20, as with batches of 20."""
    start = get_weights(network())
    joined, whole = (
        SGDClient(network(), X, Y, sgd=LocalSGD(batch_size=b)).fit(start, {})[0] for b in (19, 20)
    )
    assert raw(joined) == raw(whole)


def test_flowers_fedprox_drives_it_and_its_mu_counts():
    """Two rounds over clients with a mu of their own."""

    def run(mu, client_mu):
        sgd = LocalSGD(epochs=3, proximal_mu=client_mu, learning_rate=0.1, batch_size=4)
        clients = app(SGDClient, sgd=sgd)
        strategy = FedProx(proximal_mu=mu, fraction_evaluate=0.0, min_available_nodes=6)
        return bits(start(strategy, InOrder(clients), rounds=2))

    assert run(2.0, 0.0) == run(2.0, 5.0) != run(0.0, 5.0)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), "1"])
def test_a_bad_mu_in_a_message_is_refused(mu):
    client, text = SGDClient(network(), X, Y), r"proximal-mu: expected (at least 0|a finite|float)"
    refused(text, client.fit, get_weights(network()), {"proximal-mu": mu})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected at least 1 with FedNova, got 0"),
        ({"proximal_mu": 0.1}, "expected 0, got 0.1; FedNova normalises SGD"),
        ({"optimizer": "adam"}, "optimizer: expected sgd with FedNova, got adam"),
    ],
)
def test_fed_nova_refuses_steps_that_it_cannot_normalise(options, message):
    refused(message, FedNovaClient, network(), X, Y, sgd=LocalSGD(**options))


def test_fed_dyn_refuses_a_centre_of_another_network():
    client = FedDynClient(network(), X, Y)
    weights = dict(zip(network().state_dict(), get_weights(network()), strict=True))
    records = {"arrays": weights, "proximal-centre": {"0.weight": np.zeros((2, 2))}}
    message = r"differing in \['0.weight', '0.bias'.*; the strategy's network must be the client's"
    refused(message, client.fit, NamedArrays(records), {"proximal-mu": 0.1})


TRAINED = """
import sys
import torch
from fedntk.clients import *
model = torch.nn.Linear(4, 3)
for kind in (SGDClient, NTKFLClient, CPNTKFLClient):
    kind(model, torch.zeros(6, 4), torch.arange(6) % 3).fit(get_weights(model), {})
adam = LocalSGD(optimizer="adam")
SGDClient(model, torch.zeros(6, 4), torch.arange(6) % 3, sgd=adam).fit(get_weights(model), {})
for module in ("torch._dynamo", "sympy", "pandas", "fastapi", "uvicorn"):
    assert module not in sys.modules, module
"""


def test_clients_do_not_load_what_takes_as_long_as_torch_itself():
    """Flower starts a process for each message: torch's compiler alone is 0.6 s of it."""
    subprocess.run([sys.executable, "-c", TRAINED], check=True)  # noqa: S603
