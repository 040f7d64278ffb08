"""FedBE: the distributions over models, the distillation, and what it is in the limits."""

import copy
from logging import WARNING
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedntk.clients import SGDClient
from fedntk.ntk import EnsemblePredictor, NetworkPredictor, loss_value
from fedntk.ntk.averages import convex_combination, weighted_mean
from fedntk.ntk.payloads import EnsembleArrays
from fedntk.ntk.predictors.network import arrays_of
from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.errors import ConfigError
from fedntk.strategies import Distillation, FedBE, SeededFedAvg
from fedntk.strategies.core.averaging import cast_like
from fedntk.strategies.ensembles.distillation import descend, distil, sharpened, soft_cross_entropy
from fedntk.strategies.ensembles.model_samples import (
    dirichlet_shares,
    gaussian_model,
    mean_probabilities,
    standard_deviation,
)

from .federation import (
    Contract,
    Grid,
    app,
    bits,
    examples,
    network,
    size,
    start,
    with_arrays,
)

OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0}
CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)


def server_examples(n: int = 30) -> torch.Tensor:
    """Like the clients', of all three classes and without labels."""
    generator = torch.Generator().manual_seed(99)
    classes = torch.arange(n) % 3
    return torch.randn(n, 4, generator=generator) + 2 * torch.nn.functional.one_hot(classes, 4)


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
    mean = cast_like(weighted_mean(models, SIZES), models[0])
    return {name: array.numpy() for name, array in mean.items()}


def test_standard_deviation_is_that_of_the_clients_weighted_by_examples():
    models = three_models()
    found = standard_deviation(models, SIZES)
    assert found.keys() == {"weight", "bn.running_var"}
    for name, array in found.items():
        w = stacked(models, name)
        mean = np.average(w, axis=0, weights=SIZES)
        expected = np.sqrt(np.average((w - mean) ** 2, axis=0, weights=SIZES))
        np.testing.assert_allclose(array, expected, rtol=1e-12)


def test_moments_of_gaussian_models():
    """Of M = 4,000 models. The mean's standard deviation is s / sqrt(M), and that of the variance
    about the known mean s^2 sqrt(2 / M), where s is the clients' in float64; bounds are five of
    them, which one in 1.7 million normal numbers exceeds, and there are 40. FedAvg's mean in
    float32 is off by 3 roundings of 2^-24 of numbers below 4, which is added. Coordinates are
    independent: a correlation of M pairs has the standard deviation 1 / sqrt(M).
    """
    models, draws = three_models(), 4000
    centre, deviation = weighted(models), standard_deviation(models, SIZES)
    generator = np.random.default_rng(1)
    drawn = np.stack(
        [gaussian_model(centre, deviation, models, generator)["weight"] for _ in range(draws)]
    )
    w = stacked(models, "weight")
    mean = np.average(w, axis=0, weights=SIZES)
    variance = np.average((w - mean) ** 2, axis=0, weights=SIZES)
    rounding = 3 * 4 * 2.0**-24
    assert (np.abs(drawn.mean(0) - mean) < 5 * np.sqrt(variance / draws) + rounding).all()
    found = np.square(drawn - mean).mean(0)
    assert (np.abs(found - variance) < 5 * variance * np.sqrt(2 / draws) + rounding).all()
    correlations = np.corrcoef(drawn.reshape(draws, -1).T)[np.triu_indices(20, 1)]  # 190 of them
    assert np.abs(correlations).max() < 5 / np.sqrt(draws)


def test_clients_that_agree_have_no_variance_and_all_models_are_theirs():
    models = [three_models()[1]] * 3
    deviation = standard_deviation(models, SIZES)
    assert all((array == 0).all() for array in deviation.values())
    centre = weighted(models)
    generator = np.random.default_rng(0)
    for drawn, expected in (
        (gaussian_model(centre, deviation, models, generator), centre),
        (convex_combination(models, dirichlet_shares(SIZES, 0.3, generator).tolist()), models[0]),
    ):
        cast = cast_like(drawn, models[0])
        assert bits({n: a.numpy() for n, a in cast.items()}) == bits(dict(expected))


def test_running_variances_and_counters_of_gaussian_models():
    """Deviations of 100 about means of 1: without the bound half of the variances were negative."""
    models = three_models()
    centre, generator = weighted(models), np.random.default_rng(0)
    deviation = {n: np.full_like(a, 100) for n, a in standard_deviation(models, SIZES).items()}
    for _ in range(50):
        drawn = cast_like(gaussian_model(centre, deviation, models, generator), models[0])
        variances = drawn["bn.running_var"].numpy()
        assert (variances >= stacked(models, "bn.running_var").min(0)).all()
        counter = drawn["bn.num_batches_tracked"].numpy()
        assert (counter.dtype, int(counter)) == (np.dtype(np.int64), 17)  # 0.2 x 10 + 0.75 x 20


def test_gaussian_models_stay_in_the_range_of_their_dtype():
    models = [{"w": np.full(3, value, np.float16)} for value in (-6e4, 6e4)]
    mean = {"w": np.zeros(3, np.float16)}
    deviation = standard_deviation(models, [1, 1])
    for seed in range(20):
        drawn = gaussian_model(mean, deviation, models, np.random.default_rng(seed))
        assert np.isfinite(cast_like(drawn, mean)["w"].numpy()).all()


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 1.0, 1e12])
def test_dirichlet_shares_are_a_convex_combination(alpha):
    generator = np.random.default_rng(0)
    for _ in range(50):
        shares = dirichlet_shares(SIZES, alpha, generator)
        assert (shares >= 0).all()
        assert abs(shares.sum() - 1) < 1e-15 * 4


def test_moments_of_dirichlet_shares_of_equal_clients():
    """Dir(a, ..., a) of N: mean 1/N, variance (1/N) (1 - 1/N) / (N a + 1) = v. The variance's own
    standard deviation is below v sqrt(kurtosis / M), and the Beta(a, 3a)'s kurtosis is below 4
    here; bounds are five standard deviations.
    """
    n, alpha, draws = 4, 2.0, 4000
    generator = np.random.default_rng(0)
    drawn = np.stack([dirichlet_shares([7] * n, alpha, generator) for _ in range(draws)])
    variance = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    assert np.abs(drawn.mean(0) - 1 / n).max() < 5 * np.sqrt(variance / draws)
    assert np.abs(drawn.var(0) / variance - 1).max() < 5 * np.sqrt(4 / draws)


def test_a_large_concentration_gives_the_mean():
    """gamma_i has the relative standard deviation sqrt((N - 1) / (N alpha + 1)) < 1e-6."""
    shares = dirichlet_shares(SIZES, 1e12, np.random.default_rng(0))
    np.testing.assert_allclose(shares, SHARES, rtol=2 * 6e-6)
    models = three_models()
    combined = convex_combination(models, SHARES.tolist())
    for name, array in combined.items():
        expected = np.average(stacked(models, name), axis=0, weights=SIZES)
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-14)


def test_a_small_concentration_gives_one_clients_model_each_as_often():
    """A share of 1/3 in 2,000 draws has the standard deviation 0.0105. Two of three shares are
    within e^20 of each other with a probability of about 3 x 20 alpha = 6e-5.
    """
    generator = np.random.default_rng(0)
    drawn = np.stack([dirichlet_shares(SIZES, 1e-6, generator) for _ in range(2000)])
    assert (drawn.max(1) > 1 - 1e-6).mean() > 0.999
    assert np.abs(np.bincount(drawn.argmax(1), minlength=3) / 2000 - 1 / 3).max() < 4.5 * 0.0105
    models = three_models()
    one = cast_like(convex_combination(models, [0.0, 0.0, 1.0]), models[2])
    for name in ("bn.running_var", "bn.num_batches_tracked"):
        np.testing.assert_array_equal(one[name].numpy(), models[2][name])
    np.testing.assert_allclose(one["weight"].numpy(), models[2]["weight"], rtol=1e-6)


def test_dirichlet_models_lie_between_the_clients():
    """To one rounding to float32; variances so stay at least 0, also where some are 0."""
    models, generator = three_models(), np.random.default_rng(3)
    models[1]["bn.running_var"][:3] = 0
    models[2]["bn.running_var"][:2] = 0
    for _ in range(50):
        drawn = convex_combination(models, dirichlet_shares(SIZES, 0.3, generator).tolist())
        for name in ("weight", "bn.running_var"):
            w = stacked(models, name)
            slack = 2.0**-50 * np.abs(w).max(0)
            assert (drawn[name] >= w.min(0) - slack).all()
            assert (drawn[name] <= w.max(0) + slack).all()
        assert (drawn["bn.running_var"] >= 0).all()


# ------------------------------------------------------------ predictions and labels


def ensemble_of(count: int) -> list[dict[str, np.ndarray]]:
    return [arrays_of(network(seed)) for seed in range(count)]


def test_prediction_is_the_mean_of_probabilities():
    """In float64, of outputs in float32; and that of the ensemble's predictor."""
    models, x = ensemble_of(4), server_examples()
    found = mean_probabilities(network(), models, x)
    own = [network(seed).eval() for seed in range(4)]
    with torch.no_grad():
        expected = torch.stack([net(x).double().softmax(1) for net in own]).mean(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    record = ArrayRecord(
        {n: Array(a) for n, a in EnsembleArrays(tuple(models)).to_arrays().items()}
    )
    scores = FedBE().predictor(record, network()).predict(x)
    torch.testing.assert_close(scores.double().exp(), expected, rtol=1e-5, atol=1e-6)


PROBABILITIES = torch.tensor(
    [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]], dtype=torch.float64
)


def test_a_temperature_of_one_leaves_labels_as_they_are():
    found = sharpened(PROBABILITIES, 1.0)
    torch.testing.assert_close(found, PROBABILITIES, rtol=0, atol=4e-16)


@pytest.mark.parametrize("temperature", [0.25, 0.5, 2.0])
def test_sharpened_labels_are_powers(temperature):
    powers = PROBABILITIES.numpy() ** (1 / temperature)
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(sharpened(PROBABILITIES, temperature).numpy(), expected, atol=1e-15)


def test_a_temperature_near_zero_gives_the_most_likely_class():
    """Others have at most (0.4 / 0.6)^100 = 2.5e-18 each at T = 0.01."""
    found = sharpened(PROBABILITIES, 0.01)
    expected = torch.eye(3, dtype=torch.float64)[[0, 2, 2, 0]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


# ---------------------------------------------------------------------- distillation


def teachers_labels(temperature: float = 0.5) -> torch.Tensor:
    return sharpened(mean_probabilities(network(), ensemble_of(5), server_examples()), temperature)


def test_the_rate_falls_linearly_in_each_cycle():
    options = distillation(learning_rate=0.5, final_learning_rate=0.1, cycle=4)
    np.testing.assert_allclose([options.rate(s) for s in range(1, 9)], [0.4, 0.3, 0.2, 0.1] * 2)
    assert {distillation(cycle=1).rate(step) for step in range(1, 9)} == {0.01}


def test_weights_are_averaged_at_the_ends_of_cycles_and_after_the_last_step():
    options = distillation(cycle=4, swa_start=0.3)
    assert [s for s in range(1, 19) if options.is_averaged(s, 18)] == [8, 12, 16, 18]
    assert [s for s in range(1, 4) if options.is_averaged(s, 3)] == [3]


@pytest.mark.parametrize("swa", [True, False])
def test_distillation_lowers_the_students_cross_entropy_to_its_labels(swa):
    """And not below their entropy, which no student can be better than."""
    labels, options = teachers_labels(), distillation(swa=swa, epochs=30)
    student = network(7)
    before, after = (
        loss_value(NetworkPredictor(net).predict(server_examples()), labels, "cross-entropy")
        for net in (copy.deepcopy(student), distil(student, labels, options, seed=1))
    )
    entropy = float(-torch.special.xlogy(labels, labels).sum(1).mean())
    assert entropy < after < entropy + 0.5 * (before - entropy)


def test_soft_cross_entropy_is_that_of_the_package_in_the_outputs_dtype():
    outputs, labels = network()(server_examples()).detach(), teachers_labels()
    found = float(soft_cross_entropy(outputs.double(), labels))
    assert found == pytest.approx(loss_value(outputs, labels, "cross-entropy"), rel=1e-12)


def iterates(student: nn.Module, labels: torch.Tensor, options: Distillation, seed: int) -> Any:
    """Step -> the state after it, by a second run of the same steps."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for step, _ in descend(student, labels, options, generator):
            found[step] = {n: p.detach().double().clone() for n, p in student.named_parameters()}
        return found, len(found)


def test_averaged_weights_are_the_mean_of_the_iterates():
    """In float64, of k = 13 of them. A running mean in float32 rounds three times a step, by at
    most 2^-24 of numbers below 4: 13 x 3 x 4 x 2^-24 < 1e-5.
    """
    labels, options = teachers_labels(), distillation(epochs=12, cycle=3, swa_start=0.2)
    states, num_steps = iterates(network(7), labels, options, seed=5)
    averaged = distil(network(7), labels, options, seed=5)
    chosen = [s for s in states if options.is_averaged(s, num_steps)]
    assert (num_steps, len(chosen)) == (48, 13)
    for name, parameter in averaged.named_parameters():
        expected = torch.stack([states[step][name] for step in chosen]).mean(0)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=1e-5)
        last = states[num_steps][name]
        assert not torch.allclose(last, expected, rtol=0, atol=1e-4) or "bias" in name
    plain = distil(network(7), labels, distillation(epochs=12, cycle=3, swa=False), seed=5)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.detach().double(), states[num_steps][name])


def test_statistics_of_batchnorm_are_those_of_the_server_examples_under_the_averaged_weights():
    """Batches are of one size: the mean of their means is that of all examples."""
    x = server_examples(32)
    options = Distillation(network(), x, epochs=3, batch_size=8, learning_rate=0.05, cycle=3)
    labels = sharpened(mean_probabilities(network(), ensemble_of(5), x), 0.5)
    student = distil(network(7), labels, options, seed=0)
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
    def drawing() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))

    options = Distillation(drawing(), server_examples(), epochs=2, batch_size=8, learning_rate=0.1)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        found.append(bits(arrays_of(distil(drawing(), teachers_labels(), options, seed))))
        assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1] != found[2]


# -------------------------------------------------------------------------- the server


VARIANTS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "dirichlet": {"distribution": "dirichlet"},
    "distilled": {"distill": distillation()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_travels_is_as_large_as_with_fedavg(variant):
    """To train, back, and to evaluate, in each of three rounds."""
    found = []
    for strategy in (SeededFedAvg(), FedBE(**VARIANTS[variant])):
        grid = Grid(CLIENTS)
        start(strategy, grid, rounds=3)
        found.append([(way, size(each), each.metadata.message_type) for way, each in grid.seen])
    assert found[0] == found[1]
    assert {kind for _, own, kind in found[0] if own} == {"train", "evaluate"}


def test_without_models_but_the_mean_it_is_fedavg():
    strategy = FedBE(num_samples=0, client_models=False, **OPTIONS)
    found = EnsembleArrays.from_arrays(start(strategy, Grid(CLIENTS), rounds=3)).models
    assert len(found) == 1
    assert bits(found[0]) == bits(start(SeededFedAvg(**OPTIONS), Grid(CLIENTS), rounds=3))


@pytest.mark.parametrize("variant", ["gaussian", "dirichlet"])
def test_without_distillation_the_global_model_is_fedavgs(variant):
    """Whatever is drawn: model 0 after three rounds, bit for bit."""
    strategy = FedBE(num_samples=4, **VARIANTS[variant], **OPTIONS)
    found = EnsembleArrays.from_arrays(start(strategy, Grid(CLIENTS), rounds=3)).models
    assert len(found) == 1 + 4 + 6
    assert bits(found[0]) == bits(start(SeededFedAvg(**OPTIONS), Grid(CLIENTS), rounds=3))
    assert strategy.train_metrics[3]["ensemble-size"] == 11


def test_the_ensemble_holds_the_clients_models_by_client():
    found = EnsembleArrays.from_arrays(start(FedBE(num_samples=2, **OPTIONS), Grid(CLIENTS))).models
    first = [tensor.numpy() for tensor in network().state_dict().values()]
    for partition, model in enumerate(found[3:]):
        client = SGDClient(
            network(), *examples(partition), learning_rate=0.1, batch_size=4, seed=(0, partition)
        )
        own = client.fit(first, {"server-round": 1})[0]
        assert [array.tobytes() for array in model.values()] == [array.tobytes() for array in own]


def always(partition: int) -> Any:
    """Have a client reply with the same weights in each round."""
    generator = np.random.default_rng(partition)
    weights = {
        name: (array + 0.1 * generator.random(array.shape)).astype(array.dtype)
        for name, array in arrays_of(network()).items()
    }
    return with_arrays(lambda _: {n: np.asarray(a) for n, a in weights.items()})


def test_models_are_drawn_by_seed_round_and_number():
    """Of clients whose replies never change: model k is the same whatever M, and another with
    another seed, round or number.
    """

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


@pytest.mark.parametrize("variant", ["gaussian", "distilled"])
def test_one_client_is_enough(variant):
    strategy = FedBE(**VARIANTS[variant], min_available_nodes=1, min_train_nodes=1, **OPTIONS)
    after = start(strategy, Grid(CLIENTS, num_clients=1), rounds=2)
    assert strategy.train_metrics[2]["replies-accepted"] == 1
    if variant == "gaussian":  # no variance: all twelve models are the client's
        assert len({str(bits(m)) for m in EnsembleArrays.from_arrays(after).models}) == 1


def test_the_server_distils_towards_the_ensemble():
    """Each round it begins with the mean, and ends nearer to the ensemble's labels."""
    strategy = FedBE(distill=distillation(epochs=10), **OPTIONS)
    after = start(strategy, Grid(CLIENTS), rounds=3)
    assert list(after) == list(network().state_dict())
    assert strategy.learned == "network"
    for metrics in strategy.train_metrics.values():
        assert metrics["distilled"] == 1
        assert metrics["distillation-loss"] < metrics["distillation-loss-before"]
        assert metrics["ensemble-size"] == 17


def test_the_student_begins_with_the_mean():
    """A rate of 1e-9 moves no weight by 1e-6."""
    options = distillation(learning_rate=1e-9, final_learning_rate=1e-9)
    after = start(FedBE(distill=options, **OPTIONS), Grid(CLIENTS))
    mean = start(SeededFedAvg(**OPTIONS), Grid(CLIENTS))
    for name, _ in network().named_parameters():
        np.testing.assert_allclose(after[name], mean[name], rtol=0, atol=1e-6)


def test_a_distillation_that_diverges_leaves_the_mean(caplog):
    options = distillation(learning_rate=1e30, final_learning_rate=1e30)
    strategy = FedBE(distill=options, **OPTIONS)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(CLIENTS), rounds=2)
    assert bits(after) == bits(start(SeededFedAvg(**OPTIONS), Grid(CLIENTS), rounds=2))
    assert strategy.train_metrics[2]["distilled"] == 0
    assert any("lower its learning_rate" in record.getMessage() for record in caplog.records)


def test_another_network_than_the_distillations_is_refused_before_the_first_round():
    strategy = FedBE(distill=Distillation(nn.Linear(4, 3), server_examples()), **OPTIONS)
    grid = Grid(CLIENTS)
    with pytest.raises(ValueError, match="initial_arrays: expected those of the network that dist"):
        start(strategy, grid)
    assert grid.trained == []


def test_a_state_of_another_distillation_is_refused():
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
        (
            {"validation_examples": 50, "fed_be.final_learning_rate": 0.1},
            "fed-be.final-learning-rate: expected at most fed-be.learning-rate = 0.001, got 0.1",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_cure(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(method="fed-be", **{"fed_be.distill": True, **settings})


def test_the_server_gets_no_labels_and_no_clients_examples():
    config = Config(method="fed-be", validation_examples=50, **{"fed_be.distill": True})
    setup = load_setup(config)
    distill = make_strategy(setup).distill
    x, _ = setup.data.train(setup.split.validation)
    assert torch.equal(distill.examples, x)
    assert config.chosen_method.validates(config)
    without = config.replace(fed_be={"distill": False})
    assert not without.chosen_method.validates(without)
    held = set(setup.split.validation.tolist())
    assert all(held.isdisjoint(own.tolist()) for own in setup.split.clients)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, EnsemblePredictor),
        ({"loss": "mse"}, EnsemblePredictor),
        ({"validation_examples": 50, "fed_be.distill": True}, NetworkPredictor),
        ({"method": "fed-ensemble", "fed_ensemble.inner": "fed-be"}, EnsemblePredictor),
    ],
)
def test_a_run_saves_what_predicts(tmp_path, settings, kind):
    config = Config(**{
        "method": "fed-be", "rounds": 2, "num_clients": 6, "clients_per_round": 5,
        "learning_rate": 0.1, **settings,
    })  # fmt: skip
    result = run(config, out=tmp_path, progress=False)
    predictor = load_predictor(tmp_path)
    assert type(predictor) is kind
    data = load_setup(config).data
    accuracy = predictor.evaluate(*data.test()).accuracy
    assert accuracy == pytest.approx(float(result.curve("accuracy").iloc[-1]), abs=1e-12)
