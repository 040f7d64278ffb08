"""SCAFFOLDClient against algorithm 1 written out."""

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedntk.clients import NamedArrays, SCAFFOLDClient, SGDClient, get_weights

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
GENERATOR = np.random.default_rng(0)


def client(model: nn.Module, **options: object) -> SCAFFOLDClient:
    """A client of the 20 examples, in the model's precision."""
    dtype = next(model.parameters()).dtype
    own = SCAFFOLDClient(copy.deepcopy(model), X.to(dtype), Y, **options)
    own.targets = own.targets.to(dtype)
    return own


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def zeros(model: nn.Module) -> list[NDArray[np.floating]]:
    return [np.zeros_like(a) for a in get_weights(model) if a.dtype.kind == "f"]


def names(model: nn.Module) -> list[str]:
    """Names of the arrays of floating point."""
    return [n for n, t in model.state_dict().items() if t.is_floating_point()]


def sent(
    model: nn.Module,
    weights: list[NDArray[np.floating]],
    corrections: list[NDArray[np.floating]],
) -> NamedArrays:
    """A message's arrays, as the strategy names them."""
    return NamedArrays(
        {
            "arrays": dict(zip(model.state_dict(), weights, strict=True)),
            "corrections": dict(zip(names(model), corrections, strict=True)),
        }
    )


def answer(
    own: SCAFFOLDClient, message: NamedArrays, config: dict[str, object]
) -> tuple[list[NDArray[np.floating]], list[NDArray[np.floating]], int, dict[str, object]]:
    """New weights and controls in the model's order; they must be named."""
    result, count, metrics = own.fit(message, config)
    assert isinstance(result, NamedArrays)
    assert list(result.records) == ["arrays", "controls"]
    assert list(result.records["arrays"]) == list(own.model.state_dict())
    assert list(result.records["controls"]) == names(own.model)
    weights, controls = (list(record.values()) for record in result.records.values())
    return weights, controls, count, metrics


def gradient(weights: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Of the cross-entropy of all examples for nn.Linear(4, 3), by hand: (p - Y) x / n."""
    x, targets = X.double().numpy(), np.eye(3)[Y.numpy()]
    outputs = x @ weights[0].T + weights[1]
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    residual = (p / p.sum(1, keepdims=True) - targets) / len(x)
    return [residual.T @ x, residual.sum(0)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("steps", [1, 3])
def test_full_batch_steps_and_both_controls_by_the_formulas(option, weight_decay, steps):
    """Steps y <- y - eta (g(y) + lambda y - c_i + c) in float64: 1e-12.

    Option I is the gradient at x, option II is c_i - c + (x - y) / (K eta): the same for K = 1.
    """
    model = nn.Linear(4, 3).double()
    start = get_weights(model)
    corrections = [GENERATOR.normal(size=a.shape) for a in start]
    weights = [a.copy() for a in start]
    for _ in range(steps):
        weights = [
            w - 0.5 * (g + weight_decay * w + d)
            for w, g, d in zip(weights, gradient(weights), corrections, strict=True)
        ]
    if option == "I":
        control = [g + weight_decay * w for g, w in zip(gradient(start), start, strict=True)]
    else:
        control = [
            -d + (x - y) / (steps * 0.5)
            for d, x, y in zip(corrections, start, weights, strict=True)
        ]
    own = client(
        model, option=option, learning_rate=0.5, batch_size=20, local_epochs=steps,
        weight_decay=weight_decay,
    )  # fmt: skip
    arrays, controls, count, _ = answer(own, sent(model, start, corrections), {})
    assert count == 20
    for actual, wanted in zip([*arrays, *controls], [*weights, *control], strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-12)


def test_option_two_of_mini_batches_is_the_difference_of_the_weights():
    """2 epochs of batches of 6, 6, 6 and 2 make K = 8 steps, each counting once: float64, 1e-11."""
    model = normalising().double()
    start = get_weights(model)
    corrections = [GENERATOR.normal(size=a.shape) for a in zeros(model)]
    own = client(model, learning_rate=0.1, batch_size=6, local_epochs=2)
    arrays, controls, _, _ = answer(own, sent(model, start, corrections), {})
    weights = dict(zip(model.state_dict(), zip(start, arrays, strict=True), strict=True))
    trained = dict(model.named_parameters())
    for name, control, correction in zip(names(model), controls, corrections, strict=True):
        if name in trained:
            before, after = weights[name]
            wanted = -correction + (before - after) / (8 * 0.1)
            np.testing.assert_allclose(control, wanted, rtol=1e-11, atol=1e-11)
        else:
            assert not control.any(), name


@pytest.mark.parametrize("option", ["I", "II"])
def test_without_corrections_the_weights_are_those_of_sgd_bit_for_bit(option):
    """With mini-batches, BatchNorm, dropout, momentum and weight decay."""
    model = nn.Sequential(*normalising(), nn.Dropout(0.5), nn.Linear(3, 3))
    options = {
        "batch_size": 3, "local_epochs": 2, "momentum": 0.9, "weight_decay": 0.1,
        "learning_rate": 0.1, "seed": (3, 1),
    }  # fmt: skip
    start = get_weights(model)
    config = {"server-round": 2}
    plain, _, metrics = SGDClient(copy.deepcopy(model), X, Y, **options).fit(start, config)
    own = client(model, option=option, **options)
    arrays, _, _, own_metrics = answer(own, sent(model, start, zeros(model)), config)
    assert own_metrics == metrics
    for a, b in zip(arrays, plain, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_option_one_weights_mini_batches_by_their_examples():
    """Batches of 8, 8 and 4 of a linear model: the gradient of all 20, in float64 to 1e-13."""
    model = nn.Linear(4, 3).double()
    start = get_weights(model)
    own = client(model, option="I", batch_size=8)
    _, controls, _, _ = answer(own, sent(model, start, zeros(model)), {})
    for actual, wanted in zip(controls, gradient(start), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-13, atol=1e-13)


def test_option_one_leaves_the_statistics_of_training():
    model = normalising()
    start = get_weights(model)
    arrays = sent(model, start, zeros(model))
    first = answer(client(model, option="I", batch_size=5), arrays, {})[0]
    second = answer(client(model, option="II", batch_size=5), arrays, {})[0]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_frozen_parameters_are_neither_corrected_nor_controlled():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    start = get_weights(model)
    corrections = [np.ones_like(a) for a in start]
    own = client(model, batch_size=20)
    result, _, _ = own.fit(sent(model, start, corrections), {})
    np.testing.assert_array_equal(result.records["arrays"]["0.weight"], start[0])
    assert not result.records["controls"]["0.weight"].any()
    assert result.records["controls"]["0.bias"].any()


@pytest.mark.parametrize("option", ["I", "II"])
def test_a_parameter_that_the_loss_does_not_know_has_a_gradient_of_zero(option):
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.spare = nn.Parameter(torch.ones(2))

    model = Spare()
    start = get_weights(model)
    index = list(model.state_dict()).index("spare")
    corrections = zeros(model)
    corrections[index] += 2.0
    own = client(model, option=option, batch_size=20, learning_rate=0.25)
    result, _, _ = own.fit(sent(model, start, corrections), {})
    np.testing.assert_array_equal(
        result.records["arrays"]["spare"],
        [0.5, 0.5],  # 1 - 0.25 * (0 + 2)
    )
    np.testing.assert_array_equal(result.records["controls"]["spare"], [0.0, 0.0])


def test_momentum_is_of_the_corrected_gradients_and_the_control_still_their_mean():
    """Heavy ball by hand, three full-batch steps in float64: 1e-12."""
    model = nn.Linear(4, 3).double()
    start = get_weights(model)
    corrections = [GENERATOR.normal(size=a.shape) for a in start]
    weights, velocity = [a.copy() for a in start], [0.0, 0.0]
    sums = [0.0, 0.0]
    for _ in range(3):
        gradients = gradient(weights)
        sums = [s + g for s, g in zip(sums, gradients, strict=True)]
        velocity = [
            0.9 * v + g + d for v, g, d in zip(velocity, gradients, corrections, strict=True)
        ]
        weights = [w - 0.5 * v for w, v in zip(weights, velocity, strict=True)]
    own = client(model, momentum=0.9, learning_rate=0.5, batch_size=20, local_epochs=3)
    arrays, controls, _, _ = answer(own, sent(model, start, corrections), {})
    means = [s / 3 for s in sums]
    for actual, wanted in zip([*arrays, *controls], [*weights, *means], strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_epochs": 0}, "local_epochs: expected at least 1 with SCAFFOLD, got 0"),
        ({"proximal_mu": 0.1}, "proximal_mu: expected 0, as SCAFFOLD has no proximal term, got"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        client(nn.Linear(4, 3), **options)


def test_bad_messages_are_refused():
    own = client(nn.Linear(4, 3))
    weight, bias = get_weights(own.model)
    weights = {"weight": weight, "bias": bias}
    good = {"arrays": weights, "corrections": weights}
    with pytest.raises(ValueError, match=r"expected NamedArrays .* SCAFFOLD, .* got a list"):
        own.fit([weight, bias], {})
    for records, text in (
        ({"arrays": weights}, "records corrections, got arrays; .* from the strategy SCAFFOLD"),
        ({"corrections": weights}, "one record of weights beside corrections, got 0"),
        ({**good, "more": weights}, "one record of weights beside corrections, got 2"),
        ({**good, "arrays": {"weight": weight}}, "the model has 2 arrays, got 1"),
        ({**good, "corrections": {"weight": weight}}, r"differing in \['bias'\]"),
        ({**good, "corrections": {**weights, "odd": bias}}, r"differing in \['odd'\]"),
        (
            {**good, "corrections": {"weight": weight, "bias": weight}},
            r"correction of bias: expected the shape \(3,\), got",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            own.fit(NamedArrays(records), {})
    with pytest.raises(ValueError, match="proximal-mu: expected 0, as SCAFFOLD"):
        own.fit(NamedArrays(good), {"proximal-mu": 0.5})


def test_corrections_are_found_by_their_names_wherever_they_stand():
    """In another order, before the weights, and with the weights' record called otherwise."""
    model = normalising()
    start = get_weights(model)
    corrections = [GENERATOR.normal(size=a.shape).astype(np.float32) for a in zeros(model)]
    message = sent(model, start, corrections)
    expected, _, _ = client(model, batch_size=20).fit(message, {})
    turned = {
        "corrections": dict(reversed(message.records["corrections"].items())),
        "model": message.records["arrays"],
    }
    found, _, _ = client(model, batch_size=20).fit(NamedArrays(turned), {})
    assert list(found.records) == ["model", "controls"]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
