"""SGDClient against the update written out."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import SGDClient, get_weights

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


def client(model: nn.Module, **options: object) -> SGDClient:
    return SGDClient(model, X, Y, **options)


def test_one_full_batch_step_is_one_step_of_gradient_descent():
    """w - eta grad L(w): one epoch, the batch holds everything. float32: 1e-6."""
    model = nn.Linear(4, 3)
    start = get_weights(model)
    model.zero_grad()
    nn.functional.cross_entropy(model(X), Y).backward()
    expected = [w - 0.5 * p.grad.numpy() for w, p in zip(start, model.parameters(), strict=True)]
    arrays, count, metrics = client(model, learning_rate=0.5, batch_size=20, local_epochs=1).fit(
        start, {}
    )
    assert count == 20
    for actual, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)
    before = float(
        nn.functional.cross_entropy(nn.functional.linear(X, *map(torch.tensor, start)), Y)
    )
    assert metrics["train-loss"] == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_gradient_is_that_of_the_reported_loss(loss):
    """A step of size eta lowers the loss by eta |grad|^2 to first order; eta = 1e-3."""
    model = nn.Linear(4, 3).double()
    own = SGDClient(model, X.double(), Y, loss=loss, learning_rate=1e-3, batch_size=20)
    own.targets = own.targets.double()
    start = get_weights(model)
    after, _, first = own.fit(start, {})
    squared = sum(((a - b) ** 2).sum() for a, b in zip(after, start, strict=True)) / 1e-6
    _, _, second = own.fit(after, {})
    assert first["train-loss"] - second["train-loss"] == pytest.approx(1e-3 * squared, rel=0.01)


def test_no_epochs_send_the_weights_back():
    model = nn.Linear(4, 3)
    start = get_weights(model)
    arrays, _, _ = client(model, local_epochs=0).fit(start, {})
    for a, b in zip(arrays, start, strict=True):
        np.testing.assert_array_equal(a, b)


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


def test_batch_norm_keeps_its_counter_whole():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    arrays, _, _ = client(model, batch_size=10).fit(get_weights(model), {})
    assert [a.dtype for a in arrays] == [a.dtype for a in get_weights(model)]
