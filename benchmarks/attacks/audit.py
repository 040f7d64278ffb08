"""Try to tell two neighbouring data sets apart by what a private run shows.

docs/results/privacy.md has the rules. Views are the server's sums, the model, and each number that
the run wrote in its tables, summary and inputs.json, but for times and memory. The first half of
the runs chooses the view and the best threshold: a number by itself, the model and the sums by
Fisher's discriminant. The bound has Clopper and Pearson's limits.
"""

import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.stats import binomtest
from torch import nn

from fedntk.simulations import OwnData, run
from fedntk.simulations.report.results import load_model
from fedntk.strategies import NoisySums

from . import Row, grid

DELTA, WIDTH, CLIENTS = 1e-5, 3, 4
IGNORED = re.compile(r"second|memory|machine|threads|processor|\.data|\.split|\.name|\.out")
SETTINGS: dict[str, Any] = {
    "standardise": False, "clients_per_evaluation": 0, "rounds": 1, "public": "schema, model",
    "clients_per_round": 0, "test_share": 0.0,
}  # fmt: skip
EXACT = {"auto_ridge": False, "validation_share": 0.0}
NOISE = {"epsilon": 3.0, "delta": DELTA, "colluding": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "sums, trusted server": {},
    "sums, clients' shares": {"secure": {"threshold": 1.0}},
    "sums, a whole client": {"one-exchange": {"noise": {**NOISE, "client_examples": 6}}},
    "control: moments said to be public": {"standardise": True,
                                           "public": "schema, model, moments"},
}  # fmt: skip
CELLS = grid(configuration=CONFIGURATIONS, runs=(2000,))
Views = dict[str, np.ndarray]


def data_sets(examples: int) -> tuple[OwnData, OwnData]:
    """Two neighbours: with and without a row, or the rows of a client."""
    rng = np.random.default_rng(0)
    x = np.zeros((24, WIDTH))
    x[:, :2] = rng.normal(size=(24, 2))
    y, owners = np.arange(24) % 2, np.arange(24) % CLIENTS
    test = rng.normal(size=(10, WIDTH)), np.arange(10) % 2
    canary = np.zeros((examples, WIDTH))
    canary[:, 2] = 5.0
    # a client whose one example is zero adds nothing to the sums
    neighbour, owner = (canary[:0], CLIENTS - 1) if examples == 1 else (0 * canary[:1], CLIENTS)

    def joined(rows: np.ndarray) -> OwnData:
        owner_of = np.concatenate([owners, np.full(len(rows), owner)])
        split = [np.flatnonzero(owner_of == k) for k in range(owner_of.max() + 1)]
        every = np.concatenate([x, rows]), np.concatenate([y, np.ones(len(rows), int)])
        return OwnData(every, test=test, split=split)

    return joined(canary), joined(neighbour)


def facts(value: Any, name: str = "") -> dict[str, float]:
    """Return every number in what JSON holds, by its path."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        pairs = [facts(part, f"{name}.{key}").items() for key, part in parts]
        return dict(itertools.chain.from_iterable(pairs))
    if value is None or IGNORED.search(name):
        return {}
    return {name: float(hash(value) % 1000 if isinstance(value, str) else value)}


def release(configuration: str, data: OwnData, seed: int) -> tuple[Views, float]:
    """Run a configuration once; return views of what it shows, and the epsilon that it claims."""
    settings = SETTINGS | CONFIGURATIONS[configuration]
    settings["one-exchange"] = {"sums": EXACT, "noise": NOISE, **settings.get("one-exchange", {})}
    seen: list[np.ndarray] = []
    solve = NoisySums.solve

    def keep(self: NoisySums, sums: Any, shares: Any = None) -> Any:
        if shares is not None:  # else the server is trusted with exact sums
            seen.append(np.concatenate([sums.gram, sums.class_sums.ravel()]).astype(float))
        return solve(self, sums, shares)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 2))
    with tempfile.TemporaryDirectory() as folder, patch.object(NoisySums, "solve", keep):
        result = run(
            {**settings, "seed": seed}, method="one-exchange", data=data, model=model,
            out=folder, progress=False,
        )  # fmt: skip
        written = [result.summary, json.loads((Path(folder) / "inputs.json").read_text())]
        written += map(json.loads, (Path(folder) / "rounds.jsonl").read_text().splitlines())
        weights = np.concatenate([a.ravel() for a in load_model(folder).values()])
    views = {
        f"file {key}": np.clip(np.nan_to_num([value]), -1e9, 1e9)
        for key, value in facts(written).items()
    }
    views["model"] = np.nan_to_num(weights.astype(float))
    views |= {"server": seen[0]} if seen else {}
    return views, next(float(v) for key, v in written[-1].items() if key.startswith("epsilon"))


def lower_bound(hits: int, alarms: int, half: int) -> float:
    """Lower bound of epsilon from hits and false alarms among as many runs each."""
    least, most = (binomtest(n, half).proportion_ci(0.975) for n in (hits, alarms))
    return math.log((least.low - DELTA) / most.high) if least.low > DELTA else -math.inf


def bounds(with_row: np.ndarray, without: np.ndarray) -> tuple[float, float]:
    """Estimated and held-out bound of epsilon from one view (runs, numbers) of either data set."""
    half = len(with_row) // 2
    first, second = with_row[:half], without[:half]
    pooled = np.concatenate([first - first.mean(0), second - second.mean(0)])
    covariance = pooled.T @ pooled / len(pooled)
    ridge = max(1e-9 * np.trace(covariance) / len(covariance), 1e-30)
    difference = first.mean(0) - second.mean(0)
    direction = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), difference)
    scores = [part @ direction for part in (first, second, with_row[half:], without[half:])]
    best, held_out = -math.inf, 0.0
    for sign, *order in ((1, 0, 1, 2, 3), (-1, 1, 0, 3, 2)):  # either may be the one detected
        thresholds = np.quantile(sign * np.concatenate(scores[:2]), np.linspace(0.01, 0.99, 99))
        for threshold in thresholds:
            counts = [int((sign * scores[k] > threshold).sum()) for k in order]
            if (bound := lower_bound(*counts[:2], half)) > best:
                best, held_out = bound, lower_bound(*counts[2:], len(scores[2]))
    return best, max(0.0, held_out)


def rows(_: str, configuration: str, runs: int) -> Iterator[Row]:
    pair = data_sets(6 if "whole client" in configuration else 1)
    seen = [release(configuration, pair[i % 2], i) for i in range(runs)]
    views, claim = [view for view, _ in seen], seen[0][1]
    common = set.intersection(*map(set, views))
    results = {
        name: bounds(*(np.stack([view[name] for view in views[k::2]]) for k in (0, 1)))
        for name in sorted(common)
    }
    best = max(results, key=lambda name: results[name][0])
    yield {
        "claim": claim, "best-view": best, "lower-bound": results[best][1],
        "model": results["model"][1], "server": results["server"][1] if "server" in results else "",
        "numbers-in-files": len(common) - 2,
    }  # fmt: skip
