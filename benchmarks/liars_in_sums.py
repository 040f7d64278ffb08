"""Clients that lie about their sums of features: who is found, who is wrongly removed, what is won.

Clients send Z^T Z, Z^T Y and the classes' counts of 500 scattering features, 8 bits each (as in
one_exchange.py), of 28,000 images of Fashion-MNIST in all; the server has 2,000 more. Some clients,
of at least the median size, lie:

* **label shift**: each label is one more (and 0 for 9); **random labels**; **one class renamed**:
  its most frequent class becomes the next one; **backdoor**: half of its images have a white patch
  of 4 x 4 pixels and label 0;
* **ten copies**: sums and counts of shifted labels, times ten, as if it had ten times the examples;
  **scaled sums**: honest sums, times ten, with the counts as they are; **no Gram matrix**: random
  signs off the diagonal.

They are removed by :func:`fedntk.ntk.convex.ledger.find_harmful` with alpha = 0.05. Nothing is
tuned: the threshold follows from the validation examples, and the ridge is 0.01, the best of
1e-6 ... 1 on them for honest clients with each of three seeds.

    python benchmarks/liars_in_sums.py --data-dir FOLDER [--seeds 0,1,2]

A row is a federation. The seed is of the split, the validation examples and the liars; the features
are the same for all.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import RESULTS, keep_rows, parse_options
from torch import Tensor

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples, are_possible, find_harmful
from fedntk.ntk.convex.pooled_statistics import NormalEquations
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.attacks import ATTACKS as KIT
from fedntk.simulations.attacks import draw_gram_signs
from fedntk.simulations.data.partitions import Split, split_data
from fedntk.simulations.engine.building import load_setup

KEYS = ["alpha", "clients", "attack", "share", "seed"]
WIDTH, RIDGE, LEVEL, IMAGES, VALIDATION = 500, 0.01, 0.05, 30_000, 2_000
SHARES = {10: (0.1, 0.2), 100: (0.01, 0.05, 0.2)}


class WholeFeatures:
    """Random Fourier features of a width, in steps of 8 bits."""

    def __init__(self, width: int) -> None:
        self.step = 2.0 ** np.ceil(np.log2(np.sqrt(2 / width) / 127))
        self.fixed = FixedPoint(np.full(width, self.step, np.float32), bits=8)
        self.identity = Normaliser.identity(width)

    def sums(self, features: Tensor, labels: Tensor) -> FeatureStatistics:
        """Add up features (n, p)."""
        real = [features.float() * self.step]
        return FeatureStatistics.of(real, labels, 10, fixed_point=self.fixed)

    def equations(self, sums: FeatureStatistics) -> NormalEquations:
        """Return the ridge regression with a bias, as OneExchange has it."""
        return NormalEquations.of(sums.scaled(self.fixed), self.identity, bias=True)

    def rows(self, features: Tensor) -> Tensor:
        """Return features with a 1 appended (n, p + 1), float64."""
        return torch.cat([features.double() * self.step, torch.ones(len(features), 1)], 1)


WHOLE = WholeFeatures(WIDTH)
Attack = Callable[[Tensor, Tensor, Tensor, np.random.Generator], FeatureStatistics]


def scaled(own: FeatureStatistics, *, counts: bool) -> FeatureStatistics:
    gram, class_sums = 10 * own.gram, 10 * own.class_sums
    return replace(
        own, gram=gram, class_sums=class_sums, counts=own.counts * 10 if counts else own.counts
    )


def backdoor(x: Tensor, patched: Tensor, y: Tensor) -> FeatureStatistics:
    every = torch.arange(len(y)) % 2 == 0
    return WHOLE.sums(torch.where(every[:, None], patched, x), torch.where(every, 0, y))


def with_labels(name: str) -> Attack:
    return lambda x, _, y, rng: WHOLE.sums(*KIT[name].on_examples(x, y, 10, rng))


def signs(own: FeatureStatistics, rng: np.random.Generator) -> FeatureStatistics:
    return replace(own, gram=draw_gram_signs(own.gram, rng))


ATTACKS: dict[str, Attack] = {
    "label shift": with_labels("label-shift"),
    "random labels": with_labels("random-labels"),
    "one class renamed": with_labels("label-flip"),
    "backdoor": lambda x, patched, y, _: backdoor(x, patched, y),
    "ten copies": lambda x, _, y, __: scaled(WHOLE.sums(x, (y + 1) % 10), counts=True),
    "scaled sums": lambda x, _, y, __: scaled(WHOLE.sums(x, y), counts=False),
    "no Gram matrix": lambda x, _, y, rng: signs(WHOLE.sums(x, y), rng),
}


class Images:
    """Features of images and of the same with a patch, int8, and their labels."""

    def __init__(self, config: Config) -> None:
        setup = load_setup(config)
        self.extract = FeatureMap("last-layer").extractor(setup.network)
        some = np.random.default_rng(0).permutation(len(setup.data.y_train))[:IMAGES]
        x, self.y = setup.data.train(some)
        x_test, self.y_test = setup.data.test()
        self.x, self.patched = self.of(x), self.of(x, patch=True)
        self.x_test, self.patched_test = self.of(x_test), self.of(x_test[:2000], patch=True)
        self.data = replace(
            setup.data, x_train=setup.data.x_train[some], y_train=setup.data.y_train[some]
        )

    def of(self, x: Tensor, *, patch: bool = False) -> Tensor:
        """Features of images, which may get a patch."""
        if patch:
            x = x.clone()
            x[..., -5:-1, -5:-1] = x.max()
        return torch.cat([WHOLE.fixed(self.extract(part)).to(torch.int8) for part in x.split(1000)])

    def accuracy(self, linear: Tensor) -> float:
        """Share of the test images that a linear model classifies rightly."""
        return float((WHOLE.rows(self.x_test) @ linear).argmax(1).eq(self.y_test).double().mean())

    def success(self, linear: Tensor) -> float:
        """Share of the test images of other classes that become class 0 by the patch."""
        others = self.y_test[:2000] != 0
        scores = WHOLE.rows(self.patched_test[others]) @ linear
        return float(scores.argmax(1).eq(0).double().mean())


def large_clients(split: Split) -> np.ndarray:
    sizes = [len(indices) for indices in split.clients]
    return np.flatnonzero(sizes >= np.median(sizes))


def federation(
    images: Images, alpha: float, num: int, attack: str, share: float, seed: int
) -> dict[str, object]:
    config = Config(
        method="afl", num_clients=num, clients_per_round=num, partition="dirichlet", alpha=alpha,
        seed=seed, validation_examples=VALIDATION,
    )  # fmt: skip
    split = split_data(config, images.data)
    rng = np.random.default_rng([seed, num])
    liars = set(rng.choice(large_clients(split), round(share * num), replace=False).tolist())
    clients = {}
    for k, own in enumerate(split.clients):
        x, patched, y = (each[own] for each in (images.x, images.patched, images.y))
        clients[k] = ATTACKS[attack](x, patched, y, rng) if k in liars else WHOLE.sums(x, y)
    x, y = images.x[split.validation], images.y[split.validation]
    examples = ValidationExamples(WHOLE.rows(x), y, 10, WHOLE.fixed)
    ledger = ClientLedger(WHOLE.equations, RIDGE, WHOLE.equations(WHOLE.sums(x, y)))
    start = time.process_time()
    possible = {k: own for k, own in clients.items() if are_possible(own)}
    removed = {*(clients.keys() - possible), *find_harmful(ledger, possible, examples, LEVEL)}
    seconds = time.process_time() - start

    def model(without: set[int]) -> Tensor:
        return ledger.solve(
            FeatureStatistics.join(o for k, o in clients.items() if k not in without)
        )

    after, honest = model(removed), model(liars)
    row = {
        "liars": len(liars), "found": len(liars & removed),
        "impossible": len(liars - possible.keys()), "alarms": len(removed - liars),
        "accuracy-after": images.accuracy(after), "accuracy-honest": images.accuracy(honest),
        "cpu-seconds": round(seconds, 1),
    }  # fmt: skip
    try:
        total = FeatureStatistics.join(clients.values())
        before = ledger.solve(total)
        harms = [ledger.harm(before, ledger.solve(total - own)) for own in clients.values()]
    except ValueError:  # the sums have no solution
        return row
    order = np.argsort(-np.array(harms)).tolist()
    ranks = [order.index(k) + 1 for k in liars]
    row |= {"accuracy-before": images.accuracy(before), "worst-rank": max(ranks, default=0)}
    row["first-ranks"] = sum(rank <= len(liars) for rank in ranks)
    if attack == "backdoor":
        row |= {"success-before": images.success(before), "success-after": images.success(after)}
        row["success-honest"] = images.success(honest)
    return row


def draw(table: pd.DataFrame, path: Path) -> None:
    import matplotlib.pyplot as plt

    cases = [(a, k, s) for a in (0.1, 0.5) for k, shares in SHARES.items() for s in shares]
    names = [f"{k} clients, {s:.0%} lie" for _, k, s in cases]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharex="col", width_ratios=[1, 1])
    for row, alpha in zip(axes, (0.1, 0.5), strict=True):
        chosen = [(case, name) for case, name in zip(cases, names, strict=True) if case[0] == alpha]
        grid = np.zeros((len(ATTACKS), len(chosen)))
        loss = np.full((len(ATTACKS), len(chosen), 2), np.nan)
        for j, ((_, num, share), _) in enumerate(chosen):
            for i, attack in enumerate(ATTACKS):
                part = table[
                    (table.alpha == alpha) & (table.clients == num)
                    & (table.share == share) & (table.attack == attack)
                ]  # fmt: skip
                grid[i, j] = part.found.sum() / max(1, part.liars.sum())
                honest = part["accuracy-honest"]
                loss[i, j] = [
                    100 * (honest - part[f"accuracy-{w}"]).mean() for w in ("before", "after")
                ]
        row[0].imshow(grid, cmap="Greens", vmin=0, vmax=2, aspect="auto")
        for i, j in np.ndindex(grid.shape):
            row[0].text(j, i, f"{grid[i, j]:.0%}", ha="center", va="center", fontsize=9)
        row[1].imshow(np.zeros_like(grid), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        for i, j in np.ndindex(grid.shape):
            shown = ["none" if np.isnan(x) else f"{round(-x, 1) + 0.0:+.1f}" for x in loss[i, j]]
            text = " \N{RIGHTWARDS ARROW} ".join(shown)
            bad = np.isnan(loss[i, j, 0]) or loss[i, j, 0] > 1
            row[1].text(
                j, i, text, ha="center", va="center", fontsize=8, weight="bold" if bad else "normal"
            )
        for axis in row:
            axis.set_xticks(range(len(chosen)), [name.replace(", ", "\n") for _, name in chosen])
            axis.tick_params(length=0)
            for side in axis.spines.values():
                side.set_visible(False)
        row[0].set_yticks(range(len(ATTACKS)), list(ATTACKS))
        row[1].set_yticks([])
        row[0].set_ylabel(f"Dirichlet {alpha}", fontsize=11)
    axes[0, 0].set_title(f"Liars removed; seeds: {table.seed.nunique()}")
    axes[0, 1].set_title(
        "Points of accuracy over that without liars:\nbefore \N{RIGHTWARDS ARROW} after removal"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    options = parse_options(__doc__, data_dir="", seeds=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9))
    images = options.data_dir and Images(Config(
        method="afl", dataset="fashion-mnist", data_dir=options.data_dir, model="scattering",
        random_features=WIDTH, bandwidth=1.6, standardise=False,
    ))  # fmt: skip
    for seed in map(int, options.seeds if images else []):
        rows = []
        for alpha in (0.1, 0.5):
            for num, shares in SHARES.items():
                cases = [(attack, share) for attack in ATTACKS for share in shares]
                for attack, share in [("label shift", 0.0), *cases]:
                    case = dict(zip(KEYS, (alpha, num, attack, share, seed), strict=True))
                    rows.append(case | federation(images, alpha, num, attack, share, seed))
                    print(rows[-1], flush=True)
        keep_rows("liars_in_sums", rows, KEYS)
    draw(pd.read_csv(RESULTS / "liars_in_sums.csv"), RESULTS / "liars_in_sums.png")


if __name__ == "__main__":
    main()
