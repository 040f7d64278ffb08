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


def client(model: nn.Module, **options: object) -> SGDClient:
    return SGDClient(model, X, Y, **options)


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
    """Two epochs of batches of 6, 6, 6 and 2 in float64, each example counting once: 1e-12.

    The mean of the batches' losses, and the loss at either end, are other numbers.
    """
    model = nn.Linear(4, 3).double()
    own = SGDClient(model, X.double(), Y, loss=loss, learning_rate=0.5, batch_size=6)
    own.local_epochs, own.targets = 2, own.targets.double()
    start = get_weights(model)
    exact = copy.deepcopy(model)
    drawn = torch.Generator().manual_seed(own._draws({}))
    targets, losses, sizes = nn.functional.one_hot(Y, 3).double(), [], []

    def value(rows: torch.Tensor) -> torch.Tensor:
        outputs = exact(X.double()[rows])
        if loss == "mse":
            return (outputs - targets[rows]).square().mean() / 2
        return -(targets[rows] * outputs.log_softmax(1)).sum(1).mean()

    ends = [value(torch.arange(20)).item()]
    for _ in range(2):
        for rows in torch.randperm(20, generator=drawn).split(6):
            losses.append(value(rows))
            sizes.append(len(rows))
            gradients = torch.autograd.grad(losses[-1], list(exact.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(exact.parameters(), gradients, strict=True):
                    parameter -= 0.5 * gradient
    ends.append(value(torch.arange(20)).item())
    values = np.array([one.item() for one in losses])
    expected = float(values @ np.array(sizes)) / 40
    arrays, _, metrics = own.fit(start, {})
    assert metrics["train-loss"] == pytest.approx(expected, rel=1e-12)
    for other in (values.mean(), *ends):
        assert abs(other - expected) > 1e-4
    for actual, wanted in zip(arrays, exact.parameters(), strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_train_loss_without_epochs_is_that_of_the_received_weights():
    """In evaluation mode: dropout plays no part. Sums of 9 products in float64: 1e-12."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.9), nn.Linear(9, 3)).double()
    own = SGDClient(model, X.double(), Y, local_epochs=0)
    start = get_weights(model)
    arrays, _, metrics = own.fit(start, {})
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


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 9), nn.Dropout(), nn.Linear(9, 3))]
)
def test_shuffling_and_dropout_follow_seed_and_round_and_nothing_else(model):
    start = get_weights(model)

    def fit(seed: tuple[int, ...], server_round: int) -> bytes:
        torch.manual_seed(np.random.default_rng().integers(1 << 30))  # global state plays no part
        before = torch.get_rng_state()
        arrays, _, _ = client(model, batch_size=3, seed=seed).fit(
            start, {"server-round": server_round}
        )
        assert torch.equal(before, torch.get_rng_state())
        return b"".join(a.tobytes() for a in arrays)

    assert fit((0, 1), 1) == fit((0, 1), 1)
    assert len({fit((0, 1), 1), fit((0, 1), 2), fit((0, 2), 1), fit((1, 1), 1)}) == 4


def test_batch_norm_takes_a_last_batch_of_one_with_the_batch_before():
    """20 examples in batches of 19: one step on all 20, as with batches of 20."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    start = get_weights(model)
    joined, _, _ = client(model, batch_size=19).fit(start, {})
    whole, _, _ = client(model, batch_size=20).fit(start, {})
    for a, b in zip(joined, whole, strict=True):
        np.testing.assert_array_equal(a, b)


# --------------------------------------------------------------------------- FedProx


def proximal(model: nn.Module, **options: object) -> SGDClient:
    """MSE in float64, full batches."""
    own = SGDClient(model.double(), X.double(), Y, loss="mse", batch_size=20, **options)
    own.targets = own.targets.double()
    return own


def mse_gradient(weight: np.ndarray) -> np.ndarray:
    """Of ||x w^T - Y||^2 / (2 n C), for nn.Linear(4, 3, bias=False)."""
    x, targets = X.double().numpy(), np.eye(3)[Y.numpy()]
    return (x @ weight.T - targets).T @ x / (20 * 3)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.3)])
def test_proximal_steps_are_those_of_the_formula(momentum, weight_decay):
    """Four steps along grad F(w) + mu (w - w_t), and then decay and momentum: float64, 1e-12."""
    model = nn.Linear(4, 3, bias=False).double()
    start = get_weights(model)
    weight, velocity = start[0].copy(), 0.0
    for _ in range(4):
        step = mse_gradient(weight) + 0.7 * (weight - start[0]) + weight_decay * weight
        velocity = momentum * velocity + step
        weight = weight - 0.5 * velocity
    own = proximal(
        model, proximal_mu=0.7, learning_rate=0.5, local_epochs=4, momentum=momentum,
        weight_decay=weight_decay,
    )  # fmt: skip
    arrays, _, _ = own.fit(start, {})
    np.testing.assert_allclose(arrays[0], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mu", [1.0, 100.0, 10000.0])
def test_large_mu_pins_the_weights(mu):
    """F is convex, so the minimum w of F + (mu / 2) ||w - w_t||^2 has ||w - w_t|| <= ||grad|| / mu.

    (grad F(w) - grad F(w_t)) (w - w_t) >= 0, where grad F(w) = -mu (w - w_t). 200 steps of size
    1 / (2 mu + 2) contract by at least 3/4, as F's curvature is below 1: 0.75^200 is 1e-25.
    """
    model = nn.Linear(4, 3, bias=False).double()
    start = get_weights(model)
    own = proximal(model, proximal_mu=mu, learning_rate=1 / (2 * mu + 2), local_epochs=200)
    arrays, _, _ = own.fit(start, {})
    moved = np.linalg.norm(arrays[0] - start[0])
    np.testing.assert_allclose(
        mse_gradient(arrays[0]), -mu * (arrays[0] - start[0]), rtol=1e-9, atol=1e-9
    )
    assert 0 < moved <= np.linalg.norm(mse_gradient(start[0])) / mu


def test_mu_of_zero_is_plain_sgd_bit_for_bit():
    """Which is torch's own, as a test below shows."""
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    start = get_weights(model)
    options = {"batch_size": 6, "local_epochs": 2, "momentum": 0.9, "learning_rate": 0.1}
    arrays, _, _ = client(model, **options).fit(start, {})
    zero, _, _ = client(model, proximal_mu=0.0, **options).fit(start, {})
    sent, _, _ = client(model, proximal_mu=9.0, **options).fit(start, {"proximal-mu": 0.0})
    for parts in zip(arrays, zero, sent, strict=True):
        assert len({part.tobytes() for part in parts}) == 1


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


def run_fedprox(mu: float, own: float) -> dict[str, bytes]:
    """Two rounds of Flower's FedProx over clients with a mu of their own."""

    clients = app(SGDClient, learning_rate=0.1, batch_size=4, local_epochs=3, proximal_mu=own)
    strategy = FedProx(proximal_mu=mu, fraction_evaluate=0.0, min_available_nodes=6)
    return bits(start(strategy, InOrder(clients), rounds=2))


def test_flowers_fedprox_drives_it_and_its_mu_counts():
    assert run_fedprox(2.0, 0.0) == run_fedprox(2.0, 5.0)
    assert run_fedprox(0.0, 0.0) == run_fedprox(0.0, 5.0)
    assert run_fedprox(2.0, 0.0) != run_fedprox(0.0, 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
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


BAD = (-0.1, float("nan"), float("inf"))


@pytest.mark.parametrize("mu", [*BAD, "1", True])
def test_a_bad_mu_in_a_message_is_refused(mu):
    model, said = nn.Linear(4, 3), "expected a finite number of at least 0, got"
    with pytest.raises(ValueError, match=f"proximal-mu: {said}"):
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
