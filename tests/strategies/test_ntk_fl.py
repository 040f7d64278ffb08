"""NTKFL against the same computation on the pooled examples, and its rules for choosing t."""

import itertools
from functools import partial
from logging import WARNING

import numpy as np
import pytest
import torch

from fedntk.clients import NTKFLClient
from fedntk.ntk import Jacobian, evolve, jacobian, loss_value, one_hot
from fedntk.ntk.evolution.gradient_flow import AUTO_STEPS
from fedntk.ntk.losses import log_class_prior
from fedntk.strategies import NTKFL, Screening

from .federation import (
    NUM_CLIENTS,
    Contract,
    Grid,
    app,
    arrays_of,
    asked_first,
    bits,
    damaged,
    examples,
    initial_bits,
    loaded,
    lost,
    network,
    run_as_if_lost,
    start,
    told,
    with_arrays,
    with_metrics,
)

STEPS = (5, 20, 80, 400)
OPTIONS = {  # the paper's grid
    "learning_rate": 0.5, "steps": STEPS, "fraction_evaluate": 0.0, "allow_no_step": False,
}  # fmt: skip
CLIENTS = app(NTKFLClient)
PRIOR = {"class_prior": True, "class_target": "seen"}
CONTRACT = {
    "NTKFL": Contract(
        partial(NTKFL, learning_rate=0.1, steps=[5, 20, 50], **PRIOR), CLIENTS, sends_queries=True
    )
}


def loss_of(weights, partitions, loss="cross-entropy", offset=0.0):
    """Loss of the true network with these weights, over some clients' examples."""
    data = [examples(p) for p in partitions]
    model = loaded(weights)
    with torch.no_grad():
        total = sum(len(y) * loss_value(model(x) + offset, one_hot(y, 3), loss) for x, y in data)
    return total / sum(len(y) for _, y in data)


def pooled(loss="cross-entropy", partitions=range(NUM_CLIENTS), *, class_prior=False, **options):
    """Candidates, their true losses and their linearised losses, on one machine, by fedntk.ntk."""
    model = network().eval()
    data = [examples(p) for p in partitions]
    jac = Jacobian.concatenate([jacobian(model, x) for x, _ in data])
    targets = torch.cat([one_hot(y, 3) for _, y in data])
    offset = log_class_prior(targets) if class_prior else torch.zeros(3)
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in data]) + offset
    evolution = evolve(jac, outputs, targets, loss=loss, learning_rate=0.5, steps=STEPS, **options)
    updates = [jac.vjp(residuals) for residuals in evolution.residuals]
    candidates = [
        {n: (w + update[n] if n in update else w).numpy() for n, w in model.state_dict().items()}
        for update in updates
    ]
    losses = [loss_of(weights, partitions, loss, offset) for weights in candidates]
    return candidates, losses, [loss_value(f, targets, loss) for f in evolution.outputs]


@pytest.mark.parametrize(
    ("loss", "kernel", "class_prior"),
    [
        ("mse", "mean", False),
        ("cross-entropy", "mean", False),
        ("cross-entropy", "corrected", True),
        ("cross-entropy", "full", False),
    ],
)
def test_federated_round_equals_the_pooled_computation_bit_for_bit(loss, kernel, class_prior):
    candidates, losses, linearised = pooled(loss, kernel=kernel, class_prior=class_prior)
    strategy = NTKFL(loss=loss, kernel=kernel, class_prior=class_prior, **OPTIONS)
    grid = Grid(app(NTKFLClient, loss=loss))
    weights, best = start(strategy, grid), int(np.argmin(losses))
    assert [kind for kind, _ in grid.exchanges] == ["train", "query"]
    assert bits(weights) == bits(candidates[best])
    metrics, accuracy = strategy.train_metrics[1], 1e-6 if class_prior else 1e-12
    assert metrics["t"] == STEPS[best]
    assert metrics["candidate-loss"] == pytest.approx(losses[best], rel=accuracy)
    assert metrics["linearised-loss"] == pytest.approx(linearised[best], rel=accuracy)
    evaluated = strategy.predictor(weights, network()).evaluate(*examples(0))
    assert evaluated.loss == pytest.approx(loss_of(weights, [0], loss))


def test_the_prior_is_of_the_examples_seen_so_far():
    """In round 1 they are the round's own, so that nothing is added; later rounds differ."""
    few = OPTIONS | {"fraction_train": 0.5, "class_prior": True}

    def after(rounds, **options):
        strategy = NTKFL(**few | options)
        return bits(start(asked_first(strategy, grid := Grid(CLIENTS)), grid, rounds))

    assert after(1, class_target="seen") == after(1, class_prior=False)
    assert after(2, class_target="seen") not in (after(2, class_prior=False), after(2))


def test_linearised_rule_takes_the_last_step_under_the_flow():
    """The flow's loss never rises, as the documentation says."""
    strategy = NTKFL(selection="linearised", **OPTIONS)
    weights = start(strategy, grid := Grid(CLIENTS))
    candidates, _, linearised = pooled()
    assert linearised == sorted(linearised, reverse=True)
    assert strategy.train_metrics[1]["t"] == STEPS[-1]
    assert bits(weights) == bits(candidates[-1])
    assert [kind for kind, _ in grid.exchanges] == ["train"]


@pytest.mark.parametrize("other", [1.0, float("nan")])
def test_validation_on_the_server_decides(other):
    wanted = bits(pooled()[0][2])

    def validation_loss(arrays):
        return 0.0 if bits(arrays_of(arrays)) == wanted else other

    screening = Screening(validation_loss=validation_loss)
    strategy = NTKFL(selection="validation", screening=screening, **OPTIONS)
    assert bits(start(strategy, grid := Grid(CLIENTS))) == wanted
    assert [kind for kind, _ in grid.exchanges] == ["train"]


def test_validation_on_held_out_clients_decides_and_they_never_train():
    strategy = NTKFL(selection="validation", validation_partitions=(1, 4), **OPTIONS)
    weights = start(strategy, grid := Grid(CLIENTS))
    assert sorted(grid.trained) == [0, 2, 3, 5]
    assert grid.exchanges[-1] == ("query", 2)
    candidates, _, _ = pooled(partitions=(0, 2, 3, 5))
    best = min(candidates, key=lambda candidate: loss_of(candidate, (1, 4)))
    assert bits(weights) == bits(best)


def test_a_round_never_raises_the_loss_that_it_sees(caplog):
    """At eta = 500 candidates explode with t, and t = 0 is one."""
    large = {"learning_rate": 500.0, "residuals": "sum", "allow_no_step": True}
    strategy = NTKFL(**OPTIONS | large)
    with caplog.at_level(WARNING, "flwr"):
        weights = start(strategy, Grid(CLIENTS), rounds=2)
    assert bits(weights) == initial_bits()
    assert strategy.train_metrics[1]["t"] == 0.0
    assert "in 2 rounds in a row no t lowered the loss: learning rate 500 times" in caplog.text


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_the_automatic_rate_suits_networks_of_any_kind(scale):
    """Outputs of other sizes, whose kernels are 10,000 times apart: each round finds a step."""

    def net():
        model = network()
        with torch.no_grad():
            for parameter in model[-1].parameters():
                parameter.mul_(scale)
        return model

    clients = app(lambda _, x, y, **options: NTKFLClient(net(), x, y, **options))
    strategy = NTKFL(learning_rate="auto", fraction_evaluate=0.0)
    assert strategy.steps == (0, *AUTO_STEPS)
    start(strategy, Grid(clients), 3, net())
    metrics = [strategy.train_metrics[r] for r in range(1, 4)]
    losses = [m["train-loss"] for m in metrics] + [metrics[-1]["candidate-loss"]]
    assert all(m["t"] > 0 for m in metrics)
    assert all(b < a for a, b in itertools.pairwise(losses))
    assert losses[-1] < 0.7 * losses[0]


def after_answers(changes):
    """Metrics and weights of a round with these answers to the query."""
    strategy = NTKFL(**OPTIONS)
    weights = start(strategy, Grid(CLIENTS, changes=changes, changed_kind="query"))
    return dict(strategy.train_metrics[1]), bits(weights)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "answers",
    [
        # what cannot be a loss of each candidate; the last is infinite times the examples
        *[{3: losses} for losses in ([0.0], 0.0, [NAN] * 4, [0.0] * 9, [INF] * 4, [1e308] * 4)],
        {3: [-1.0, 1.0, 1.0, 1.0]},
        # what is far from the median client's
        {3: [INF, 0.0, 0.0, 0.0], 4: [0.0, INF, INF, INF]},  # some loss is infinite at each
        {3: [1e30, 1e30, 0.0, 1e30]},  # only the third can have the lowest mean
        {3: [101.0, 0.0, 0.0, 0.0]},
    ],
)
def test_false_losses_decide_nothing(answers):
    """The result is that of the liars' silence."""
    metrics, weights = after_answers(
        {k: with_metrics(losses=losses) for k, losses in answers.items()}
    )
    silent, expected = after_answers(dict.fromkeys(answers, lost))
    assert metrics["losses-accepted"] == 6 - len(answers)
    chosen = metrics["t"], metrics["candidate-loss"]
    assert (chosen, weights) == ((silent["t"], silent["candidate-loss"]), expected)


def test_what_a_minority_can_still_do():
    """Losses within 100 times the median's decide: a limit of the rule, which the docs state."""
    honest, _ = after_answers({})
    steered, _ = after_answers({3: with_metrics(losses=[100.0, 100.0, 100.0, 0.0])})
    assert steered["losses-accepted"] == 6
    assert honest["t"] != steered["t"] == STEPS[-1]


@pytest.mark.parametrize("answer", [lost, with_metrics(losses=[INF] * 4)])
def test_without_a_usable_loss_the_model_stays(answer):
    _, weights = after_answers(dict.fromkeys(range(NUM_CLIENTS), answer))
    assert weights == initial_bits()


def test_labels_that_are_not_one_hot_and_false_counts_are_refused():
    changes = {
        0: damaged(1, lambda a: a * 0),
        1: damaged(1, lambda a: a + 1),
        2: damaged(0, lambda a: a[:, :2]),
        3: damaged(0, lambda a: a.astype(np.float64)),
        4: with_metrics(num_examples=8),
    }
    start(strategy := NTKFL(**OPTIONS), Grid(CLIENTS, changes=changes))
    for reason, count in {"labels": 2, "shape": 1, "dtype": 1, "num-examples": 1}.items():
        assert told(strategy, f"rejected-{reason}") == [count]


def factors(first, second):
    """Multiply the inputs and the gradients of the first layer."""

    def change(arrays):
        for name, factor in (("block-000", first), ("block-001", second)):
            arrays[name] = arrays[name] * np.float32(factor)
        return arrays

    return with_arrays(change)


@pytest.mark.parametrize(("first", "second"), [(1e4, 1), (1e15, 1), (1e25, 0.0), (1e25, 1e-25)])
def test_a_client_with_giant_factors_is_left_out(first, second):
    """Its rows would set the largest eigenvalue, or the kernel would overflow on the way."""
    run_as_if_lost(lambda: NTKFL(**OPTIONS), CLIENTS, factors(first, second), "scale")


def test_a_kernel_that_overflows_leaves_the_model():
    """1e22 squared is beyond float32, and all clients agree on the scale."""
    changes = dict.fromkeys(range(NUM_CLIENTS), factors(1e11, 1e11))
    assert bits(start(NTKFL(**OPTIONS), Grid(CLIENTS, changes=changes))) == initial_bits()
