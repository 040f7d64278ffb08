"""Bias and variance of Fed-ensemble on the toy of Shi et al. 2021, section 5 (Table 1, figure 2).

50 clients with two points each: y = a sin(2 pi x) + e, with a of N(1, 0.2^2) for each client, e of
N(0, 0.2^2), x uniform in [-1, 1]. The model is linear in 100 radial basis functions of width 0.08
with random centres. The data are fixed; each K is run 100 times, from other first weights and with
other samples of clients. With h the mean prediction of the 100 runs, and s = sin(2 pi x):

    bias = mean over x of (s - h)^2,    variance = mean over x and runs of (h - prediction)^2

    python benchmarks/fed_ensemble_toy.py [--runs 100] [--rounds 200] [--ages 40]

The paper gives no number of rounds or of sampled clients, no local steps or rate, and no first
weights. Here they are 10 clients a round, 10 steps at rate 0.1, and N(0, 1). The rounds are counted
in two ways. In the first all K have 200, so one of K models gets one K-th of the updates. In the
second, algorithm 1's, all K have 40 ages, which are K rounds each: so each model gets the same
number of updates, and K models take K times the rounds. Each run is one of the strategy with its
clients.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, ROOT, parse_options, write
from matplotlib import pyplot
from numpy.typing import NDArray

from fedntk.simulations.config.importing import import_named
from fedntk.simulations.report.figures import COLOURS

TOY = ROOT / "simulations" / "tables" / "fed-ensemble" / "toy.py"  # data, client, training
CLIENTS, GRID, Data, ToyClient, trained_ensemble = (
    import_named("program", f"{TOY}:{name}")
    for name in ("CLIENTS", "GRID", "Data", "ToyClient", "trained_ensemble")
)
SAMPLED, LOCAL_STEPS, RATE = 10, 10, 0.1
MODELS = (1, 2, 10, 20, 40)
PAPER = {
    "bias": dict(zip(MODELS, (0.109, 0.117, 0.112, 0.113, 0.112), strict=True)),
    "variance": dict(zip(MODELS, (0.0496, 0.0115, 0.0063, 0.0045, 0.0042), strict=True)),
}
Floats = NDArray[np.float64]


def models_of_a_run(data: Data, num_models: int, seed: int, rounds: int) -> Floats:
    generator = np.random.default_rng([seed, *b"first weights"])
    features = data.features(data.x)

    first = [{"w": generator.normal(size=100)} for _ in range(num_models)]
    learned = trained_ensemble(
        lambda k: ToyClient(features[k], data.y[k], LOCAL_STEPS, RATE),
        first, CLIENTS, rounds, seed,
        num_strata=min(num_models, SAMPLED), fraction_train=SAMPLED / CLIENTS,
    )  # fmt: skip
    return np.stack([model["w"] for model in learned])


def bias_and_variance(predictions: Floats) -> tuple[float, float]:
    """Return both, given the predictions (runs, points) of ensembles."""
    mean = predictions.mean(0)
    bias = np.mean((np.sin(2 * np.pi * GRID) - mean) ** 2)
    return float(bias), float(np.mean((predictions - mean) ** 2))


def draw(data: Data, models: Floats, single: Floats, path: Path) -> None:
    at = data.features(GRID)
    own = models @ at.T
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(GRID, np.sin(2 * np.pi * GRID), "k--", label="sin 2πx")
    axes.fill_between(
        GRID, *np.quantile(own, [0.05, 0.95], axis=0), color=COLOURS[2], alpha=0.3,
        label="90 % of the 40 models",
    )  # fmt: skip
    axes.plot(GRID, own.mean(0), color=COLOURS[0], label="their mean")
    axes.plot(GRID, at @ single, color=COLOURS[1], lw=1, label="one model, K = 1")
    axes.plot(data.x.ravel(), data.y.ravel(), ".", color="0.4", ms=4, label="examples")
    axes.set(xlabel="x", ylabel="y", ylim=(-2.2, 3), title="Fed-ensemble on the toy of its paper")
    axes.legend(fontsize=8, ncols=3, loc="upper center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    options = parse_options(__doc__, runs=100, rounds=200, ages=40)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    data = Data(0)
    at, rows, examples = data.features(GRID), [], {}
    for num_models in MODELS:
        row: dict[str, Any] = {"K": num_models}
        forms = {"": options.rounds, "-by-age": options.ages * num_models}
        for form, rounds in forms.items():
            learned = [
                models_of_a_run(data, num_models, seed, rounds) for seed in range(options.runs)
            ]
            predictions = np.stack([models.mean(0) @ at.T for models in learned])
            bias, variance = bias_and_variance(predictions)
            row |= {f"bias{form}": round(bias, 4), f"variance{form}": round(variance, 5)}
            examples.setdefault(num_models, learned[0])
        row |= {f"paper-{key}": values[num_models] for key, values in PAPER.items()}
        rows.append(row)
        print(row, flush=True)
    draw(data, examples[40], examples[1][0], RESULTS / "fed_ensemble_toy.png")
    settings = vars(options) | {"clients": SAMPLED, "steps": LOCAL_STEPS, "rate": RATE}
    write("fed_ensemble_toy", summary={"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
