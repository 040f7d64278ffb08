"""Two-patch data, lemma 4.1 and theorem 4.4 of Huang et al. 2024, and plain gradient descent."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedntk.ntk import feature_learning as theory
from fedntk.ntk.feature_learning import TwoPatchDistribution, TwoPatchExamples, mixing_matrix

from ..conftest import refused

RATE, STEPS, ROUNDS, WIDTH = 0.8, 3, 4, 5
CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # float64: sums of at most 200 terms, 12 steps
SMALL = TwoPatchDistribution(group_sizes=(1, 3), dimension=60, signal_norm=1.5, noise_std=0.7)
AVERAGED = {"FedAvg": [0, 0, 0, 0], "groups": [0, 1, 1, 1], "local": [0, 1, 2, 3]}


@pytest.fixture
def examples() -> TwoPatchExamples:
    return SMALL.draw(6)


def first(dimension: int = 60, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, width, dimension, generator=generator, dtype=torch.float64)
    return theory.initial_std(dimension) * drawn


def margin(weights: Tensor, signal: Tensor, noise: Tensor, y: Tensor) -> Tensor:
    """Return y f of one client's examples, eq. (2) word for word."""
    f = torch.zeros(len(y), dtype=y.dtype)
    for j, filters in ((-1, weights[0]), (1, weights[1])):
        for w in filters:
            both = torch.relu(y * (signal @ w)) + torch.relu(noise @ w)
            f = f + j * both / len(filters)
    return y * f


def plain_step(weights: Tensor, examples: TwoPatchExamples) -> Tensor:
    """One gradient step of every client on the logistic loss, eq. (3) and (4), by autograd."""
    after = []
    for k, start in enumerate(weights):
        w = start.clone().requires_grad_()
        data = (examples.client_signals[k], examples.noise[k], examples.labels[k])
        torch.log(1 + torch.exp(-margin(w, *data))).mean().backward()
        after.append((w - RATE * w.grad).detach())
    return torch.stack(after)


def plain_rounds(examples: TwoPatchExamples, mixing: Tensor) -> list[Tensor]:
    weights, rounds = torch.stack([first()] * len(examples.noise)), []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            weights = plain_step(weights, examples)
        weights = torch.stack(
            [sum(m * w for m, w in zip(row, weights, strict=True)) for row in mixing]
        )
        rounds.append(weights)
    return rounds


def followed(examples: TwoPatchExamples, mixing: Tensor) -> list[theory.Coefficients]:
    """Coefficients at the end of each round."""
    state, rounds = theory.Coefficients.zeros(examples, WIDTH), []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            state = theory.coefficient_step(state, first(), examples, learning_rate=RATE)
        state = state.mixed(mixing)
        rounds.append(state)
    return rounds


def quick(examples: TwoPatchExamples, mixing: Tensor) -> list[Tensor]:
    options = {"rounds": ROUNDS, "local_steps": STEPS, "learning_rate": RATE}
    return list(theory.train(examples, first(), mixing, **options))


def test_signals_noise_and_labels_have_their_geometry_and_moments():
    """47 free dimensions: ||xi||^2 / sigma^2 has mean 47, variance 94; labels 0 and 1."""
    n = 2000
    distribution = TwoPatchDistribution((2, 1, 1), dimension=50, signal_norm=3.0, noise_std=0.5)
    examples = distribution.draw(n)
    identity = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(examples.signals @ examples.signals.T, 9 * identity)
    assert (examples.noise @ examples.signals.T).abs().max() < 1e-12
    assert examples.groups.tolist() == [0, 0, 1, 2]
    norms = examples.noise.square().sum(2) / 0.25
    assert abs(float(norms.mean()) - 47) < 4.5 * math.sqrt(94 / (4 * n))
    assert abs(float(examples.labels.mean())) < 4.5 / math.sqrt(4 * n)
    assert set(examples.labels.unique().tolist()) == {-1.0, 1.0}


def test_patches_are_those_of_equation_1_and_follow_from_seed_and_part_alone(examples):
    x = examples.patches()
    for k, i in itertools.product(range(4), range(6)):
        signal = examples.signals[[0, 1, 1, 1][k]]
        assert torch.equal(x[k, i, 0], examples.labels[k, i] * signal)
        assert torch.equal(x[k, i, 1], examples.noise[k, i])
    assert torch.equal(2 * examples.classes() - 1, examples.labels.long())

    def noise(size: int, seed: int = 0, **options: Any) -> Tensor:
        return TwoPatchDistribution((size,), 30, seed=seed).draw(4, **options).noise

    many = noise(5)
    assert torch.equal(noise(2), many[:2])
    assert torch.equal(noise(5, clients=[3])[0], many[3])
    for other in (many[1:2], noise(1, part="test"), noise(1, seed=1)):
        assert not torch.equal(many[0], other[0])


@pytest.mark.parametrize("groups", AVERAGED.values(), ids=AVERAGED)
def test_coefficients_and_quick_training_are_plain_gradient_descent(examples, groups):
    """Signs of eq. (11) to (13): gamma and psi (of the own label's filters) grow, phi falls."""
    of_label = examples.labels[..., None] == torch.tensor([-1.0, 1.0])  # (K, n, 2)
    mixing = mixing_matrix(torch.tensor(groups))
    plain, tracked = plain_rounds(examples, mixing), followed(examples, mixing)
    for weights, state, fast in zip(plain, tracked, quick(examples, mixing), strict=True):
        torch.testing.assert_close(state.weights(first(), examples), weights, **CLOSE)
        torch.testing.assert_close(fast, weights, **CLOSE)
        projected = theory.decompose(weights, first(), examples)
        torch.testing.assert_close(projected.signal, state.signal, **CLOSE)
        torch.testing.assert_close(projected.noise, state.noise, **CLOSE)
        assert (state.signal >= 0).all()
        if groups == AVERAGED["local"]:
            assert (state.noise[:, of_label] >= 0).all()
            assert (state.noise[:, ~of_label] <= 0).all()
    moved = (plain[-1] - first()).abs().max()
    assert moved > 5 * first().abs().max()  # far from where it began: nothing above is trivial


def test_evaluation_is_loss_and_share_of_errors(examples):
    weights = quick(examples, mixing_matrix(torch.zeros(4)))[0]
    test = SMALL.draw(50, part="test")
    actual = theory.evaluate(weights, test)
    for k in range(4):
        yf = margin(weights[k], test.client_signals[k], test.noise[k], test.labels[k])
        assert float(actual.loss[k]) == pytest.approx(float(torch.log1p(torch.exp(-yf)).mean()))
        assert float(actual.error[k]) == pytest.approx(float((yf < 0).double().mean()))
    assert 0 < float(actual.error.mean()) < 0.5


@pytest.mark.parametrize(
    ("sizes", "chi"), [((4,), [4] * 4), ((1, 1, 1), [1] * 3), ((1, 3, 2), [1, 3, 3, 3, 2, 2])]
)
def test_similarity_counts_the_clients_with_the_same_signal(sizes, chi):
    distribution = TwoPatchDistribution(sizes, dimension=40, signal_norm=1.7, noise_std=0.4)
    signals = distribution.signals()[distribution.groups]
    expected = torch.tensor(chi, dtype=torch.float64)
    torch.testing.assert_close(theory.signal_similarity(signals), expected)
    torch.testing.assert_close(
        theory.effective_snr(signals, noise_std=0.4), expected.sqrt() * 1.7 / (0.4 * math.sqrt(40))
    )
    torch.testing.assert_close(
        theory.generalisation_exponent(signals, num_examples=9, noise_std=0.4),
        9 * expected**2 * 1.7**4 / (sum(sizes) * 0.4**4 * 40),
    )


def test_test_errors_are_in_the_order_of_the_exponents():
    """FedAvg beats local training for a signal of 9 of 10 clients, and loses for that of one.

    Exponents are 0.8 of local training, and 6.5 and 0.08 of FedAvg. With 4,500 and 500 examples the
    standard deviations of differences are at most 0.01 and 0.032; bounds have three and more.
    """
    distribution = TwoPatchDistribution((1, 9), dimension=400, signal_norm=2.0)
    examples, test = distribution.draw(20), distribution.draw(500, part="test")
    errors = {}
    for name, averaged in (("FedAvg", torch.zeros(10)), ("local", torch.arange(10))):
        options = {"rounds": 20, "local_steps": 5, "learning_rate": 1.0}
        (*_, weights) = theory.train(examples, first(400, 20), mixing_matrix(averaged), **options)
        assert float(theory.evaluate(weights, examples).error.max()) == 0.0
        actual = theory.evaluate(weights, test).error
        errors[name] = float(actual[0]), float(actual[1:].mean())
    assert errors["FedAvg"][1] < errors["local"][1] - 0.05
    assert errors["FedAvg"][0] > errors["local"][0] + 0.1


def distribution(**options):
    return lambda _: TwoPatchDistribution(**options)


def draw(**options):
    return lambda _: SMALL.draw(**{"num_examples": 2} | options)


def replaced(**arrays):
    return lambda examples: TwoPatchExamples(**vars(examples) | arrays)


OPPOSITE = torch.tensor([[1.0, 0.0], [-2.0, 0.0]])
WRONG = [
    (distribution(group_sizes=(3, 0)), "group_sizes: expected at least 1, got 0"),
    (distribution(group_sizes=(1, 1), dimension=2), "dimension: expected more than the 2 signals"),
    (distribution(signal_norm=0.0), "signal_norm: expected more than 0, got 0"),
    (distribution(noise_std=math.inf), "noise_std: expected a finite number, got inf"),
    (distribution(seed=-1), "seed: expected at least 0, got -1"),
    (draw(num_examples=0), "num_examples: expected at least 1, got 0"),
    (draw(part="validation"), "part: expected one of train, test, got 'validation'"),
    (draw(clients=[4]), r"clients: expected 0 ... 3, got \[4\]"),
    (replaced(noise=torch.zeros(4, 6, 59)), r"noise: expected shape \(K, n, d\) with signals"),
    (replaced(labels=torch.zeros(4, 6)), "labels: expected -1 or [+]1 in shape"),
    (replaced(groups=torch.tensor([0, 1, 2, 0])), "groups: expected a whole number from 0 to 1"),
    (
        lambda _: theory.decompose(first().expand(4, -1, -1, -1), first(), SMALL.draw(15)),
        "at most d - C = 58 noise patches, got 60",
    ),
    (lambda examples: quick(examples, torch.eye(3)), r"mixing: expected shape \(4, 4\) with rows"),
    (lambda _: theory.signal_similarity(torch.zeros(2, 3)), "signals: expected none that is zero"),
    (
        lambda _: theory.effective_snr(OPPOSITE, noise_std=1.0),
        "signals that are the same or orthog",
    ),
]


@pytest.mark.parametrize(("use", "message"), WRONG)
def test_what_cannot_be_is_refused(examples, use, message):
    refused(message, use, examples)
