"""Who is in a model: without a client it is the run without it; harm and its threshold."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedntk.ntk import Normaliser
from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples, are_possible, find_harmful
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics

from ...conftest import refused

P, C = 6, 3
FIXED = FixedPoint(np.full(P, 2.0**-5, np.float32), bits=8)
CENTRES = 1.5 * torch.eye(C, P)


def draw(counts: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of classes with a Gaussian of their own each."""
    labels = torch.repeat_interleave(torch.arange(C), torch.tensor(counts))
    noise = torch.randn(len(labels), P, generator=torch.Generator().manual_seed(seed))
    return CENTRES[labels] + noise, labels


def sums(x: torch.Tensor, labels: torch.Tensor) -> FeatureStatistics:
    return FeatureStatistics.of([x], labels, C, fixed_point=FIXED)


def equations(total: FeatureStatistics) -> NormalEquations:
    return NormalEquations.of(total.scaled(FIXED), Normaliser.identity(P), bias=True)


def half_error(examples: ValidationExamples, linear: torch.Tensor, rows: slice = slice(None)):
    """Half the mean squared error on the examples themselves."""
    targets = torch.eye(C).double()[examples.labels] - 1 / C
    errors = targets - examples.rows.double() @ linear
    return float(errors[rows].square().sum(1).mean() / 2)


def judge(num: int = 300, seed: int = 99) -> tuple[ClientLedger, ValidationExamples]:
    """A ledger, and the same validation examples as rows, rounded as clients' are."""
    x, labels = draw([num // C] * C, seed)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, labels = x[mixed], labels[mixed]
    rows = torch.cat([FIXED(x.clone()) * 2.0**-5, torch.ones(len(x), 1)], 1)
    ledger = ClientLedger(equations, 1e-3, equations(sums(x, labels)))
    return ledger, ValidationExamples(rows, labels, C, FIXED)


def federation(seed: int, num: int = 20) -> dict[int, FeatureStatistics]:
    """Clients with 20 to 200 examples, of shares of classes from Dirichlet 0.3."""
    generator = np.random.default_rng(seed)
    shares, sizes = generator.dirichlet([0.3] * C, num), generator.integers(20, 200, num)
    counts = np.ceil(shares * sizes[:, None]).astype(int).tolist()
    return {k: sums(*draw(row, 1000 * seed + k)) for k, row in enumerate(counts)}


def malicious(seed: int, moved: int = 1, count: int = 30) -> FeatureStatistics:
    x, labels = draw([count] * C, seed)
    return sums(x, (labels + moved) % C)


def test_the_model_without_a_client_is_to_the_bit_the_run_that_never_had_it():
    clients, (ledger, _) = federation(0), judge()
    total = FeatureStatistics.join(clients.values())
    for client, stats, with_it, without in ledger.parts(total, clients):
        never = FeatureStatistics.join(o for k, o in reversed(clients.items()) if k != client)
        assert torch.equal(without, equations(never).solve(1e-3))
        ((_, _, *models),) = ledger.parts(never, {client: stats}, {client})
        assert all(map(torch.equal, models, (with_it, without)))


def test_harm_is_a_rise_of_half_the_mean_squared_error():
    ledger, examples = judge()
    models = [ledger.solve(malicious(1)), ledger.solve(malicious(2, moved=0))]
    with_it, without = (half_error(examples, model) for model in models)
    assert ledger.harm(*models) == pytest.approx(with_it - without, rel=1e-9)


def test_shapley_values_are_those_of_all_orders_within_their_errors():
    """Means of 60 pairs; four values within 4 standard errors of 59 degrees: 99.9 %."""
    clients = {7: malicious(1), **dict(itertools.islice(federation(1).items(), 3))}
    ledger, _ = judge()
    zero = ledger.solve(clients[7] - clients[7])
    exact = dict.fromkeys(clients, 0.0)
    for order in itertools.permutations(clients):
        total, before = None, ledger.validation.loss(zero)
        for client in order:
            total = clients[client] if total is None else total + clients[client]
            after = ledger.validation.loss(ledger.solve(total))
            exact[client] += (before - after) / math.factorial(len(clients))
            before = after
    values, errors = ledger.shapley(clients, 60, np.random.default_rng(0))
    assert (np.abs(values - list(exact.values())) < 4 * errors).all()
    fall = ledger.validation.loss(zero) - before
    assert values.sum() == pytest.approx(fall, rel=1e-9)
    assert min(exact, key=exact.__getitem__) == 7
    refused("pairs: expected 2 or more", ledger.shapley, clients, 1, None)


def test_an_examples_harm_is_that_of_adding_it():
    """(A + z z^T)^{-1} z = t / (1 + z.t). The ridge, which moves with the scale, is 1e-9."""
    (_, examples), clients = judge(60), federation(2)
    total = FeatureStatistics.join(clients.values())
    base = equations(total)
    actual, linear = examples.harms(base, 1e-9), base.solve(1e-9)
    for i in (0, 1, 13):
        row, target = examples.rows[i].double(), torch.eye(C)[examples.labels[i]].double() - 1 / C
        gram, cross = base.gram + torch.outer(row, row), base.cross + torch.outer(row, target)
        moved = replace(base, gram=gram, cross=cross).solve(1e-9) - linear
        moved *= 1 + row @ torch.linalg.solve(base.gram, row)
        other = slice(1 - i % 2, None, 2)
        before, after = (half_error(examples, w, other) for w in (linear, linear + moved))
        assert actual[i] == pytest.approx(after - before, rel=1e-4)


def test_honest_clients_are_rarely_removed_and_malicious_ones_are():
    """At alpha = 0.1 more than 9 of 40 honest federations have 0.5 % probability or less."""
    ledger, examples = judge()
    alarms = sum(bool(find_harmful(ledger, federation(s), examples, 0.1)) for s in range(40))
    assert alarms <= 9
    for seed in range(5):
        clients = federation(seed) | {50: malicious(seed, 1, 90), 51: malicious(seed + 9, 2, 90)}
        actual = find_harmful(ledger, clients, examples, 0.01)
        assert set(actual) == {50, 51}


def copied(times: int, seed: int, noise: float = 0.0) -> FeatureStatistics:
    """Sums in which each of 12 examples, of one class more than of others, counts several times."""
    x, labels = draw([7, 3, 2], seed)
    added = noise * torch.randn(times, *x.shape, generator=torch.Generator().manual_seed(seed))
    return sums((x + added).flatten(0, 1), labels.repeat(times))


def test_honest_weights_have_normal_scores():
    """Of 200 clients 10 are over Phi^{-1}(0.95), 2 over that of 0.99; binomial bounds of 99.9 %."""
    scores = []
    for seed in range(10):
        _, examples = judge(seed=seed + 50)
        scores += map(examples.weight_score, federation(seed).values())
    over = [sum(score > bound for score in scores) for bound in (1.645, 2.326)]
    assert 2 <= over[0] <= 21
    assert over[1] <= 8


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_claimed_copies_are_known_by_the_precision_that_they_lack(noise):
    """Exact copies have a common factor; of copies with noise nearly all scores are high."""
    _, examples = judge()
    results = [examples.weight_score(copied(30, seed, noise)) for seed in range(20)]
    once = [examples.weight_score(copied(1, seed, noise)) for seed in range(20)]
    assert sum(score > 3 for score in results) >= 18
    assert max(once) < 3.3
    assert (min(results) == np.inf) == (noise == 0)


def test_a_client_that_claims_copies_is_removed_if_the_others_do_better_without_it():
    """Its 12 examples count as 120, with noise on each; 2.45 = Phi^{-1}(1 - 0.05 / 7)."""
    ledger, examples = judge(60)
    harmful = by_harm = 0
    for seed in range(10):
        clients = federation(seed, 6) | {9: copied(10, seed, 0.1)}
        total = FeatureStatistics.join(clients.values())
        *_, (_, stats, *models) = ledger.parts(total, clients)
        harm = np.array([ledger.harm(*models)])
        (score,) = examples.scores(harm, stats.counts[None], equations(total), 1e-3)
        by_harm += int(score > 2.45)
        harmful += int(harm[0] > 0)
        assert (9 in find_harmful(ledger, clients, examples, 0.05)) == (harm[0] > 0)
    assert by_harm < harmful


def test_judging_weights_bears_any_counts():
    """No validation example of a class, or only equal ones; no example; counts as large as can be.

    A scatter of 0 is not too large.
    """
    _, examples = judge()
    few = replace(examples, rows=examples.rows[:2].repeat(2, 1), labels=torch.tensor([0, 0, 1, 1]))
    equal = replace(few, rows=few.rows[:1].repeat(4, 1))
    stats, none = malicious(0), malicious(0) - malicious(0)
    huge = replace(stats, counts=np.array([2**62 + 1, 1, 0]))
    mean = replace(stats, class_sums=np.zeros((C, P), np.int64))
    for judged in (examples, few, equal, replace(examples, fixed_point=None)):
        assert not np.isnan([judged.weight_score(s) for s in (stats, none, huge, mean)]).any()
    assert equal.weight_score(stats) == examples.weight_score(none) == -np.inf


def test_what_is_removed_is_judged_by_the_model_without_it():
    """Nobody kept is over the threshold for all, and those removed are over that for one.

    Phi^{-1}(1 - 0.05 / 52) = 3.100 and Phi^{-1}(1 - 0.05 / 2) = 1.960.
    """
    clients, (ledger, examples) = federation(3) | {k: malicious(k) for k in range(50, 56)}, judge()
    actual = find_harmful(ledger, clients, examples, 0.05)
    remaining = [k for k in clients if k not in actual]
    total = FeatureStatistics.join(clients[k] for k in remaining)
    for k, stats, *models in ledger.parts(total, clients, actual):
        removed, harm = k in actual, np.array([ledger.harm(*models)])
        (score,) = examples.scores(harm, stats.counts[None], equations(total), 1e-3)
        score = max(score, examples.weight_score(stats) if harm > 0 else -np.inf)
        assert (score > 1.960) if removed else (score <= 3.100)
        assert not removed or score == pytest.approx(actual[k])
    assert set(actual) >= set(range(50, 56))


def test_sums_of_no_examples_are_known():
    honest = [
        malicious(0),
        sums(*draw([2, 0, 1], 0)),
        sums(torch.zeros(2, P), torch.tensor([0, 1])),
    ]
    assert all(map(are_possible, honest))
    first = honest[0]
    lies = [
        replace(first, gram=3 * first.gram, class_sums=3 * first.class_sums),
        replace(first, gram=first.gram * np.where(np.arange(21) == 1, -40, 1)),
        replace(first, counts=first.counts // 4),
    ]
    assert not any(map(are_possible, lies))
    ledger, examples = judge()
    refused("all clients are harmful", find_harmful, ledger, {1: malicious(1)}, examples, 0.1)
