"""FedBE: the distributions over models, the distillation, and what it is in the limits."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import LocalSGD, SGDClient
from fedntk.ntk.averages import convex_combination, weighted_mean
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.predictors.network import arrays_of as arrays_of_network
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.strategies import Distillation, FedBE, Sampling, SeededFedAvg
from fedntk.strategies.core.averaging import cast_like
from fedntk.strategies.ensembles.distillation import descend, distil, sharpen
from fedntk.strategies.ensembles.model_samples import (
    dirichlet_shares,
    gaussian_model,
    mean_probabilities,
    standard_deviation,
)

from ..conftest import refused
from .federation import Contract, Grid, app, arrays_of, bits, network, start

OPTIONS = {"fraction_evaluate": 0.0}
CLIENTS = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))


def server_examples(n=30):
    """Like the clients', of all three classes and without labels."""
    generator = torch.Generator().manual_seed(99)
    classes = torch.arange(n) % 3
    return torch.randn(n, 4, generator=generator) + 2 * nn.functional.one_hot(classes, 4)


def distillation(**options):
    small = {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "final_learning_rate": 0.01}
    return Distillation(network(), server_examples(), **{**small, "cycle": 3, **options})


CONTRACT = {
    "FedBE": Contract(partial(FedBE, num_samples=3), CLIENTS, grows=True),
    "FedBE without the clients' models": Contract(
        partial(FedBE, num_samples=2, distribution="dirichlet", client_models=False),
        CLIENTS,
        grows=True,
    ),
    "FedBE with distillation": Contract(
        partial(FedBE, num_samples=3, distill=distillation()), CLIENTS
    ),
}
SIZES = [5, 20, 75]
DRAWS = np.random.default_rng(0)
MODELS = [
    {
        "weight": DRAWS.normal(size=(4, 5)).astype(np.float32),
        "bn.running_var": DRAWS.uniform(0.1, 2.0, 6).astype(np.float32),
        "bn.num_batches_tracked": np.array(10 * k, np.int64),
    }
    for k in range(3)
]
MEAN = cast_like(weighted_mean(MODELS, SIZES), MODELS[0])  # FedAvg's


def stacked(name):
    return np.stack([model[name] for model in MODELS]).astype(np.float64)


def test_moments_of_gaussian_models():
    """Of M = 4,000 models: the mean's standard deviation is s / sqrt(M), the variance's s^2
    sqrt(2 / M), a correlation's 1 / sqrt(M); bounds are five of them. FedAvg's mean in float32 adds
    3 roundings of 2^-24 of numbers below 4.
    """
    draws, rounding, generator = 4000, 3 * 4 * 2.0**-24, np.random.default_rng(1)
    deviation, centre = standard_deviation(MODELS, SIZES), arrays_of(MEAN)
    assert deviation.keys() == {"weight", "bn.running_var"}
    w = stacked("weight")
    mean = np.average(w, axis=0, weights=SIZES)
    variance = np.average((w - mean) ** 2, axis=0, weights=SIZES)
    np.testing.assert_allclose(deviation["weight"], np.sqrt(variance), rtol=1e-12)
    models = [gaussian_model(centre, deviation, MODELS, generator) for _ in range(draws)]
    drawn = np.stack([model["weight"] for model in models])
    assert (np.abs(drawn.mean(0) - mean) < 5 * np.sqrt(variance / draws) + rounding).all()
    spread = np.square(drawn - mean).mean(0)
    assert (np.abs(spread - variance) < 5 * variance * np.sqrt(2 / draws) + rounding).all()
    correlations = np.corrcoef(drawn.reshape(draws, -1).T)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(draws)


def test_running_variances_counters_and_ranges_of_gaussian_models():
    """With deviations of 100 half of the variances, with 6e4 some float16 would leave the range."""
    centre, half = arrays_of(MEAN), {"w": np.zeros(3, np.float16)}
    generator = np.random.default_rng(0)
    deviation = {n: np.full_like(a, 100) for n, a in standard_deviation(MODELS, SIZES).items()}
    for _ in range(50):
        drawn = arrays_of(cast_like(gaussian_model(centre, deviation, MODELS, generator), centre))
        assert (drawn["bn.running_var"] >= stacked("bn.running_var").min(0)).all()
        counter = drawn["bn.num_batches_tracked"]
        assert (counter.dtype, int(counter)) == (np.dtype(np.int64), 17)  # 0.2 x 10 + 0.75 x 20
        wide = gaussian_model(half, {"w": np.full(3, 6e4)}, [half], generator)
        assert np.isfinite(cast_like(wide, half)["w"].numpy()).all()


def test_moments_of_dirichlet_shares_of_equal_clients_and_the_limits_of_alpha():
    """Dir(a, ..., a) of N: mean 1/N, variance (1/N) (1 - 1/N) / (N a + 1) = v, to five standard
    deviations; the variance's is below v sqrt(4 / M), as the kurtosis of Beta(a, 3a) is below 4.
    gamma_i has the relative standard deviation sqrt((N - 1) / (N a + 1)) < 1e-6 at a = 1e12.
    """
    n, alpha, draws = 4, 2.0, 4000
    generator = np.random.default_rng(0)
    drawn = np.stack([dirichlet_shares([7] * n, alpha, generator) for _ in range(draws)])
    variance = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    assert np.abs(drawn.mean(0) - 1 / n).max() < 5 * np.sqrt(variance / draws)
    assert np.abs(drawn.var(0) / variance - 1).max() < 5 * np.sqrt(4 / draws)
    np.testing.assert_allclose(dirichlet_shares(SIZES, 1e12, generator), [0.05, 0.2, 0.75], 12e-6)
    shares = dirichlet_shares(SIZES, 1e-6, generator)
    assert shares.sum() == pytest.approx(1, rel=4e-15)
    for name, array in convex_combination(MODELS, shares.tolist()).items():
        expected = np.average(stacked(name), axis=0, weights=shares)
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-14)


def test_models_are_drawn_by_seed_round_and_number():
    """Model k is the same whatever M; another round or seed draws others."""
    uploads = SimpleNamespace(values=MODELS, counts=SIZES)

    def drawn(server_round=1, **options):
        strategy, r = FedBE(client_models=False, **options), SimpleNamespace(number=server_round)
        mean, *models = strategy.models_of(r, MEAN, uploads)
        assert mean is MEAN
        return [arrays_of(model)["weight"].tobytes() for model in models]

    two, five = drawn(num_samples=2), drawn(num_samples=5)
    others = [*drawn(num_samples=2, sampling=Sampling(seed=1)), *drawn(2, num_samples=2)]
    assert five[:2] == two
    assert len({*five, *others}) == 9


def teachers_labels(n=30):
    models = [arrays_of_network(network(seed)) for seed in range(5)]
    return sharpen(mean_probabilities(network(), models, server_examples(n)), 0.5)


def test_labels_are_the_sharpened_mean_of_probabilities():
    """In float64, of outputs in float32."""
    x = server_examples()
    each = [network(k).eval()(x).detach().double().softmax(1) for k in range(5)]
    squares = torch.stack(each).mean(0) ** 2
    expected = squares / squares.sum(1, keepdim=True)
    torch.testing.assert_close(teachers_labels(), expected, rtol=0, atol=4e-15)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 2.0])
def test_sharpened_labels_are_powers(temperature):
    """At T = 1 what they were, near 0 all of the most likely class."""
    rows = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]
    probabilities = torch.tensor(rows, dtype=torch.float64)
    powers = probabilities.numpy() ** (1 / temperature)
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(sharpen(probabilities, temperature), expected, atol=1e-15)


def test_averaged_weights_are_the_mean_of_iterates():
    """At the ends of cycles after the start, and after the last step, which may end none.

    In float64, of 7; a running mean in float32 is off by 7 x 3 x 4 x 2^-24 < 1e-5.
    """
    assert [k for k in range(1, 19) if distillation(cycle=4).is_averaged(k, 18)] == [8, 12, 16, 18]
    labels, options = teachers_labels(), distillation(epochs=6, cycle=3, swa_start=0.2)
    student, generator = network(7), torch.Generator().manual_seed(5)
    states = [
        {name: p.detach().double().clone() for name, p in student.named_parameters()}
        for _ in descend(student, labels, options, generator)
    ]
    assert len(states) == 24  # of which 0.2 are 4.8
    ends = [6, 9, 12, 15, 18, 21, 24]
    for name, parameter in distil(network(7), labels, options, seed=5).named_parameters():
        expected = torch.stack([states[k - 1][name] for k in ends]).mean(0)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=1e-5)
    plain = distil(network(7), labels, distillation(epochs=6, cycle=3, swa=False), seed=5)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.detach().double(), states[-1][name])


def test_batchnorm_gets_the_statistics_of_all_examples_under_the_averaged_weights():
    """Batches are of one size: the mean of their means is that of all examples."""
    x = server_examples(32)
    options = Distillation(network(), x, epochs=3, batch_size=8, learning_rate=0.05, cycle=3)
    student = distil(network(7), teachers_labels(32), options, seed=0)
    inputs = student[0](x).detach()
    torch.testing.assert_close(student[1].running_mean, inputs.mean(0), rtol=1e-5, atol=1e-6)
    assert int(student[1].num_batches_tracked) == 4
    # 25 examples in batches of 8: the last joins the one before, as BatchNorm cannot normalise one
    uneven = Distillation(network(), server_examples(25), epochs=2, batch_size=8)
    steps = list(descend(network(), teachers_labels(25), uneven, torch.Generator()))
    assert steps == [(k, 6) for k in range(1, 7)]


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


def test_distillation_of_a_network_that_draws_repeats_itself_and_leaves_torchs_state():
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    options = Distillation(net, server_examples(), epochs=2, batch_size=8, learning_rate=0.1)
    students = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(students))
        before = torch.get_rng_state()
        student = distil(copy.deepcopy(net), teachers_labels(), options, seed)
        students.append(bits(arrays_of_network(student)))
        assert torch.equal(before, torch.get_rng_state())
    assert students[0] == students[1] != students[2]


def fed_avgs(rounds):
    return start(SeededFedAvg(**OPTIONS), Grid(CLIENTS), rounds)


@pytest.mark.parametrize(
    ("options", "models"),
    [
        ({"num_samples": 0, "client_models": False}, 1),
        ({"num_samples": 4, "distribution": "dirichlet"}, 1 + 4 + 6),
    ],
)
def test_without_distillation_the_global_model_is_fedavgs(options, models):
    """Whatever is drawn: model 0 after two rounds, bit for bit."""
    strategy = FedBE(**options, **OPTIONS)
    after = EnsembleArrays.from_arrays(start(strategy, Grid(CLIENTS), rounds=2)).models
    assert bits(after[0]) == bits(fed_avgs(2))
    assert strategy.train_metrics[2]["ensemble-size"] == len(after) == models


def test_the_server_distils_from_the_mean_towards_the_ensemble():
    """At a rate of 1e-9 it stays the mean; at 1e30 it diverges, and the mean is taken."""
    strategy = FedBE(distill=distillation(epochs=10), **OPTIONS)
    after = start(strategy, Grid(CLIENTS), rounds=2)
    assert (strategy.learned, list(after)) == ("network", list(network().state_dict()))
    for metrics in strategy.train_metrics.values():
        assert (metrics["distilled"], metrics["ensemble-size"]) == (1, 17)
        assert metrics["distillation-loss"] < metrics["distillation-loss-before"]
    slow = distillation(learning_rate=1e-9, final_learning_rate=1e-9)
    after = start(FedBE(distill=slow, **OPTIONS), Grid(CLIENTS))
    mean = fed_avgs(1)
    for name, _ in network().named_parameters():
        np.testing.assert_allclose(after[name], mean[name], rtol=0, atol=1e-6)
    fast = distillation(learning_rate=1e30, final_learning_rate=1e30)
    strategy = FedBE(distill=fast, **OPTIONS)
    assert bits(start(strategy, Grid(CLIENTS), rounds=2)) == bits(fed_avgs(2))
    assert strategy.train_metrics[2]["distilled"] == 0


def test_a_network_of_several_outputs_in_training_is_refused():
    class Auxiliary(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            return (scores, scores) if self.training else scores

    said = "one tensor of scores in training mode, got a tuple"
    refused(said, Distillation, Auxiliary(4, 3), torch.randn(4, 4))


def test_a_network_that_writes_over_its_input_leaves_the_servers_examples():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x.sub_(1))

    x = torch.randn(4, 4)
    before, options = x.clone(), Distillation(Shifted(4, 3), x, epochs=2)
    distil(copy.deepcopy(options.network), torch.full((4, 3), 1 / 3), options, seed=0)
    assert torch.equal(x, before)


def test_another_network_or_state_than_the_distillations_is_refused_before_the_first_round():
    strategy = FedBE(distill=Distillation(nn.Linear(4, 3), server_examples()), **OPTIONS)
    said = "initial_arrays: expected those of the network that dist"
    refused(said, start, strategy, grid := Grid(CLIENTS))
    assert grid.trained == []
    state, other = FedBE(distill=distillation()).state_dict(), distillation(temperature=1.0)
    refused(r"expected distill\.temperature = ", FedBE(distill=other).load_state_dict, state)


def test_the_server_gets_no_labels_and_no_clients_examples():
    config = Config(method="fed-be", validation_examples=50, **{"fed_be.distill": True})
    setup = load_setup(config)
    x, _ = setup.data.train(setup.split.validation)
    assert torch.equal(make_strategy(setup).distill.examples, x)
    assert config.chosen_method.validates(config)
    without = config.replace(fed_be={"distill": False})
    assert not without.chosen_method.validates(without)
    held = set(setup.split.validation.tolist())
    assert all(held.isdisjoint(client.tolist()) for client in setup.split.clients)
