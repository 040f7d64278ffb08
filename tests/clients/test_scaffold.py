"""SCAFFOLDClient against algorithm 1 written out."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import LocalSGD, NamedArrays, SCAFFOLDClient, SGDClient, get_weights

from ..conftest import refused
from ..strategies.federation import assert_near, bits
from .problem import X, Y, named, weights_of

GENERATOR = np.random.default_rng(0)


def client(model, **options):
    """A client of the 20 examples, in the model's precision."""
    dtype = next(model.parameters()).dtype
    own = SCAFFOLDClient(copy.deepcopy(model), X.to(dtype), Y, **options)
    own.targets = own.targets.to(dtype)
    return own


def filled(model, value=0.0):
    """An array of one number for each of the model's of floating point."""
    return {n: np.full_like(a, value) for n, a in weights_of(model).items() if a.dtype.kind == "f"}


def drawn(model):
    return {n: GENERATOR.normal(size=a.shape) for n, a in filled(model).items()}


def answer(own, corrections):
    """New weights and controls of a round."""
    message = named(arrays=weights_of(own.model), corrections=corrections)
    result, count, _ = own.fit(message, {})
    assert (count, list(result.records)) == (20, ["arrays", "controls"])
    return result.records["arrays"], result.records["controls"]


def gradient(weights):
    """Of the cross-entropy of all examples for nn.Linear(4, 3), by hand: (p - Y) x / n."""
    w, b = (torch.from_numpy(weights[name]) for name in ("weight", "bias"))
    x = X.double()
    residual = ((x @ w.T + b).softmax(1) - nn.functional.one_hot(Y, 3)) / len(x)
    return {"weight": (residual.T @ x).numpy(), "bias": residual.sum(0).numpy()}


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
    options = {"weight_decay": weight_decay, "momentum": momentum, "epochs": steps}
    sgd = LocalSGD(learning_rate=0.5, batch_size=20, **options)
    own = client(model, option=option, sgd=sgd)
    arrays, controls = answer(own, corrections)
    assert_near(arrays, weights, 1e-12, 1e-12)
    assert_near(controls, control, 1e-12, 1e-12)


@pytest.mark.parametrize("option", ["I", "II"])
def test_mini_batches_count_by_their_examples_or_as_steps(option):
    """2 epochs of batches of 6, 6, 6 and 2 make K = 8 steps: float64, 1e-11."""
    model = nn.Linear(4, 3).double()
    start, corrections = weights_of(model), drawn(model)
    own = client(model, option=option, sgd=LocalSGD(epochs=2, learning_rate=0.1, batch_size=6))
    arrays, controls = answer(own, corrections)
    moved = {n: -c + (start[n] - arrays[n]) / (8 * 0.1) for n, c in corrections.items()}
    assert_near(controls, gradient(start) if option == "I" else moved, 1e-11, 1e-11)


@pytest.mark.parametrize("option", ["I", "II"])
def test_without_corrections_the_weights_are_those_of_sgd_bit_for_bit(option):
    """With mini-batches, dropout, momentum and weight decay; option I adds nothing.

    Statistics of BatchNorm have controls of zero.
    """
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    sgd = LocalSGD(epochs=2, batch_size=3, momentum=0.9, weight_decay=0.1, learning_rate=0.1)
    options = {"sgd": sgd, "seed": (3, 1)}
    plain = SGDClient(copy.deepcopy(model), X, Y, **options)
    expected, *told = plain.fit(get_weights(model), {"server-round": 2})
    message = named(arrays=weights_of(model), corrections=filled(model))
    own = client(model, option=option, **options)
    result, *own_told = own.fit(message, {"server-round": 2})
    assert own_told == told
    arrays, controls = result.records["arrays"], result.records["controls"]
    assert bits(arrays) == bits(dict(zip(model.state_dict(), expected, strict=True)))
    assert controls.keys() == filled(model).keys()
    trained = {name for name, _ in model.named_parameters()}
    assert {name for name, control in controls.items() if control.any()} == trained


@pytest.mark.parametrize("option", ["I", "II"])
def test_frozen_and_unused_parameters_have_a_gradient_of_zero(option):
    """A frozen one is not corrected either; one that the loss does not know is."""
    model = nn.Linear(4, 3)
    model.spare = nn.Parameter(torch.ones(2))
    model.weight.requires_grad_(False)
    own = client(model, option=option, sgd=LocalSGD(batch_size=20, learning_rate=0.25))
    arrays, controls = answer(own, filled(model, 2))
    np.testing.assert_array_equal(arrays["weight"], weights_of(model)["weight"])
    np.testing.assert_array_equal(arrays["spare"], [0.5, 0.5])  # 1 - 0.25 * (0 + 2)
    assert [name for name, a in controls.items() if a.any()] == ["bias"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corrections": None}, "records corrections, got arrays; .* strategy SCAFFOLD"),
        ({"arrays": None}, "one record of weights beside corrections, got 0"),
        ({"more": {}}, "one record of weights beside corrections, got 2"),
        ({"corrections": {"weight": np.ones((3, 4))}}, r"differing in \['bias'\]"),
        ({"corrections": dict.fromkeys(("weight", "bias"), np.ones(3))}, r"in \['weight'\]"),
    ],
)
def test_other_records_are_refused(change, message):
    model = nn.Linear(4, 3)
    records = {"arrays": weights_of(model), "corrections": weights_of(model)} | change
    sent = {name: record for name, record in records.items() if record is not None}
    refused(message, client(model).fit, NamedArrays(sent), {})


def test_local_training_without_steps_with_a_proximal_term_or_adam_is_refused():
    for sgd, text in (
        (LocalSGD(epochs=0), "epochs: expected at least 1 with SCAFFOLD, got 0"),
        (LocalSGD(proximal_mu=0.1), "expected 0, got 0.1; SCAFFOLD has no proximal"),
        (LocalSGD(optimizer="adam"), "optimizer: expected sgd with SCAFFOLD, got adam"),
    ):
        refused(text, client, nn.Linear(4, 3), sgd=sgd)
