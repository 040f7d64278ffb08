"""Settings under which tests over all methods run each of them: with all its tools."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from fedntk.simulations import Config
from fedntk.simulations.methods import all_methods
from fedntk.strategies import RelayStrategy

SMALL = Config(
    num_clients=12,
    clients_per_round=4,
    rounds=3,
    clients_per_evaluation=3,
    train_examples=400,
    targets="0.3",
)

FEDAVG = Config(
    method="fedavg", num_clients=8, clients_per_round=3, clients_per_evaluation=2, rounds=2,
    train_examples=300, learning_rate=0.1,
)  # fmt: skip
PROJECTED = {"sampling_rate": 0.5, "projection": 20}
TOOLS: dict[str, Any] = {**PROJECTED, "cp_ntk_fl": {"sparsity": 0.5, "bits": 6, "shuffle": True}}
SETTINGS: dict[str, dict[str, Any]] = defaultdict(lambda: PROJECTED)
SETTINGS |= {
    "ntk-fl": {},
    "weighted-fedavg": {},
    "cp-ntk-fl": {**TOOLS, "average": {"decay": 0.6}},
    "tct": {
        **PROJECTED,
        "rounds": 4,
        "tct": {
            "bootstrap_rounds": 1, "num_features": 300, "local_steps": 20, "learning_rate": 1e-3,
        },
    },
    "fedavg": {**PROJECTED, "local_epochs": 3},
    "fed-ensemble": {
        **PROJECTED, "local_epochs": 3, "average": {"decay": 0.6},
        "fed_ensemble": {"num_models": 2, "schedule": "balanced"},
    },
    "fed-be": {"local_epochs": 3, "fed_be": {"num_samples": 3}},
    "scaffold": {
        **PROJECTED, "local_epochs": 3, "average": {"decay": 0.6}, "centre": True,
        "scaffold": {"server_learning_rate": 1.5},
    },
    "afl": {**PROJECTED, "afl": {"ridge": 0.1}},
    "deep-afl": {**PROJECTED, "deep_afl": {"layers": 2, "block_width": 20}},
    "safle": {**PROJECTED, "safle": {"limits": 2, "group_size": 3, "ridge": 0.1}},
    "glm": {"model": "linear", "projection": 3},  # few columns, so that no class is separated
    "one-exchange": {**PROJECTED, "random_features": 50},
    "ditto": {**PROJECTED, "local_epochs": 3, "ditto": {"personal_epochs": 2}},
    "fed-bn": {
        **PROJECTED, "local_epochs": 3, "min_partition_size": 4,
        "model": "tests.simulations.networks:normalised",
    },
    "fed-per": {**PROJECTED, "local_epochs": 3},
    "fed-proto": {**PROJECTED, "local_epochs": 3},
    "local-training": {**PROJECTED, "local_epochs": 3},
    "ntk-dfl": {
        **PROJECTED,
        "average": {"decay": 0.6},
        "ntk_dfl": {
            "degree": 2, "steps": "5,10", "selection": "own", "seal": True, "class_prior": True,
        },
    },
    "dfedavg": {**PROJECTED, "local_epochs": 3, "dfedavg": {"degree": 2, "gossip_steps": 2}},
    "dfedsam": {**PROJECTED, "local_epochs": 3, "dfedsam": {"degree": 2}},
    "d-psgd": {**PROJECTED, "d_psgd": {"degree": 2, "mixing": "metropolis", "seal": True}},
    "dispfl": {**PROJECTED, "local_epochs": 3, "dispfl": {"degree": 2, "same_masks": False}},
}  # fmt: skip


def small(method: str) -> Config:
    """Return SMALL for a method; with half of the clients where all of them train in each round."""
    gossips = issubclass(all_methods()[method].strategy_class, RelayStrategy)
    clients = {"num_clients": 6} if gossips else {}
    return SMALL.replace(method=method, **{**clients, **SETTINGS[method]})


def each_of(methods: Iterable[str]) -> list[Any]:
    """Return a parameter for each method; its tests run in one process and share finished runs."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(methods)]


def tiny(method: str) -> Config:
    """Return settings for a few rows of the caller's own, which clients have as they are."""
    changes = ("projection", "sampling_rate", "min_partition_size", "centre")
    changes = (*changes, *["model"] * (method == "fed-bn"))
    own = {name: value for name, value in SETTINGS[method].items() if name not in changes}
    common = {"num_clients": 6, "clients_per_round": 6, "rounds": 2, "standardise": False}
    validated = {"validation_examples": 20} if method == "one-exchange" else {}
    return Config(method=method, **{**common, **validated, **own})
