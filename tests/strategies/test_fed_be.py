"""FedBE: the distributions over models, the distillation, and what it is in the limits."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import SGDClient
from fedntk.ntk.averages import convex_combination, weighted_mean
from fedntk.ntk.payloads import EnsembleArrays
from fedntk.ntk.predictors.network import arrays_of
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.errors import ConfigError
from fedntk.strategies import Distillation, FedBE, SeededFedAvg
from fedntk.strategies.core.averaging import cast_like
from fedntk.strategies.ensembles.distillation import descend, distil, sharpened
from fedntk.strategies.ensembles.model_samples import (
    dirichlet_shares,
    gaussian_model,
    mean_probabilities,
    standard_deviation,
)

from .federation import Contract, Grid, app, bits, network, start, with_arrays
from .federation import arrays_of as arrays_in

OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0}
CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)


def server_examples(n: int = 30) -> torch.Tensor:
    """Like the clients', of all three classes and without labels."""
    generator = torch.Generator().manual_seed(99)
    classes = torch.arange(n) % 3
    return torch.randn(n, 4, generator=generator) + 2 * nn.functional.one_hot(classes, 4)


def distillation(**options: Any) -> Distillation:
    small = {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "final_learning_rate": 0.01}
    return Distillation(network(), server_examples(), **{**small, "cycle": 3, **options})


CONTRACT = {
    "FedBE": Contract(lambda **options: FedBE(num_samples=3, **options), CLIENTS, grows=True),
    "FedBE without the clients' models": Contract(
        lambda **options: FedBE(
            num_samples=2, distribution="dirichlet", client_models=False, **options
        ),
        CLIENTS,
        grows=True,
    ),
    "FedBE with distillation": Contract(
        lambda **options: FedBE(num_samples=3, distill=distillation(), **options), CLIENTS
    ),
}


# ------------------------------------------------------------------- distributions

SIZES = [5, 20, 75]
SHARES = np.array(SIZES) / 100


def three_models(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Models of three clients, with BatchNorm's statistics and counter."""
    generator = np.random.default_rng(seed)
    return [
        {
            "weight": generator.normal(size=(4, 5)).astype(np.float32),
            "bn.running_var": generator.uniform(0.1, 2.0, 6).astype(np.float32),
            "bn.num_batches_tracked": np.array(10 * k, np.int64),
        }
        for k in range(3)
    ]


def stacked(models: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.stack([model[name] for model in models]).astype(np.float64)


def weighted(models: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """FedAvg's mean."""
    return arrays_in(cast_like(weighted_mean(models, SIZES), models[0]))


def test_moments_of_gaussian_models():
    """Of M = 4,000 models: the mean's standard deviation is s / sqrt(M), the variance's s^2
    sqrt(2 / M), a correlation's 1 / sqrt(M); bounds are five of them. FedAvg's mean in float32 adds
    3 roundings of 2^-24 of numbers below 4.
    """
    models, draws, rounding = three_models(), 4000, 3 * 4 * 2.0**-24
    deviation, generator = standard_deviation(models, SIZES), np.random.default_rng(1)
    assert deviation.keys() == {"weight", "bn.running_var"}
    w = stacked(models, "weight")
    mean = np.average(w, axis=0, weights=SIZES)
    variance = np.average((w - mean) ** 2, axis=0, weights=SIZES)
    np.testing.assert_allclose(deviation["weight"], np.sqrt(variance), rtol=1e-12)
    arguments = weighted(models), deviation, models, generator
    drawn = np.stack([gaussian_model(*arguments)["weight"] for _ in range(draws)])
    assert (np.abs(drawn.mean(0) - mean) < 5 * np.sqrt(variance / draws) + rounding).all()
    found = np.square(drawn - mean).mean(0)
    assert (np.abs(found - variance) < 5 * variance * np.sqrt(2 / draws) + rounding).all()
    correlations = np.corrcoef(drawn.reshape(draws, -1).T)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(draws)


def test_running_variances_counters_and_ranges_of_gaussian_models():
    """Deviations of 100 about means of 1: without the bound half of the variances were negative.

    And deviations of 6e4 about 0 in float16, of which some would be infinite.
    """
    models, half = three_models(), {"w": np.zeros(3, np.float16)}
    centre, generator = weighted(models), np.random.default_rng(0)
    deviation = {n: np.full_like(a, 100) for n, a in standard_deviation(models, SIZES).items()}
    for _ in range(50):
        drawn = arrays_in(cast_like(gaussian_model(centre, deviation, models, generator), centre))
        assert (drawn["bn.running_var"] >= stacked(models, "bn.running_var").min(0)).all()
        counter = drawn["bn.num_batches_tracked"]
        assert (counter.dtype, int(counter)) == (np.dtype(np.int64), 17)  # 0.2 x 10 + 0.75 x 20
        wide = gaussian_model(half, {"w": np.full(3, 6e4)}, [half], generator)
        assert np.isfinite(cast_like(wide, half)["w"].numpy()).all()


def test_moments_of_dirichlet_shares_of_equal_clients():
    """Dir(a, ..., a) of N: mean 1/N, variance (1/N) (1 - 1/N) / (N a + 1) = v, to five standard
    deviations; the variance's is below v sqrt(4 / M), as the kurtosis of Beta(a, 3a) is below 4.
    """
    n, alpha, draws = 4, 2.0, 4000
    generator = np.random.default_rng(0)
    drawn = np.stack([dirichlet_shares([7] * n, alpha, generator) for _ in range(draws)])
    variance = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    assert np.abs(drawn.mean(0) - 1 / n).max() < 5 * np.sqrt(variance / draws)
    assert np.abs(drawn.var(0) / variance - 1).max() < 5 * np.sqrt(4 / draws)


@pytest.mark.parametrize("alpha", [1e-6, 1e12])
def test_dirichlet_shares_are_a_convex_combination_and_with_a_large_alpha_the_mean(alpha):
    """gamma_i has the relative standard deviation sqrt((N - 1) / (N alpha + 1)) < 1e-6 then."""
    generator = np.random.default_rng(0)
    shares = np.stack([dirichlet_shares(SIZES, alpha, generator) for _ in range(50)])
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(1), 1, rtol=4e-15)
    if alpha == 1e12:
        np.testing.assert_allclose(shares, [SHARES] * 50, rtol=2 * 6e-6)
    models = three_models()
    for name, array in convex_combination(models, shares[0].tolist()).items():
        expected = np.average(stacked(models, name), axis=0, weights=shares[0])
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------ predictions and labels


def ensemble_of(count: int) -> list[dict[str, np.ndarray]]:
    return [arrays_of(network(seed)) for seed in range(count)]


def test_prediction_is_the_mean_of_probabilities():
    """In float64, of outputs in float32."""
    found = mean_probabilities(network(), ensemble_of(4), x := server_examples())
    with torch.no_grad():
        own = [network(seed).eval()(x).double().softmax(1) for seed in range(4)]
    torch.testing.assert_close(found, torch.stack(own).mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 2.0])
def test_sharpened_labels_are_powers(temperature):
    """At T = 1 what they were, near 0 all of the most likely class."""
    rows = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]
    probabilities = torch.tensor(rows, dtype=torch.float64)
    powers = probabilities.numpy() ** (1 / temperature)
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(sharpened(probabilities, temperature), expected, atol=1e-15)


# ---------------------------------------------------------------------- distillation


def teachers_labels(n: int = 30) -> torch.Tensor:
    return sharpened(mean_probabilities(network(), ensemble_of(5), server_examples(n)), 0.5)


def test_weights_are_averaged_at_the_ends_of_cycles_and_after_the_last_step():
    options = distillation(cycle=4, swa_start=0.3)
    assert [s for s in range(1, 19) if options.is_averaged(s, 18)] == [8, 12, 16, 18]
    assert [s for s in range(1, 4) if options.is_averaged(s, 3)] == [3]


def test_averaged_weights_are_the_mean_of_the_iterates():
    """In float64, of 7; a running mean in float32 is off by 7 x 3 x 4 x 2^-24 < 1e-5."""
    labels, options = teachers_labels(), distillation(epochs=6, cycle=3, swa_start=0.2)
    student, generator = network(7), torch.Generator().manual_seed(5)
    states = [
        {name: p.detach().double().clone() for name, p in student.named_parameters()}
        for _ in descend(student, labels, options, generator)
    ]
    ends = [k for k in range(1, 25) if options.is_averaged(k, 24)]
    assert (len(states), len(ends)) == (24, 7)
    for name, found in distil(network(7), labels, options, seed=5).named_parameters():
        expected = torch.stack([states[k - 1][name] for k in ends]).mean(0)
        torch.testing.assert_close(found.detach().double(), expected, rtol=0, atol=1e-5)
    plain = distil(network(7), labels, distillation(epochs=6, cycle=3, swa=False), seed=5)
    for name, found in plain.named_parameters():
        assert torch.equal(found.detach().double(), states[-1][name])


def test_statistics_of_batchnorm_are_those_of_the_server_examples_under_the_averaged_weights():
    """Batches are of one size: the mean of their means is that of all examples."""
    x = server_examples(32)
    options = Distillation(network(), x, epochs=3, batch_size=8, learning_rate=0.05, cycle=3)
    student = distil(network(7), teachers_labels(32), options, seed=0)
    inputs = student[0](x).detach()
    torch.testing.assert_close(student[1].running_mean, inputs.mean(0), rtol=1e-5, atol=1e-6)
    assert int(student[1].num_batches_tracked) == 4
    assert (student[1].running_var > 0).all()


def test_steps_are_those_of_sgd_at_the_cycles_rates():
    """On a linear model in float64, with the gradient (p - q) x^T / n written out; full batches."""
    x = server_examples().double()
    options = Distillation(
        nn.Linear(4, 3).double(), x, epochs=7, batch_size=30, cycle=3, momentum=0.5,
        weight_decay=0.01, learning_rate=0.9, final_learning_rate=0.3,
    )  # fmt: skip
    labels, student = teachers_labels(), nn.Linear(4, 3).double()
    w, b = (p.detach().clone() for p in student.parameters())
    velocities = [torch.zeros_like(w), torch.zeros_like(b)]
    for step, _ in descend(student, labels, options, torch.Generator()):
        rate = (0.7, 0.5, 0.3)[(step - 1) % 3]
        errors = ((x @ w.T + b).softmax(1) - labels) / len(x)
        gradients = errors.T @ x + 0.01 * w, errors.sum(0) + 0.01 * b
        velocities = [0.5 * v + g for v, g in zip(velocities, gradients, strict=True)]
        w, b = w - rate * velocities[0], b - rate * velocities[1]
        torch.testing.assert_close(student.weight.detach(), w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(student.bias.detach(), b, rtol=1e-12, atol=1e-12)
    assert step == 7


def test_a_last_batch_of_one_joins_the_one_before():
    """25 examples in batches of 8: BatchNorm cannot normalise one."""
    options = Distillation(network(), server_examples(25), epochs=2, batch_size=8)
    labels = torch.full((25, 3), 1 / 3, dtype=torch.float64)
    steps = list(descend(network(), labels, options, torch.Generator().manual_seed(0)))
    assert steps == [(k, 6) for k in range(1, 7)]


def test_distillation_of_a_network_that_draws_repeats_itself_and_leaves_torchs_state():
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    options = Distillation(net, server_examples(), epochs=2, batch_size=8, learning_rate=0.1)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        student = distil(copy.deepcopy(net), teachers_labels(), options, seed)
        found.append(bits(arrays_of(student)))
        assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1] != found[2]


# -------------------------------------------------------------------------- the server


def fedavg(rounds: int = 1) -> dict[str, bytes]:
    return bits(start(SeededFedAvg(**OPTIONS), Grid(CLIENTS), rounds))


@pytest.mark.parametrize(
    ("options", "models"),
    [
        ({"num_samples": 0, "client_models": False}, 1),
        ({"num_samples": 4}, 1 + 4 + 6),
        ({"num_samples": 4, "distribution": "dirichlet"}, 1 + 4 + 6),
    ],
)
def test_without_distillation_the_global_model_is_fedavgs(options, models):
    """Whatever is drawn: model 0 after two rounds, bit for bit."""
    strategy = FedBE(**options, **OPTIONS)
    found = EnsembleArrays.from_arrays(start(strategy, Grid(CLIENTS), rounds=2)).models
    assert bits(found[0]) == fedavg(rounds=2)
    assert strategy.train_metrics[2]["ensemble-size"] == len(found) == models


def always(partition: int) -> Any:
    """Have a client reply with the same weights in each round."""
    generator = np.random.default_rng(partition)
    weights = {
        name: (array + 0.1 * generator.random(array.shape)).astype(array.dtype)
        for name, array in arrays_of(network()).items()
    }
    return with_arrays(lambda _: {n: np.asarray(a) for n, a in weights.items()})


def test_models_are_drawn_by_seed_round_and_number():
    """Of clients whose replies never change: model k is the same whatever M, else another."""

    def drawn(rounds: int = 1, **options: Any) -> list[bytes]:
        grid = Grid(CLIENTS, changes={partition: always(partition) for partition in range(6)})
        strategy = FedBE(client_models=False, **options, **OPTIONS)
        mean, *models = EnsembleArrays.from_arrays(start(strategy, grid, rounds)).models
        assert strategy.train_metrics[rounds]["replies-accepted"] == 6
        means.add(mean["0.weight"].tobytes())
        return [model["0.weight"].tobytes() for model in models]

    means: set[bytes] = set()
    two, five = drawn(num_samples=2), drawn(num_samples=5)
    assert five[:2] == two
    different = [*five, *drawn(num_samples=2, seed=1), *drawn(rounds=2, num_samples=2)]
    assert len(set(different)) == len(different) == 9
    assert len(means) == 1


def test_the_server_distils_from_the_mean_towards_the_ensemble():
    """Each round it ends nearer to the ensemble's labels; at a rate of 1e-9 it stays the mean."""
    strategy = FedBE(distill=distillation(epochs=10), **OPTIONS)
    after = start(strategy, Grid(CLIENTS), rounds=2)
    assert (strategy.learned, list(after)) == ("network", list(network().state_dict()))
    for metrics in strategy.train_metrics.values():
        assert (metrics["distilled"], metrics["ensemble-size"]) == (1, 17)
        assert metrics["distillation-loss"] < metrics["distillation-loss-before"]
    slow = distillation(learning_rate=1e-9, final_learning_rate=1e-9)
    after = start(FedBE(distill=slow, **OPTIONS), Grid(CLIENTS))
    mean = start(SeededFedAvg(**OPTIONS), Grid(CLIENTS))
    for name, _ in network().named_parameters():
        np.testing.assert_allclose(after[name], mean[name], rtol=0, atol=1e-6)


def test_a_distillation_that_diverges_leaves_the_mean():
    options = distillation(learning_rate=1e30, final_learning_rate=1e30)
    strategy = FedBE(distill=options, **OPTIONS)
    assert bits(start(strategy, Grid(CLIENTS), rounds=2)) == fedavg(rounds=2)
    assert strategy.train_metrics[2]["distilled"] == 0


def test_another_network_or_state_than_the_distillations_is_refused_before_the_first_round():
    strategy = FedBE(distill=Distillation(nn.Linear(4, 3), server_examples()), **OPTIONS)
    grid = Grid(CLIENTS)
    with pytest.raises(ValueError, match="initial_arrays: expected those of the network that dist"):
        start(strategy, grid)
    assert grid.trained == []
    state = FedBE(distill=distillation()).state_dict()
    with pytest.raises(ValueError, match="expected distill = "):
        FedBE(distill=distillation(temperature=1.0)).load_state_dict(state)


# ------------------------------------------------------------------- the simulations


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "validation-examples: expected at least 2 for the server to distil on, got 0; set it"),
        (
            {"validation_examples": 50, "loss": "mse"},
            "loss: expected cross-entropy with fed-be.distill, .*, got mse; set fed-be.distill =",
        ),
        (
            {"validation_examples": 50, "evaluate_on": "validation"},
            "evaluate-on: expected test with fed-be.distill, .* got validation; set evaluate-on =",
        ),
        ({"validation_examples": 50, "projection": 20}, "projection: expected 0 with fed-be.dist"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_cure(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(method="fed-be", **{"fed_be.distill": True, **settings})


def test_the_server_gets_no_labels_and_no_clients_examples():
    config = Config(method="fed-be", validation_examples=50, **{"fed_be.distill": True})
    setup = load_setup(config)
    x, _ = setup.data.train(setup.split.validation)
    assert torch.equal(make_strategy(setup).distill.examples, x)
    assert config.chosen_method.validates(config)
    without = config.replace(fed_be={"distill": False})
    assert not without.chosen_method.validates(without)
    held = set(setup.split.validation.tolist())
    assert all(held.isdisjoint(own.tolist()) for own in setup.split.clients)
