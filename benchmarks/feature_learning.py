"""Feature learning theory of FedAvg, measured on the two-patch data of Huang et al. (ICLR 2024).

    python benchmarks/feature_learning.py [--seeds 5]

Figures 1 and 3: loss and accuracy of client 1 by FedAvg and by local training, 20 IID clients, with
d = 1,000 and 8,000. Figure 2: signal and noise coefficients of client 1 of two, after each gradient
step. Figure 4: test accuracy of 20 clients in groups of 1, 3, 6 and 10, by FedAvg, local training
and averages within the group. Theorem 4.4: test error against n chi^2 ||mu||^4 / (K sigma_p^4 d),
for several signals, numbers of clients, groups, examples and dimensions.

Settings are the paper's (section 6.1): n = 100, 2,000 test examples a client, m = 50, ||mu|| = 2,
sigma_p = 1, eta = 1, E = 5, R = 100, full batches. The standard deviation of the first weights is
fedntk's choice: see ``fedntk.ntk.feature_learning.initial_std``; ``initial-std`` in the results has
figure 4 with others. Nothing was tuned. Each seed draws its own data and first weights.

Writes beside this file results/feature_learning.json, .csv (the runs of theorem 4.4) and _iid.csv
(figures 1 and 3), and the pictures feature_learning_iid.png, _trajectory.png, _groups.png and
_snr.png. It takes half an hour on one core.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot
from torch import Tensor

from fedntk.ntk.feature_learning import (
    Coefficients,
    TwoPatchDistribution,
    TwoPatchExamples,
    coefficient_step,
    decompose,
    evaluate,
    generalisation_exponent,
    initial_std,
    mixing_matrix,
    train,
)
from fedntk.simulations.report.figures import COLOURS
from fedntk.simulations.report.results import machine

WIDTH, ROUNDS, LOCAL_STEPS, RATE = 50, 100, 5, 1.0
EXAMPLES, TEST_EXAMPLES = 100, 2000
SHOWN_ROUNDS = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)
GROUPS = (1, 3, 6, 10)
LABELS = {"fedavg": "FedAvg", "group": "averages within the group", "local": "local training"}
RESULTS = Path(__file__).parent / "results"


def first_weights(dimension: int, seed: int, std: float | None = None) -> Tensor:
    """Draw the first weights of all clients."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, WIDTH, dimension, generator=generator)
    return (initial_std(dimension) if std is None else std) * drawn


def averaged(distribution: TwoPatchDistribution, method: str) -> Tensor:
    """Return group numbers; clients with the same number average with each other."""
    clients = distribution.num_clients
    return {
        "fedavg": torch.zeros(clients),
        "group": distribution.groups,
        "local": torch.arange(clients),
    }[method]


def exponents(distribution: TwoPatchDistribution, method: str, examples: int) -> Tensor:
    """Return theorem 4.4's exponent of each client; that of its own part of the federation."""
    parts = averaged(distribution, method)
    signals = distribution.signals()[distribution.groups]
    found = torch.empty(len(parts), dtype=signals.dtype)
    for part in parts.unique():
        own = parts == part
        found[own] = generalisation_exponent(
            signals[own], num_examples=examples, noise_std=distribution.noise_std
        )
    return found


def training(
    distribution: TwoPatchDistribution,
    method: str,
    *,
    examples: int = EXAMPLES,
    std: float | None = None,
    clients: list[int] | None = None,
) -> Iterator[Tensor]:
    """Yield the weights of all clients, or of some, after each round."""
    drawn = distribution.draw(examples, clients=clients, dtype=torch.float32)
    parts = averaged(distribution, method)
    mixing = mixing_matrix(parts if clients is None else parts[clients], dtype=torch.float32)
    return train(
        drawn,
        first_weights(distribution.dimension, distribution.seed, std),
        mixing,
        rounds=ROUNDS,
        local_steps=LOCAL_STEPS,
        learning_rate=RATE,
    )


def test_errors(distribution: TwoPatchDistribution, weights: Tensor) -> list[float]:
    """Return each client's test error; one client's test examples are in memory at a time."""
    found = []
    for k in range(distribution.num_clients):
        own = distribution.draw(TEST_EXAMPLES, part="test", clients=[k], dtype=torch.float32)
        found.append(float(evaluate(weights[k : k + 1], own).error))
    return found


# ------------------------------------------------------------------ figures 1 and 3


def curves(dimension: int, seeds: int) -> list[dict[str, Any]]:
    """Measure loss and accuracy of client 1, IID."""
    rows = []
    for seed in range(seeds):
        distribution = TwoPatchDistribution(dimension=dimension, seed=seed)
        sets: dict[str, TwoPatchExamples] = {
            "train": distribution.draw(EXAMPLES, clients=[0], dtype=torch.float32),
            "test": distribution.draw(TEST_EXAMPLES, part="test", clients=[0], dtype=torch.float32),
        }
        for method, clients in (("fedavg", None), ("local", [0])):  # which needs no others
            for number, weights in enumerate(training(distribution, method, clients=clients), 1):
                if number not in SHOWN_ROUNDS:
                    continue
                for part, examples in sets.items():
                    loss, error = (float(v) for v in evaluate(weights[:1], examples))
                    rows.append(
                        {
                            "dimension": dimension, "seed": seed, "method": method,
                            "round": number, "part": part, "loss": loss, "accuracy": 1 - error,
                        }
                    )  # fmt: skip
        print("figure 1", rows[-1], flush=True)
    return rows


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    dimensions = sorted({row["dimension"] for row in rows})
    figure, grid = pyplot.subplots(
        len(dimensions), 4, figsize=(11, 2.9 * len(dimensions)), layout="constrained", squeeze=False
    )
    for line, dimension in zip(grid, dimensions, strict=True):
        panels = [(p, v) for p in ("train", "test") for v in ("loss", "accuracy")]
        for axes, (part, value) in zip(line, panels, strict=True):
            for i, method in enumerate(("fedavg", "local")):
                own = [
                    r for r in rows
                    if (r["dimension"], r["part"], r["method"]) == (dimension, part, method)
                ]  # fmt: skip
                scale = 100 if value == "accuracy" else 1
                rounds = sorted({r["round"] for r in own})
                values = np.array(
                    [[scale * r[value] for r in own if r["round"] == t] for t in rounds]
                )
                axes.plot(rounds, values.mean(1), color=COLOURS[i], label=LABELS[method])
                axes.fill_between(rounds, values.min(1), values.max(1), color=COLOURS[i], alpha=0.2)
            unit = " (%)" if value == "accuracy" else ""
            axes.set(xlabel="round", ylabel=f"{part} {value}{unit}", title=f"d = {dimension:,}")
            axes.set_ylim(*((45, 101.5) if value == "accuracy" else (0, None)))
            axes.grid(alpha=0.3)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(),
        loc="outside lower center", ncols=2, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ------------------------------------------------------------------ figure 2


def trajectory(rounds: int = 12) -> dict[str, Any]:
    """Follow the coefficients of client 1 of two, by lemma 4.1 and by projection of the weights."""
    distribution = TwoPatchDistribution(group_sizes=(2,))
    examples = distribution.draw(EXAMPLES)
    initial = first_weights(distribution.dimension, 0).double()
    mixing = mixing_matrix(torch.zeros(2))
    found = Coefficients.zeros(examples, WIDTH)
    followed = train(
        examples, initial, mixing, rounds=rounds, local_steps=LOCAL_STEPS, learning_rate=RATE
    )
    times, signal, noise, projected = [0], [0.0], [torch.zeros(EXAMPLES).tolist()], []
    worst = 0.0

    def note(time: int) -> None:
        times.append(time)
        signal.append(float(found.signal[0, 0].max()))
        noise.append(found.noise[0, 0].flatten(1).amax(1).tolist())

    for number, weights in enumerate(followed):
        for step in range(LOCAL_STEPS):
            found = coefficient_step(found, initial, examples, learning_rate=RATE)
            note(number * LOCAL_STEPS + step + 1)
        found = found.mixed(mixing)
        note((number + 1) * LOCAL_STEPS)
        by_projection = decompose(weights, initial, examples)
        projected.append(
            [
                times[-1],
                float(by_projection.signal[0, 0].max()),
                float(by_projection.noise[0, 0].max()),
            ]
        )
        for name in ("signal", "noise"):
            difference = getattr(by_projection, name) - getattr(found, name)
            worst = max(worst, float(difference.abs().max() / getattr(found, name).abs().max()))
    return {
        "times": times, "signal": signal, "noise": noise, "projected": projected,
        "largest-difference-to-projection": worst,
        "drops-of-largest-noise": [
            1 - max(after) / max(before)
            for t, u, before, after in zip(times, times[1:], noise, noise[1:], strict=False)
            if t == u
        ],
        "largest-relative-fall-of-signal": max(
            1 - after / before for before, after in pairwise(signal[1:])
        ),
    }  # fmt: skip


def draw_trajectory(found: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    noise = np.array(found["noise"])
    axes.plot(found["times"], noise[:, :12], color=COLOURS[1], lw=0.6, alpha=0.6)
    axes.plot([], [], color=COLOURS[1], lw=0.6, label="noise, each of 12 of its examples")
    axes.plot(
        found["times"], noise.max(1), color=COLOURS[1], lw=1.8, label="noise, largest of all 100"
    )
    axes.plot(found["times"], found["signal"], color=COLOURS[0], lw=1.8, label="signal")
    times, signal, largest = zip(*found["projected"], strict=True)
    axes.plot(times, signal, "o", ms=4, mfc="none", color="0.2", label="by projection of weights")
    axes.plot(times, largest, "o", ms=4, mfc="none", color="0.2")
    axes.set(
        xlabel="gradient steps (weights are averaged after every fifth)",
        ylabel="largest coefficient over all filters",
        title="Client 1 of two, FedAvg, IID",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ------------------------------------------------------------------ figure 4 and theorem 4.4


def measured(
    name: str,
    distribution: TwoPatchDistribution,
    method: str,
    *,
    examples: int = EXAMPLES,
    std: float | None = None,
) -> list[dict[str, Any]]:
    """Train, and return the test error of each group of clients with one signal."""
    weights = torch.empty(0)
    for after in training(distribution, method, examples=examples, std=std):
        weights = after
    errors = torch.tensor(test_errors(distribution, weights))
    drawn = distribution.draw(examples, dtype=torch.float32)
    train_errors = evaluate(weights, drawn).error
    theory = exponents(distribution, method, examples)
    rows = []
    for group, size in enumerate(distribution.group_sizes):
        own = distribution.groups == group
        rows.append(
            {
                "sweep": name, "method": method, "group-size": size,
                "clients": distribution.num_clients, "examples": examples,
                "dimension": distribution.dimension, "signal": distribution.signal_norm,
                "initial-std": initial_std(distribution.dimension) if std is None else std,
                "seed": distribution.seed, "exponent": float(theory[own][0]),
                "test-error": float(errors[own].mean()),
                "train-error": float(train_errors[own].mean()),
            }
        )  # fmt: skip
    print(rows[-1], flush=True)
    return rows


def sweep(seeds: int) -> list[dict[str, Any]]:
    """Measure test error for several values of one quantity of the exponent."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        for signal in (2.0, 1.0):
            groups = TwoPatchDistribution(GROUPS, signal_norm=signal, seed=seed)
            for method in ("fedavg", "group", "local"):
                rows += measured("groups", groups, method)
        for signal in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
            one = TwoPatchDistribution((20,), signal_norm=signal, seed=seed)
            rows += measured("signal", one, "fedavg")
            rows += measured("signal", one, "local")
        for clients in (1, 2, 5, 10):
            one = TwoPatchDistribution((clients,), signal_norm=1.0, seed=seed)
            rows += measured("clients", one, "fedavg")
        for examples in (25, 50, 200):
            one = TwoPatchDistribution((5,), signal_norm=1.0, seed=seed)
            rows += measured("examples", one, "fedavg", examples=examples)
        for dimension in (500, 2000, 4000):
            one = TwoPatchDistribution((5,), dimension, 1.0, seed=seed)
            rows += measured("dimension", one, "fedavg")
    return rows


def initialisations(seeds: int) -> list[dict[str, Any]]:
    """Measure figure 4 with other standard deviations of the first weights."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        groups = TwoPatchDistribution(GROUPS, seed=seed)
        for factor in (0.01, 1.0):
            for method in ("fedavg", "group", "local"):
                std = factor / math.sqrt(groups.dimension)
                rows += measured("initial-std", groups, method, std=std)
    return rows


def summarised(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and range of the test accuracies over the seeds, for each setting."""
    settings = (
        "sweep", "method", "group-size", "clients", "examples", "dimension", "signal",
        "initial-std", "exponent",
    )  # fmt: skip
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[k] if k != "exponent" else round(row[k], 9) for k in settings)
        grouped.setdefault(key, []).append(row)
    table = []
    for key, own in grouped.items():
        accuracy = [100 * (1 - row["test-error"]) for row in own]
        table.append(
            {
                **dict(zip(settings, key, strict=True)),
                "seeds": len(own),
                "test-accuracy": float(np.mean(accuracy)),
                "lowest": min(accuracy),
                "highest": max(accuracy),
                "train-error": float(np.mean([row["train-error"] for row in own])),
            }
        )
    return table


def draw_groups(rows: list[dict[str, Any]], path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.9), layout="constrained", sharey=True)
    for axes, signal in zip(panels, (2.0, 1.0), strict=True):
        own = [r for r in rows if r["sweep"] == "groups" and r["signal"] == signal]
        for i, method in enumerate(LABELS):
            mine = [r for r in own if r["method"] == method]
            mean = np.array([r["test-accuracy"] for r in mine])
            spread = np.array(
                [
                    [r["test-accuracy"] - r["lowest"], r["highest"] - r["test-accuracy"]]
                    for r in mine
                ]
            )
            x = np.arange(len(mine)) + 0.27 * (i - 1)
            axes.bar(x, mean, 0.25, color=COLOURS[i], label=LABELS[method])
            axes.errorbar(x, mean, spread.T, fmt="none", color="0.2", capsize=2, lw=1)
        axes.set_xticks(range(len(GROUPS)), [str(size) for size in GROUPS])
        axes.set(xlabel="clients with the same signal", title=f"signal norm {signal:g}")
        axes.set_ylim(50, 101)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("test accuracy (%)")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center", ncols=3, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_theory(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6.8, 4.8), layout="constrained")
    labels = {
        "signal": "signal norm 0.5 to 3, K = 1 or 20",
        "clients": "1 to 10 clients",
        "groups": "groups of 1, 3, 6, 10",
        "examples": "25 to 200 examples a client",
        "dimension": "d = 500 to 4,000",
    }
    least = 1 / (20 * TEST_EXAMPLES)
    for i, (name, label) in enumerate(labels.items()):
        own = [r for r in rows if r["sweep"] == name and r["test-accuracy"] < 100]
        axes.loglog(
            [r["exponent"] for r in own],
            [1 - r["test-accuracy"] / 100 for r in own],
            "os^Dv"[i], color=COLOURS[i], ms=5, mfc="none", label=label,
        )  # fmt: skip
    x = np.geomspace(0.004, 30, 200)
    linear = [0.5 * math.erfc(math.sqrt(v / 2)) for v in x]
    axes.loglog(x, linear, color="0.4", lw=1, label=r"$\Phi(-\sqrt{x})$: a linear classifier")
    axes.set(
        xlabel=r"$x = n\,\chi^2 \|\mu\|^4 / (K \sigma_p^4 d)$",
        ylabel="test error",
        ylim=(least, 0.6),
        xlim=(0.004, 30),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    followed = trajectory()
    draw_trajectory(followed, RESULTS / "feature_learning_trajectory.png")
    rows = sweep(seeds)
    table = summarised(rows)
    draw_groups(table, RESULTS / "feature_learning_groups.png")
    draw_theory(table, RESULTS / "feature_learning_snr.png")
    other = summarised(initialisations(seeds))
    by_round = [row for dimension in (1000, 8000) for row in curves(dimension, seeds)]
    draw_curves(by_round, RESULTS / "feature_learning_iid.png")
    write_csv(rows, RESULTS / "feature_learning.csv")
    write_csv(by_round, RESULTS / "feature_learning_iid.csv")
    summary = {
        "machine": machine(),
        "settings": {
            "width": WIDTH, "rounds": ROUNDS, "local-steps": LOCAL_STEPS, "learning-rate": RATE,
            "examples": EXAMPLES, "test-examples": TEST_EXAMPLES, "seeds": seeds,
        },
        "theorem": table,
        "initial-std": other,
        "trajectory": {k: v for k, v in followed.items() if k not in ("times", "noise", "signal")},
    }  # fmt: skip
    text = json.dumps(summary, indent=1)
    (RESULTS / "feature_learning.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
