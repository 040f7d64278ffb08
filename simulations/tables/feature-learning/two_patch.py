"""Loss, accuracy and coefficients of clients on the two-patch data of Huang et al. 2024, 6.1."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedntk.ntk.feature_learning import (
    Coefficients,
    TwoPatchDistribution,
    coefficient_step,
    decompose,
    evaluate,
    generalisation_exponent,
    initial_std,
    mixing_matrix,
    train,
)

Values = Iterator[tuple[str, int | None, float]]


def first_weights(settings: dict[str, Any], seed: int) -> Tensor:
    """Draw the weights that all clients begin with, float32 (2, m, d)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, settings["width"], settings["dimension"])
    std = float(settings.get("initial-factor", 1)) * initial_std(shape[2])
    return std * torch.randn(shape, generator=generator)


def distribution_of(settings: dict[str, Any], seed: int) -> TwoPatchDistribution:
    """Return where examples are drawn from."""
    sizes = tuple(settings["groups"])
    return TwoPatchDistribution(sizes, settings["dimension"], settings["signal-norm"], seed=seed)


def training(settings: dict[str, Any], seed: int, members: Tensor) -> Iterator[Tensor]:
    """Yield the weights of some clients after each round; train only those that they depend on."""
    distribution = distribution_of(settings, seed)
    parts = {
        "fedavg": torch.zeros_like(distribution.groups),
        "group": distribution.groups,
        "local": torch.arange(distribution.num_clients),
    }[settings["method"]]
    clients = torch.isin(parts, parts[members]).nonzero().flatten()
    for weights in train(
        distribution.draw(settings["examples"], clients=clients.tolist(), dtype=torch.float32),
        first_weights(settings, seed),
        mixing_matrix(parts[clients]).float(),
        rounds=settings["rounds"],
        local_steps=settings["local-steps"],
        learning_rate=settings["learning-rate"],
    ):
        yield weights[torch.isin(clients, members)]


def curves(settings: dict[str, Any], seed: int) -> Values:
    """Yield loss and accuracy of client 1 by round."""
    draw = partial(distribution_of(settings, seed).draw, clients=[0], dtype=torch.float32)
    train_set = draw(settings["examples"])
    test_set = draw(settings["test-examples"], part="test")
    sets = {"train": train_set, "test": test_set}
    for number, weights in enumerate(training(settings, seed, torch.tensor([0])), 1):
        for name, examples in sets.items():
            loss, error = map(float, evaluate(weights, examples))
            for end in ("", "-end") if number == settings["rounds"] else ("",):
                at = None if end else number
                yield f"{name}-loss{end}", at, loss
                yield f"{name}-accuracy{end}", at, 100 * (1 - error)


def groups(settings: dict[str, Any], seed: int) -> Values:
    """Yield a group's mean test accuracy, and the exponent of theorem 4.4 for its clients."""
    distribution, number = distribution_of(settings, seed), settings["group"]
    members = (distribution.groups == number).nonzero().flatten()
    *_, weights = training(settings, seed, members)
    errors = []
    for client, model in zip(members.tolist(), weights, strict=True):  # one test set in memory
        test_set = distribution.draw(
            settings["test-examples"], part="test", clients=[client], dtype=torch.float32
        )
        errors.append(float(evaluate(model[None], test_set).error))
    yield "accuracy", None, 100 * (1 - sum(errors) / len(errors))
    averaged = {"fedavg": distribution.groups, "group": distribution.groups[members]}
    of_clients = averaged.get(settings["method"], torch.tensor([number]))
    own_place = int((of_clients == number).nonzero()[0])
    exponents = generalisation_exponent(
        distribution.signals()[of_clients],
        num_examples=settings["examples"],
        noise_std=distribution.noise_std,
    )
    yield "exponent", None, float(exponents[own_place])


def trajectory(settings: dict[str, Any], seed: int) -> Values:
    """Yield the largest coefficient of client 1 after each gradient step and each average.

    Of lemma 4.1; with ``by = "weights"`` by projection of the weights, after averages only.
    """
    distribution, steps = distribution_of(settings, seed), settings["local-steps"]
    examples, rate = distribution.draw(settings["examples"]), settings["learning-rate"]
    initial = first_weights(settings, seed).double()
    mixing = mixing_matrix(torch.zeros(distribution.num_clients))

    def largest(coefficients: Coefficients) -> float:
        of_client = getattr(coefficients, settings["coefficient"])[0, 0]
        one = settings.get("example")
        return float((of_client if one is None else of_client[one]).max())

    lemma, values = Coefficients.zeros(examples, settings["width"]), {0: 0.0}
    options = {"rounds": settings["rounds"], "local_steps": steps, "learning_rate": rate}
    for number, weights in enumerate(train(examples, initial, mixing, **options), 1):
        end = number * (steps + 1)
        if settings["by"] == "weights":
            values[end] = largest(decompose(weights, initial, examples))
            continue
        for time in range(end - steps, end):
            lemma = coefficient_step(lemma, initial, examples, learning_rate=rate)
            values[time] = largest(lemma)
        lemma = lemma.mixed(mixing)
        values[end] = largest(lemma)
    for name, end in (("first-fall", steps + 1), ("last-fall", max(values))):
        yield name, None, 100 * (1 - values[end] / values.get(end - 1, math.nan))
    for time, value in values.items():
        yield "coefficient", time, value
    yield "coefficient-end", None, value
