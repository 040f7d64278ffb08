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

The .csv has the runs of theorem 4.4, _iid.csv figures 1 and 3. It takes half an hour on one core.
"""

import itertools
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RESULTS, parse_options, write
from matplotlib import pyplot
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
from fedntk.simulations.report.figures import COLOURS

WIDTH, ROUNDS, LOCAL_STEPS, RATE = 50, 100, 5, 1.0
EXAMPLES, TEST_EXAMPLES = 100, 2000
SHOWN_ROUNDS = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)
GROUPS = (1, 3, 6, 10)
LABELS = {"fedavg": "FedAvg", "group": "averages within the group", "local": "local training"}


def first_weights(dimension: int, seed: int, std: float | None = None) -> Tensor:
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
    drawn = distribution.draw(examples, clients=clients, dtype=torch.float32)
    parts = averaged(distribution, method)
    mixing = mixing_matrix(parts if clients is None else parts[clients]).float()
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


def curves(dimension: int, seed: int) -> Iterator[dict[str, Any]]:
    distribution = TwoPatchDistribution(dimension=dimension, seed=seed)
    counts = {"train": EXAMPLES, "test": TEST_EXAMPLES}
    sets = {
        part: distribution.draw(count, part=part, clients=[0], dtype=torch.float32)
        for part, count in counts.items()
    }
    for method, clients in (("fedavg", None), ("local", [0])):  # which needs no others
        for number, weights in enumerate(training(distribution, method, clients=clients), 1):
            for part, examples in sets.items() if number in SHOWN_ROUNDS else ():
                loss, error = map(float, evaluate(weights[:1], examples))
                yield {
                    "dimension": dimension, "seed": seed, "method": method, "round": number,
                    "part": part, "loss": loss, "accuracy": 1 - error,
                }  # fmt: skip


def draw_curves(table: pd.DataFrame, path: Path) -> None:
    dimensions = sorted(table.dimension.unique())
    size = (11, 2.9 * len(dimensions))
    figure, grid = pyplot.subplots(
        len(dimensions), 4, figsize=size, layout="constrained", squeeze=False
    )
    by_case = table.groupby(["dimension", "part", "method"])
    panels = itertools.product(dimensions, ("train", "test"), ("loss", "accuracy"))
    for axes, (dimension, part, value) in zip(grid.flat, panels, strict=True):
        scale, unit, limits = (
            (100, " (%)", (45, 101.5)) if value == "accuracy" else (1, "", (0, None))
        )
        for colour, method in zip(COLOURS, ("fedavg", "local"), strict=False):
            rounds = by_case.get_group((dimension, part, method)).groupby("round")[value]
            seeds = scale * rounds.agg(["mean", "min", "max"])
            axes.plot(seeds.index, seeds["mean"], color=colour, label=LABELS[method])
            axes.fill_between(seeds.index, seeds["min"], seeds["max"], color=colour, alpha=0.2)
        axes.set(xlabel="round", ylabel=f"{part} {value}{unit}", title=f"d = {dimension:,}")
        axes.set_ylim(*limits)
        axes.grid(alpha=0.3)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(),
        loc="outside lower center", ncols=2, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=110)


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
        largest = [float(getattr(by_projection, name)[0, 0].max()) for name in ("signal", "noise")]
        projected.append([times[-1], *largest])
        for name in ("signal", "noise"):
            difference = getattr(by_projection, name) - getattr(found, name)
            worst = max(worst, float(difference.abs().max() / getattr(found, name).abs().max()))
    pairs = zip(pairwise(times), pairwise(map(max, noise)), strict=True)
    return {
        "times": times, "signal": signal, "noise": noise, "projected": projected,
        "largest-difference-to-projection": worst,
        "drops-of-largest-noise": [
            1 - after / before for (t, u), (before, after) in pairs if t == u
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
    *_, weights = training(distribution, method, examples=examples, std=std)
    errors = torch.tensor(test_errors(distribution, weights))
    train_errors = evaluate(weights, distribution.draw(examples, dtype=torch.float32)).error
    theory = exponents(distribution, method, examples)
    rows = []
    for group, size in enumerate(distribution.group_sizes):
        members = distribution.groups == group
        rows.append({
            "sweep": name, "method": method, "group-size": size,
            "clients": distribution.num_clients, "examples": examples,
            "dimension": distribution.dimension, "signal": distribution.signal_norm,
            "initial-std": initial_std(distribution.dimension) if std is None else std,
            "seed": distribution.seed, "exponent": round(float(theory[members][0]), 9),
            "test-error": float(errors[members].mean()),
            "train-error": float(train_errors[members].mean()),
        })  # fmt: skip
    print(rows[-1], flush=True)
    return rows


def sweep(seed: int) -> list[dict[str, Any]]:
    def one(clients: int = 5, dimension: int = 1000, signal: float = 1.0) -> TwoPatchDistribution:
        return TwoPatchDistribution((clients,), dimension, signal, seed=seed)

    cases = [
        ("groups", TwoPatchDistribution(GROUPS, signal_norm=signal, seed=seed), method, EXAMPLES)
        for signal in (2.0, 1.0)
        for method in LABELS
    ]
    cases += [
        ("signal", one(20, signal=signal), method, EXAMPLES)
        for signal in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
        for method in ("fedavg", "local")
    ]
    cases += [("clients", one(number), "fedavg", EXAMPLES) for number in (1, 2, 5, 10)]
    cases += [("examples", one(), "fedavg", number) for number in (25, 50, 200)]
    cases += [("dimension", one(dimension=d), "fedavg", EXAMPLES) for d in (500, 2000, 4000)]
    return [row for *case, number in cases for row in measured(*case, examples=number)]


def initialisations(seed: int) -> list[dict[str, Any]]:
    """Figure 4 with other standard deviations of the first weights."""
    groups = TwoPatchDistribution(GROUPS, seed=seed)
    cases = itertools.product((0.01, 1.0), LABELS)
    return [
        row
        for factor, method in cases
        for row in measured("initial-std", groups, method, std=factor / groups.dimension**0.5)
    ]


def summarised(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    table["accuracy"] = 100 * (1 - table["test-error"])
    settings = [*table.columns[:8], "exponent"]
    over_seeds = table.groupby(settings, sort=False).agg(**{
        "seeds": ("seed", "count"), "test-accuracy": ("accuracy", "mean"),
        "lowest": ("accuracy", "min"), "highest": ("accuracy", "max"),
        "train-error": ("train-error", "mean"),
    })  # fmt: skip
    return over_seeds.reset_index()


def draw_groups(table: pd.DataFrame, path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.9), layout="constrained", sharey=True)
    for axes, signal in zip(panels, (2.0, 1.0), strict=True):
        shown = table[(table.sweep == "groups") & (table.signal == signal)]
        for i, (method, label) in enumerate(LABELS.items()):
            bars = shown[shown.method == method]
            mean, x = bars["test-accuracy"], np.arange(len(bars)) + 0.27 * (i - 1)
            spread = [mean - bars.lowest, bars.highest - mean]
            axes.bar(x, mean, 0.25, color=COLOURS[i], label=label)
            axes.errorbar(x, mean, spread, fmt="none", color="0.2", capsize=2, lw=1)
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


def draw_theory(table: pd.DataFrame, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6.8, 4.8), layout="constrained")
    labels = {
        "signal": "signal norm 0.5 to 3, K = 1 or 20",
        "clients": "1 to 10 clients",
        "groups": "groups of 1, 3, 6, 10",
        "examples": "25 to 200 examples a client",
        "dimension": "d = 500 to 4,000",
    }
    for marker, colour, (name, label) in zip("os^Dv", COLOURS, labels.items(), strict=False):
        shown = table[(table.sweep == name) & (table["test-accuracy"] < 100)]
        errors = 1 - shown["test-accuracy"] / 100
        axes.loglog(shown.exponent, errors, marker, color=colour, ms=5, mfc="none", label=label)
    x = np.geomspace(0.004, 30, 200)
    linear = [0.5 * math.erfc(math.sqrt(v / 2)) for v in x]
    axes.loglog(x, linear, color="0.4", lw=1, label=r"$\Phi(-\sqrt{x})$: a linear classifier")
    axes.set(
        xlabel=r"$x = n\,\chi^2 \|\mu\|^4 / (K \sigma_p^4 d)$", ylabel="test error",
        ylim=(1 / (20 * TEST_EXAMPLES), 0.6), xlim=(0.004, 30),
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    figure.savefig(path, dpi=120)


def main() -> None:
    seeds = range(parse_options(__doc__, seeds=5).seeds)
    torch.set_num_threads(1)
    followed = trajectory()
    draw_trajectory(followed, RESULTS / "feature_learning_trajectory.png")
    rows = [row for seed in seeds for row in sweep(seed)]
    table = summarised(rows)
    draw_groups(table, RESULTS / "feature_learning_groups.png")
    draw_theory(table, RESULTS / "feature_learning_snr.png")
    others = summarised([row for seed in seeds for row in initialisations(seed)])
    by_round = [row for d in (1000, 8000) for seed in seeds for row in curves(d, seed)]
    draw_curves(pd.DataFrame(by_round), RESULTS / "feature_learning_iid.png")
    write("feature_learning_iid", by_round)
    settings = {
        "width": WIDTH, "rounds": ROUNDS, "local-steps": LOCAL_STEPS, "learning-rate": RATE,
        "examples": EXAMPLES, "test-examples": TEST_EXAMPLES, "seeds": len(seeds),
    }  # fmt: skip
    del followed["times"], followed["noise"], followed["signal"]
    tables = {"theorem": table.to_dict("records"), "initial-std": others.to_dict("records")}
    write("feature_learning", rows, {"settings": settings, **tables, "trajectory": followed})


if __name__ == "__main__":
    main()
