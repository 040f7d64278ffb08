"""Try to tell two neighbouring data sets apart by what a private run shows.

For each private configuration, half of the runs have a data set, and half its neighbour, chosen so
that the mechanism's sensitivity is attained. Each is a run of the product: settings, clients,
messages, files. The attacker sees what the claim is made against (the server's sums) and
all that the run wrote: the model, and each number of its tables, summary and inputs.json, but for
times and memory. It learns on the first half of the runs which view tells most, and the best
threshold: each number by itself, all of the model by Fisher's discriminant, and all that the server
sees likewise. On the second half the rates of its hits and false alarms give a lower bound of
epsilon, with Clopper and Pearson's limits: at most 2.5 % of audits of a true claim are above it.

    python benchmarks/private_audit.py --runs 2000

The last row is a control, in which the inputs' moments, which tell, are said to be public.
"""

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import parse_options, write
from rich.progress import track
from scipy.stats import beta
from torch import nn

from fedntk.simulations import OwnData, run
from fedntk.simulations.report.results import load_model
from fedntk.strategies import NoisySums

DELTA, WIDTH, CLIENTS, EPSILON = 1e-5, 3, 4, 3.0
IGNORED = re.compile(r"second|memory|machine|threads|processor|\.data|\.split|\.name|\.out")
seen: list[np.ndarray] = []  # what the server of the run that is at work has seen


def keep_what_servers_see() -> None:
    """Have the product's own strategy keep the sums that it opens."""
    solve = NoisySums.solve

    def layer(self: NoisySums, sums: Any, shares: Any = None) -> Any:
        if shares is not None:  # else the server is trusted with exact sums
            seen.append(np.concatenate([sums.gram, sums.class_sums.ravel()]).astype(float))
        return solve(self, sums, shares)

    NoisySums.solve = layer  # type: ignore[method-assign]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 2))


def data_sets(kind: str, examples: int) -> tuple[OwnData, OwnData]:
    """Two neighbours: with and without a row, or a client's rows."""
    rng = np.random.default_rng(0)
    x = np.zeros((24, WIDTH))
    x[:, :2] = rng.normal(size=(24, 2))
    y, owners = np.arange(24) % 2, np.arange(24) % CLIENTS
    test = rng.normal(size=(10, WIDTH)), np.arange(10) % 2
    canary = np.zeros((examples, WIDTH))
    canary[:, 2] = 5.0
    last = np.full(examples, CLIENTS - 1)
    ones = np.ones(examples, int)
    if kind == "client":  # a client whose one example is zero adds nothing to the sums
        of_client = np.full(examples, CLIENTS)
        pairs = [(canary, ones, of_client), (np.zeros((1, WIDTH)), ones[:1], of_client[:1])]
    else:
        pairs = [(canary, ones, last), (canary[:0], ones[:0], last[:0])]
    made = []
    for rows, labels, who in pairs:
        every = np.concatenate([x, rows]), np.concatenate([y, labels])
        owner = np.concatenate([owners, who])
        split = [np.flatnonzero(owner == client) for client in range(owner.max() + 1)]
        made.append(OwnData(every, test=test, split=split))
    return made[0], made[1]


SUMS = {
    "standardise": False, "clients_per_evaluation": 0, "rounds": 1, "public": "schema, model",
    "clients_per_round": 0, "test_share": 0.0,
}  # fmt: skip
EXACT = {"auto_ridge": False, "validation_share": 0.0}
NOISE = {"epsilon": EPSILON, "delta": DELTA, "colluding": 0}
NOISY = {"sums": EXACT, "noise": NOISE}
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "sums, trusted server": ("one-exchange", "row", NOISY, 1),
    "sums, clients' shares": (
        "one-exchange",
        "row",
        {"secure": {"threshold": 1.0}, **NOISY},
        1,
    ),
    "sums, a whole client": (
        "one-exchange",
        "client",
        {"sums": EXACT, "noise": NOISE | {"client_examples": 6}},
        6,
    ),
    "control: moments said to be public": ("one-exchange", "row", NOISY, 1),
}  # fmt: skip


def facts(value: Any, name: str = "") -> dict[str, float]:
    """Return every number in what JSON holds, by its path."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        pairs = [pair for key, part in parts for pair in facts(part, f"{name}.{key}").items()]
    elif isinstance(value, str):
        pairs = [(name, float(hash(value) % 1000))]
    else:
        pairs = [(name, float(value))] if value is not None else []
    return {key: number for key, number in pairs if not IGNORED.search(key)}


def release(name: str, data: OwnData, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Run a configuration once; return views of what it shows, and the epsilon that it claims."""
    method, _, options, _ = CONFIGURATIONS[name]
    control = {"standardise": True, "public": "schema, model, moments"}
    settings = {**SUMS, **(control if name.startswith("control") else {})}
    settings["secure"] = options.get("secure", False)
    settings[method] = {key: value for key, value in options.items() if key != "secure"}
    seen.clear()
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            {**settings, "seed": seed}, method=method, data=data, model=network(), out=folder,
            progress=False,
        )  # fmt: skip
        written = [result.summary, json.loads((Path(folder) / "inputs.json").read_text())]
        written += map(json.loads, (Path(folder) / "rounds.jsonl").read_text().splitlines())
        model = np.concatenate([a.ravel() for a in load_model(folder).values()])
    numbers = {str(i): part for i, part in enumerate(written)}
    views = {
        f"file {key}": np.clip(np.nan_to_num([value]), -1e9, 1e9)
        for key, value in facts(numbers).items()
    }
    views["model"] = np.nan_to_num(model.astype(float))
    if seen:
        views["server"] = seen[0]
    metrics = written[-1]
    epsilons = [value for key, value in metrics.items() if key.startswith("epsilon")]
    return views, float(epsilons[0])


def lower_bound(hits: int, alarms: int, half: int) -> float:
    """Lower bound of epsilon from hits and false alarms among as many runs each."""
    least = beta.ppf(0.0125, hits, half - hits + 1) if hits else 0.0
    most = beta.ppf(1 - 0.0125, alarms + 1, half - alarms) if alarms < half else 1.0
    return math.log((least - DELTA) / most) if least > DELTA else -math.inf


def attack(with_row: np.ndarray, without: np.ndarray) -> tuple[float, float]:
    """Estimated and held-out bound of epsilon from one view (runs, numbers) of either data set."""
    half = len(with_row) // 2
    first, second = with_row[:half], without[:half]
    pooled = np.concatenate([first - first.mean(0), second - second.mean(0)])
    covariance = pooled.T @ pooled / len(pooled)
    ridge = max(1e-9 * np.trace(covariance) / len(covariance), 1e-30)
    difference = first.mean(0) - second.mean(0)
    direction = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), difference)
    scores = [part @ direction for part in (first, second, with_row[half:], without[half:])]
    best, found = -math.inf, 0.0
    for a, b, c, d in ((0, 1, 2, 3), (1, 0, 3, 2)):  # either may be the one that is detected
        sign = 1 if a == 0 else -1
        for threshold in np.quantile(
            sign * np.concatenate(scores[:2]), np.linspace(0.01, 0.99, 99)
        ):
            hits, alarms = (int((sign * scores[k] > threshold).sum()) for k in (a, b))
            if (bound := lower_bound(hits, alarms, half)) > best:
                held = (int((sign * scores[k] > threshold).sum()) for k in (c, d))
                best, found = bound, lower_bound(*held, len(scores[2]))
    return best, max(0.0, found)


def main() -> None:
    options = parse_options(__doc__, runs=2000, only="")
    keep_what_servers_see()
    rows = []
    for name, (_, kind, _, examples) in CONFIGURATIONS.items():
        if options.only not in name:
            continue
        pair = data_sets(kind, examples)
        views: list[list[dict[str, np.ndarray]]] = [[], []]
        for i in track(range(options.runs), description=name):
            found, claim = release(name, pair[i % 2], i)
            views[i % 2].append(found)
        common = set.intersection(*(set(found) for part in views for found in part))
        bounds = {
            view: attack(*(np.stack([found[view] for found in part]) for part in views))
            for view in sorted(common)
        }
        best = max(bounds, key=lambda view: bounds[view][0])
        row = {
            "configuration": name, "claim": claim, "runs": options.runs, "best-view": best,
            "lower-bound": bounds[best][1], "model": bounds["model"][1],
            "server": bounds["server"][1] if "server" in bounds else None,
            "numbers-in-files": len(common) - 2,
        }  # fmt: skip
        print(json.dumps(row))
        if options.runs >= 500 and name.startswith("control") and bounds[best][1] <= claim:
            raise RuntimeError("the audit does not find what is there to be found")
        rows.append(row)
        write("private_audit", summary={"rows": rows, "delta": DELTA})


if __name__ == "__main__":
    main()
