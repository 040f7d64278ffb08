"""SGDClient against the update written out."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedProx
from torch import nn

from fedntk.clients import SGDClient, get_weights
from fedntk.ntk.class_prior import log_class_prior

from ..strategies.federation import InOrder, app, bits, network, start

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
ONE_HOT = nn.functional.one_hot(Y, 3).double()


def client(model: nn.Module, **options: object) -> SGDClient:
    return SGDClient(model, X, Y, **options)


def exact_client(model: nn.Module, **options: object) -> SGDClient:
    """In float64."""
    own = SGDClient(model.double(), X.double(), Y, **options)
    own.targets = own.targets.double()
    return own


def test_the_class_prior_is_an_offset_of_the_outputs_in_training_alone():
    """One full-batch step against autograd in float64, of outputs plus log(C pi_c)."""
    labels = torch.tensor([0] * 12 + [1] * 7 + [2])
    model = nn.Linear(4, 3).double()
    start, exact = get_weights(model), copy.deepcopy(model)
    prior = log_class_prior(nn.functional.one_hot(labels, 3).double())
    loss = nn.functional.cross_entropy(exact(X.double()) + prior, labels)
    loss.backward()
    expected = [w - 0.5 * p.grad.numpy() for w, p in zip(start, exact.parameters(), strict=True)]
    options = {"learning_rate": 0.5, "batch_size": 20}
    own = SGDClient(model, X.double(), labels, class_prior=True, **options)
    arrays, _, metrics = own.fit(start, {})
    for actual, wanted in zip(arrays, expected, strict=True):  # the offset itself is float32
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-7)
    assert metrics["train-loss"] == pytest.approx(loss.item(), rel=1e-6)
    plain = SGDClient(nn.Linear(4, 3).double(), X.double(), labels, **options)
    assert own.evaluate(start, {}) == plain.evaluate(start, {})
    with pytest.raises(ValueError, match="class_prior: expected the loss cross-entropy, got mse"):
        SGDClient(nn.Linear(4, 3), X, labels, loss="mse", class_prior=True)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_train_loss_is_the_mean_of_what_the_steps_met(loss):
    """Two epochs of batches of 6, 6, 6 and 2 in float64, each example counting once: 1e-12."""
    model = nn.Linear(4, 3).double()
    options = {"learning_rate": 0.5, "batch_size": 6, "local_epochs": 2}
    own, start = exact_client(model, loss=loss, **options), get_weights(model)
    exact = copy.deepcopy(model)
    drawn = torch.Generator().manual_seed(own._draws({}))
    total = 0.0
    for _ in range(2):
        for rows in torch.randperm(20, generator=drawn).split(6):
            outputs = exact(X.double()[rows])
            if loss == "mse":
                value = (outputs - ONE_HOT[rows]).square().mean() / 2
            else:
                value = -(ONE_HOT[rows] * outputs.log_softmax(1)).sum(1).mean()
            total += value.item() * len(rows) / 40
            gradients = torch.autograd.grad(value, list(exact.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(exact.parameters(), gradients, strict=True):
                    parameter -= 0.5 * gradient
    arrays, _, metrics = own.fit(start, {})
    assert metrics["train-loss"] == pytest.approx(total, rel=1e-12)
    for actual, wanted in zip(arrays, exact.parameters(), strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_train_loss_without_epochs_is_that_of_the_received_weights():
    """In evaluation mode: dropout plays no part. Sums of 9 products in float64: 1e-12."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.9), nn.Linear(9, 3)).double()
    start = get_weights(model)
    arrays, _, metrics = exact_client(model, local_epochs=0).fit(start, {})
    assert [a.tobytes() for a in arrays] == [a.tobytes() for a in start]
    expected = nn.functional.cross_entropy(model[2](model[0](X.double())), Y)
    assert metrics["train-loss"] == pytest.approx(expected.item(), rel=1e-12)


def test_soft_targets_of_a_client_of_ones_own_are_not_taken_for_classes():
    """Mixed labels: the gradient is sum_i (p_i - y_i) x_i / n, in float64 to 1e-12."""
    mixed = torch.rand(20, 3, generator=torch.Generator().manual_seed(1)).double()
    mixed /= mixed.sum(1, keepdim=True)

    class Mixing(SGDClient):
        def training_examples(self, config):  # type: ignore[no-untyped-def]
            return X.double(), mixed

    model = nn.Linear(4, 3, bias=False).double()
    start = get_weights(model)
    (after,), _, _ = Mixing(model, X.double(), Y, learning_rate=0.5, batch_size=20).fit(start, {})
    p = (X.double() @ torch.from_numpy(start[0]).T).softmax(1)
    expected = start[0] - 0.5 * ((p - mixed).T @ X.double() / 20).numpy()
    np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)


def test_shuffling_and_dropout_follow_seed_and_round_and_nothing_else():
    for model in (nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 9), nn.Dropout(), nn.Linear(9, 3))):
        start = get_weights(model)

        def fit(seed: tuple[int, ...], number: int, model=model, start=start) -> bytes:
            torch.manual_seed(np.random.default_rng().integers(1 << 30))  # plays no part
            before = torch.get_rng_state()
            own = client(model, batch_size=3, seed=seed)
            arrays, _, _ = own.fit(start, {"server-round": number})
            assert torch.equal(before, torch.get_rng_state())
            return b"".join(a.tobytes() for a in arrays)

        assert fit((0, 1), 1) == fit((0, 1), 1)
        assert len({fit((0, 1), 1), fit((0, 1), 2), fit((0, 2), 1), fit((1, 1), 1)}) == 4


def test_batch_norm_takes_a_last_batch_of_one_with_the_batch_before():
    """20 examples in batches of 19: one step on all 20, as with batches of 20."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    start = get_weights(model)
    joined, whole = (client(model, batch_size=size).fit(start, {})[0] for size in (19, 20))
    for a, b in zip(joined, whole, strict=True):
        np.testing.assert_array_equal(a, b)


# --------------------------------------------------------------------------- FedProx


def test_proximal_steps_are_those_of_the_formula():
    """Four steps along grad F(w) + mu (w - w_t), and then decay and momentum: float64, 1e-12.

    F(w) = ||x w^T - Y||^2 / (2 n C).
    """
    model = nn.Linear(4, 3, bias=False).double()
    (start,) = get_weights(model)
    x, targets = X.double().numpy(), ONE_HOT.numpy()
    weight, velocity = start.copy(), 0.0
    for _ in range(4):
        gradient = (x @ weight.T - targets).T @ x / (20 * 3)
        velocity = 0.9 * velocity + gradient + 0.7 * (weight - start) + 0.3 * weight
        weight = weight - 0.5 * velocity
    own = exact_client(
        model, loss="mse", batch_size=20, proximal_mu=0.7, learning_rate=0.5, local_epochs=4,
        momentum=0.9, weight_decay=0.3,
    )  # fmt: skip
    (after,), _, _ = own.fit([start], {})
    np.testing.assert_allclose(after, weight, rtol=1e-12, atol=1e-12)


def test_parameters_that_are_frozen_or_unused_stay():
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.spare = nn.Parameter(torch.ones(2))

    model = Spare()
    model.bias.requires_grad_(False)
    names, start = list(model.state_dict()), get_weights(model)
    arrays, _, _ = client(model, proximal_mu=0.5, local_epochs=3).fit(start, {})
    for name, after, before in zip(names, arrays, start, strict=True):
        assert np.array_equal(after, before) == (name != "weight")


def test_flowers_fedprox_drives_it_and_its_mu_counts():
    """Two rounds over clients with a mu of their own."""

    def run(mu: float, own: float) -> dict[str, bytes]:
        clients = app(SGDClient, learning_rate=0.1, batch_size=4, local_epochs=3, proximal_mu=own)
        strategy = FedProx(proximal_mu=mu, fraction_evaluate=0.0, min_available_nodes=6)
        return bits(start(strategy, InOrder(clients), rounds=2))

    assert run(2.0, 0.0) == run(2.0, 5.0) != run(0.0, 5.0)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.1)])
def test_steps_are_those_of_torchs_optimizer_bit_for_bit(momentum, weight_decay):
    """Twelve mini-batches of a network with BatchNorm and a frozen bias."""
    ours, theirs = network(), network()
    options = {"momentum": momentum, "weight_decay": weight_decay}
    own = client(ours, learning_rate=0.3, batch_size=5, local_epochs=3, **options)
    ours[0].bias.requires_grad_(False)
    theirs[0].bias.requires_grad_(False)
    trained, _, _ = own.fit(get_weights(theirs), {})
    optimizer = torch.optim.SGD(
        [p for p in theirs.parameters() if p.requires_grad], lr=0.3, **options
    )
    drawn = torch.Generator().manual_seed(own._draws({}))
    theirs.train()
    for _ in range(3):
        for batch in torch.randperm(20, generator=drawn).split(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(X[batch]), Y[batch]).backward()
            optimizer.step()
    for a, b in zip(trained, get_weights(theirs), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("mu", [-0.1, float("nan"), "1"])
def test_a_bad_mu_in_a_message_is_refused(mu):
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"proximal-mu: expected (at least 0|a finite|float)"):
        client(model).fit(get_weights(model), {"proximal-mu": mu})


TRAINED = """
import sys
import torch
from fedntk.clients import *
x, y = torch.zeros(6, 4), torch.arange(6) % 3
model = torch.nn.Linear(4, 3)
for kind in (SGDClient, NTKFLClient, CPNTKFLClient):
    kind(model, x, y).fit(get_weights(model), {})
for module in ("torch._dynamo", "sympy", "pandas", "fastapi", "uvicorn"):
    assert module not in sys.modules, module
"""


def test_clients_do_not_load_what_takes_as_long_as_torch_itself():
    """Flower starts a process for each message: torch's compiler alone is 0.6 s of it."""
    subprocess.run([sys.executable, "-c", TRAINED], check=True)  # noqa: S603
