"""Bad arguments are refused by name: beyond an option's limits, and what does not go together."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

import fedntk.clients
from fedntk.ntk.options import Declared, Option
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD
from fedntk.trust import KeyServer, ShufflingServer

from .test_contract import CONTRACTS

SERVER = ShufflingServer()
KEYS = KeyServer(bytes(32), [], Ed25519PrivateKey.generate())
NAN = float("nan")
NOISE = {"noise_multiplier": 1.0}
BOTH = {"validation_partitions": (1,), "validation_loss": lambda arrays: 0.0}


def ntk_fl(**options: Any) -> NTKFL:
    return NTKFL(**{"learning_rate": 0.1, "steps": [5, 20, 50]} | options)


def cp_ntk_fl(**options: Any) -> CPNTKFL:
    return CPNTKFL(**{"learning_rate": 0.1, "steps": [5, 20, 50]} | options)


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *[
        (SCAFFOLD, {"server_learning_rate": rate}, "expected a finite number of more")
        for rate in (0.0, -1.0, float("inf"), NAN)
    ],
    (ntk_fl, {"steps": (2, 1)}, "steps: expected increasing times"),
    (ntk_fl, {"steps": [0]}, "steps: expected at least one t above 0, got [0.0]"),
    (ntk_fl, {"class_prior": True, "loss": "mse"}, "expected the loss cross-entropy"),
    (ntk_fl, {"class_target": "seen"}, "'seen' goes with class_prior=True, got False"),
    (ntk_fl, {"selection": "validation"}, "goes with validation_loss or validation_partitions"),
    (ntk_fl, {"validation_partitions": (1,)}, "goes with validation_loss or validation_partiti"),
    (ntk_fl, {"selection": "validation"} | BOTH, "not both"),
    (cp_ntk_fl, {"bits": 17}, "bits: expected 1 ... 16, or 32"),
    (cp_ntk_fl, NOISE, "use selection='linearised'"),
    (
        cp_ntk_fl,
        NOISE | {"selection": "validation", "validation_partitions": [1]},
        "or validation_loss",
    ),
    (
        cp_ntk_fl,
        NOISE | {"selection": "linearised", "centre_inputs": True},
        "centre_inputs asks each client for a sum",
    ),
    (
        cp_ntk_fl,
        {"shuffling_server": SERVER, "run": "a run", "centre_inputs": True},
        "by which shuffled rows can be told apart",
    ),
    (cp_ntk_fl, {"label_noise": 0.5}, "takes clip and noise_multiplier above 0"),
    (cp_ntk_fl, {"shuffling_server": SERVER}, "shuffling_server: name the training run"),
    (cp_ntk_fl, {"key_server": KEYS}, "key_server: name the training run"),
]


def outside(own: Option) -> list[Any]:
    """Values that an option's limits exclude, at each of them, and one of another type."""
    past = {"at_least": -1, "at_most": 1, "above": 0, "below": 0}
    numbers = [bound + past[limit] for limit, bound in own.limits.items() if math.isfinite(bound)]
    if own.limits and isinstance(own.default, float):
        numbers.append(math.nan)
    if isinstance(own.default, tuple):
        return [(number,) for number in numbers]
    words = ["nonsense"] if own.choices or isinstance(own.default, int | float) else []
    return numbers + words


KINDS = {type(case.strategy()): case.strategy() for case in CONTRACTS.values()}
CLIENTS = [
    kind
    for kind in map(vars(fedntk.clients).get, fedntk.clients.__all__)
    if isinstance(kind, type) and issubclass(kind, Declared)
]
# what several methods inherit is tried with one of them
DECLARED = {
    own.name + str(own): (kind, own)
    for kind in (*KINDS, *CLIENTS)
    for own in kind.options().values()
}
LIMITS = [
    pytest.param(kind, own, value, id=f"{kind.__name__}-{own.name}-{value}")
    for kind, own in DECLARED.values()
    for value in outside(own)
]


@pytest.mark.parametrize(("kind", "own", "value"), LIMITS)
def test_an_option_beyond_its_limits_is_refused_by_name(kind, own, value):
    if kind in CLIENTS:
        model, x = nn.Linear(4, 3), torch.zeros(2, 4)
        with pytest.raises(ValueError, match=rf"^{own.name}: expected .*, got"):
            kind(model, x, torch.arange(2), **{own.name: value})
        return
    required = {
        name: getattr(KINDS[kind], name, 0.1)
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
    }
    with pytest.raises(ValueError, match=rf"^{own.name}: expected .*, got"):
        kind(**required | {own.name: value})


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_arguments_are_refused_by_name(make, options, message):
    with pytest.raises(ValueError) as caught:
        make(**options)
    assert message in str(caught.value)
