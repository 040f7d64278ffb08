"""SCAFFOLDClient against algorithm 1 written out."""

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedntk.clients import NamedArrays, SCAFFOLDClient, SGDClient, get_weights

from ..strategies.federation import bits

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
GENERATOR = np.random.default_rng(0)
Arrays = dict[str, NDArray[np.floating]]


def client(model: nn.Module, **options: object) -> SCAFFOLDClient:
    """A client of the 20 examples, in the model's precision."""
    dtype = next(model.parameters()).dtype
    own = SCAFFOLDClient(copy.deepcopy(model), X.to(dtype), Y, **options)
    own.targets = own.targets.to(dtype)
    return own


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def weights_of(model: nn.Module) -> Arrays:
    return dict(zip(model.state_dict(), get_weights(model), strict=True))


def zeros(model: nn.Module) -> Arrays:
    return {n: np.zeros_like(a) for n, a in weights_of(model).items() if a.dtype.kind == "f"}


def drawn(model: nn.Module) -> Arrays:
    return {n: GENERATOR.normal(size=a.shape).astype(a.dtype) for n, a in zeros(model).items()}


def sent(model: nn.Module, corrections: Arrays) -> NamedArrays:
    return NamedArrays({"arrays": weights_of(model), "corrections": corrections})


def answer(own: SCAFFOLDClient, corrections: Arrays | None = None) -> tuple[Arrays, Arrays]:
    """New weights and controls of a round."""
    corrections = zeros(own.model) if corrections is None else corrections
    result, count, _ = own.fit(sent(own.model, corrections), {})
    assert count == 20
    assert list(result.records) == ["arrays", "controls"]
    assert list(result.records["arrays"]) == list(own.model.state_dict())
    assert list(result.records["controls"]) == list(zeros(own.model))
    return result.records["arrays"], result.records["controls"]


def gradient(weights: Arrays) -> Arrays:
    """Of the cross-entropy of all examples for nn.Linear(4, 3), by hand: (p - Y) x / n."""
    x, targets = X.double().numpy(), np.eye(3)[Y.numpy()]
    outputs = x @ weights["weight"].T + weights["bias"]
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    residual = (p / p.sum(1, keepdims=True) - targets) / len(x)
    return {"weight": residual.T @ x, "bias": residual.sum(0)}


def assert_near(found: Arrays, expected: Arrays, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("option", "steps", "weight_decay", "momentum"),
    [("I", 3, 0.2, 0.0), ("II", 3, 0.2, 0.0), ("I", 1, 0.0, 0.0), ("II", 3, 0.0, 0.9)],
)
def test_full_batch_steps_and_both_controls_by_the_formulas(option, steps, weight_decay, momentum):
    """Steps y <- y - eta v, v <- momentum v + g(y) + lambda y - c_i + c in float64: 1e-12.

    Option I is the gradient at x. Option II is the mean of g(y) + lambda y, also with momentum;
    without it that is c_i - c + (x - y) / (K eta).
    """
    model = nn.Linear(4, 3).double()
    start, corrections = weights_of(model), drawn(model)
    weights, velocity, met = start, dict.fromkeys(start, 0.0), []
    for _ in range(steps):
        slopes = gradient(weights)
        met.append({n: g + weight_decay * weights[n] for n, g in slopes.items()})
        velocity = {n: momentum * velocity[n] + g + corrections[n] for n, g in met[-1].items()}
        weights = {n: w - 0.5 * velocity[n] for n, w in weights.items()}
    control = met[0] if option == "I" else {n: sum(g[n] for g in met) / steps for n in start}
    options = {"weight_decay": weight_decay, "momentum": momentum, "local_epochs": steps}
    own = client(model, option=option, learning_rate=0.5, batch_size=20, **options)
    arrays, controls = answer(own, corrections)
    assert_near(arrays, weights, 1e-12)
    assert_near(controls, control, 1e-12)


def test_option_two_of_mini_batches_is_the_difference_of_the_weights():
    """2 epochs of batches of 6, 6, 6 and 2 make K = 8 steps, each counting once: float64, 1e-11."""
    model = normalising().double()
    start, corrections = weights_of(model), drawn(model)
    own = client(model, learning_rate=0.1, batch_size=6, local_epochs=2)
    arrays, controls = answer(own, corrections)
    trained = dict(model.named_parameters())
    expected = {
        n: -c + (start[n] - arrays[n]) / (8 * 0.1) if n in trained else np.zeros_like(c)
        for n, c in corrections.items()
    }
    assert_near(controls, expected, 1e-11)


@pytest.mark.parametrize("option", ["I", "II"])
def test_without_corrections_the_weights_are_those_of_sgd_bit_for_bit(option):
    """With mini-batches, BatchNorm, dropout, momentum and weight decay; option I adds nothing."""
    model = nn.Sequential(*normalising(), nn.Dropout(0.5), nn.Linear(3, 3))
    options = {
        "batch_size": 3, "local_epochs": 2, "momentum": 0.9, "weight_decay": 0.1,
        "learning_rate": 0.1, "seed": (3, 1),
    }  # fmt: skip
    config = {"server-round": 2}
    plain = SGDClient(copy.deepcopy(model), X, Y, **options)
    expected, _, metrics = plain.fit(get_weights(model), config)
    own = client(model, option=option, **options)
    result, _, own_metrics = own.fit(sent(model, zeros(model)), config)
    assert own_metrics == metrics
    arrays = result.records["arrays"]
    assert bits(arrays) == bits(dict(zip(arrays, expected, strict=True)))


def test_option_one_weights_mini_batches_by_their_examples():
    """Batches of 8, 8 and 4 of a linear model: the gradient of all 20, in float64 to 1e-13."""
    model = nn.Linear(4, 3).double()
    _, controls = answer(client(model, option="I", batch_size=8))
    assert_near(controls, gradient(weights_of(model)), 1e-13)


@pytest.mark.parametrize("option", ["I", "II"])
def test_frozen_and_unused_parameters_have_a_gradient_of_zero(option):
    """A frozen one is not corrected either; one that the loss does not know is."""

    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.spare = nn.Parameter(torch.ones(2))

    model = Spare()
    model.weight.requires_grad_(False)
    own = client(model, option=option, batch_size=20, learning_rate=0.25)
    twos = {name: np.full_like(a, 2) for name, a in zeros(model).items()}
    arrays, controls = answer(own, twos)
    np.testing.assert_array_equal(arrays["weight"], weights_of(model)["weight"])
    np.testing.assert_array_equal(arrays["spare"], [0.5, 0.5])  # 1 - 0.25 * (0 + 2)
    assert [bool(a.any()) for a in controls.values()] == [n == "bias" for n in controls]


def test_what_has_no_place_in_scaffold_is_refused():
    with pytest.raises(ValueError, match="local_epochs: expected at least 1 with SCAFFOLD, got 0"):
        client(nn.Linear(4, 3), local_epochs=0)
    with pytest.raises(ValueError, match="proximal_mu: expected 0, as SCAFFOLD has no proximal"):
        client(nn.Linear(4, 3), proximal_mu=0.1)
    own = client(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="proximal-mu: expected 0, as SCAFFOLD"):
        own.fit(sent(own.model, zeros(own.model)), {"proximal-mu": 0.5})


@pytest.mark.parametrize(
    ("records", "text"),
    [
        (lambda w: {"arrays": w}, "records corrections, got arrays; .* from the strategy SCAFFOLD"),
        (lambda w: {"corrections": w}, "one record of weights beside corrections, got 0"),
        (lambda w: dict.fromkeys(("arrays", "corrections", "more"), w), "corrections, got 2"),
        (lambda w: {"arrays": {"weight": 0}, "corrections": w}, "the model has 2 arrays, got 1"),
        (lambda w: {"arrays": w, "corrections": w | {"odd": 0}}, r"differing in \['odd'\]"),
        (
            lambda w: {"arrays": w, "corrections": w | {"bias": w["weight"]}},
            r"correction of bias: expected the shape \(3,\), got",
        ),
    ],
)
def test_bad_messages_are_refused(records, text):
    own = client(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=text):
        own.fit(NamedArrays(records(weights_of(own.model))), {})
