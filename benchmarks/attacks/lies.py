"""Clients that lie about their sums of features: who is found, who is wrongly removed.

docs/results/ledger.md has all lies and copies. Clients send Z^T Z, Z^T Y and the classes' counts,
8 bits each (as in tables/exchanges.py). Nothing is tuned on these federations: the ridge is the
best of 1e-6 ... 1 on the validation examples for honest clients with each of three seeds, and of
copies on them for the sums of all, liars included. Noise of copies is 5 % of the largest pixel.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples, are_possible, find_harmful
from fedntk.ntk.convex.pooled_statistics import NormalEquations, best_ridge
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.attacks import ATTACKS as KIT
from fedntk.simulations.attacks import draw_gram_signs
from fedntk.simulations.data.partitions import Split, split_data
from fedntk.simulations.engine.building import load_setup

from . import Row, grid

RIDGE, LEVEL, IMAGES, NOISE, ALPHAS = 0.01, 0.05, 30_000, 0.05, (0.1, 0.5)
SHARES = ((10, 0.0), (10, 0.1), (10, 0.2), (100, 0.0), (100, 0.01), (100, 0.05), (100, 0.2))
LABELS = {"label shift": "label-shift", "random labels": "random-labels",
          "one class renamed": "label-flip"}  # fmt: skip
ATTACKS = (*LABELS, "backdoor", "ten copies", "scaled sums", "no Gram matrix")
CELLS = [
    {"alpha": alpha, "clients": clients, "attack": attack, "share": share, "seed": seed}
    for alpha, (clients, share), attack, seed in product(ALPHAS, SHARES, ATTACKS, range(10))
    if share or attack == "label shift"
]
SPLITS: dict[str, Row] = {f"Dirichlet {a}": {"partition": "dirichlet", "alpha": a} for a in ALPHAS}
SPLITS["IID"] = {"partition": "iid"}
COPIES = grid(split=SPLITS, clients=(10, 20), seed=range(25))


class Images:
    """Images of a data set, their features of some width in steps of 8 bits, and their sums."""

    def __init__(self, width: int, **settings: Any) -> None:
        setup = load_setup(Config(
            method="afl", model="scattering", random_features=width, bandwidth=1.6,
            standardise=False, **settings,
        ))  # fmt: skip
        self.fixed = FixedPoint.within((2 / width) ** 0.5, width, bits=8)
        self.step = float(self.fixed.step[0])
        self.identity, data = Normaliser.identity(width), setup.data
        self.extract = FeatureMap("last-layer").extractor(setup.network)
        some = np.arange(len(data.y_train))
        if len(some) > IMAGES:
            some = np.random.default_rng(0).permutation(len(some))[:IMAGES]
        self.data = replace(data, x_train=data.x_train[some], y_train=data.y_train[some])
        self.raw, self.y = data.train(some)
        self.raw_test, self.y_test = data.test()
        self.x, self.x_test = self.of(self.raw), self.of(self.raw_test)

    def of(self, x: Tensor) -> Tensor:
        """Return images' features, int8."""
        return torch.cat([self.fixed(self.extract(part)).to(torch.int8) for part in x.split(1000)])

    @functools.cached_property
    def patched(self) -> tuple[Tensor, Tensor]:
        """Features of the images, and of some test images, with a patch."""
        white, parts = self.raw.max(), (self.raw.clone(), self.raw_test[:2000].clone())
        for x in parts:
            x[..., -5:-1, -5:-1] = white
        return self.of(parts[0]), self.of(parts[1])

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

    def accuracy(self, linear: Tensor) -> float:
        """Share of the test images that a linear model classifies rightly."""
        return float((self.rows(self.x_test) @ linear).argmax(1).eq(self.y_test).double().mean())

    def success(self, linear: Tensor) -> float:
        """Share of some test images of other classes that become class 0 by the patch."""
        x = self.patched[1][self.y_test[:2000] != 0]
        return float((self.rows(x) @ linear).argmax(1).eq(0).double().mean())

    def examples(self, split: Split, kind: type = ValidationExamples) -> ValidationExamples:
        """Return the server's validation examples, which judge clients."""
        x, y = self.rows(self.x[split.validation]), self.y[split.validation]
        return kind(x, y, 10, self.fixed)  # type: ignore[no-any-return]

    def split(self, clients: int, seed: int, **settings: Any) -> tuple[Split, list[int], Any]:
        """Return a split, the clients of at least the median size, and the server's sums."""
        config = Config(
            method="afl", num_clients=clients, clients_per_round=clients, seed=seed, **settings
        )
        split = split_data(config, self.data)
        sizes = [len(indices) for indices in split.clients]
        held = self.sums(self.x[split.validation], self.y[split.validation])
        return split, np.flatnonzero(sizes >= np.median(sizes)).tolist(), self.equations(held)


images_of = functools.cache(Images)


def times(sums: FeatureStatistics, factor: int, *, counts: bool) -> FeatureStatistics:
    gram, class_sums = (factor * part.astype(np.int64) for part in (sums.gram, sums.class_sums))
    totals = sums.counts * factor if counts else sums.counts
    return replace(sums, gram=gram, class_sums=class_sums, counts=totals)


def false_sums(
    images: Images, attack: str, places: np.ndarray, rng: np.random.Generator
) -> FeatureStatistics:
    x, y = images.x[places], images.y[places]
    if attack in LABELS:
        return images.sums(*KIT[LABELS[attack]].on_examples(x, y, 10, rng))  # type: ignore[misc]
    if attack == "backdoor":
        marked = torch.arange(len(y)) % 2 == 0
        x = torch.where(marked[:, None], images.patched[0][places], x)
        return images.sums(x, torch.where(marked, 0, y))
    if attack == "ten copies":
        return times(images.sums(x, (y + 1) % 10), 10, counts=True)
    if attack == "scaled sums":
        return times(images.sums(x, y), 10, counts=False)
    honest = images.sums(x, y)
    return replace(honest, gram=draw_gram_signs(honest.gram, rng))


def join(clients: dict[int, FeatureStatistics], without: set[int]) -> FeatureStatistics:
    return FeatureStatistics.join(sums for k, sums in clients.items() if k not in without)


def rows(
    data_dir: str, alpha: float, clients: int, attack: str, share: float, seed: int
) -> Iterator[Row]:
    images = images_of(500, dataset="fashion-mnist", data_dir=data_dir)
    split, large, held = images.split(
        clients, seed, partition="dirichlet", alpha=alpha, validation_examples=2000
    )
    rng = np.random.default_rng([seed, clients])
    liars = set(rng.choice(large, round(share * clients), replace=False).tolist())
    sent = {
        k: false_sums(images, attack, own, rng) if k in liars
        else images.sums(images.x[own], images.y[own])
        for k, own in enumerate(split.clients)
    }  # fmt: skip
    ledger = ClientLedger(images.equations, RIDGE, held)
    possible = {k: sums for k, sums in sent.items() if are_possible(sums)}
    harmful = find_harmful(ledger, possible, images.examples(split), LEVEL)
    removed = {*(sent.keys() - possible), *harmful}
    counts = {"liars": liars, "found": liars & removed, "alarms": removed - liars}
    row: Row = {key: len(some) for key, some in counts.items()}
    for when, without in (("after", removed), ("honest", liars), ("before", set[int]())):
        try:
            model = ledger.solve(join(sent, without))
        except ValueError:  # the sums have no solution
            continue
        row[f"accuracy-{when}"] = images.accuracy(model)
        if attack == "backdoor":
            row[f"success-{when}"] = images.success(model)
    yield row


class HarmOnly(ValidationExamples):
    """Validation examples by which no weight is judged."""

    def weight_score(self, sums: FeatureStatistics) -> float:
        """Return a score that is never too high."""
        return -np.inf


def copies(_: str, split: str, clients: int, seed: int) -> Iterator[Row]:
    images = images_of(200, dataset="digits")
    parts, large, held = images.split(clients, seed, validation_examples=200, **SPLITS[split])
    honest = {k: images.sums(images.x[own], images.y[own]) for k, own in enumerate(parts.clients)}
    chosen = int(np.random.default_rng([seed, clients]).choice(large))
    for attack, factor in [("nobody lies", 1), *product(("copies", "noisy copies"), (3, 10, 30))]:
        sent, liars = dict(honest), {chosen} if factor > 1 else set[int]()
        if attack == "copies":
            sent[chosen] = times(honest[chosen], factor, counts=True)
        elif liars:
            places = np.tile(parts.clients[chosen], factor)
            x, noise = images.raw[places], torch.Generator().manual_seed(seed)
            x = x + NOISE * images.raw.max() * torch.randn(x.shape, generator=noise)
            sent[chosen] = images.sums(images.of(x), images.y[places])
        total = join(sent, set())
        ridge = best_ridge(images.equations(total), held)
        ledger = ClientLedger(images.equations, ridge, held)
        row: Row = {"attack": attack, "times": factor, "liars": len(liars)}
        # each of the two judgements has half of the level; without the other, harm has all of it
        for kind, rule, level in (("", ValidationExamples, LEVEL), ("harm-", HarmOnly, 2 * LEVEL)):
            removed = set(find_harmful(ledger, sent, images.examples(parts, rule), level))
            row[f"{kind}found"], row[f"{kind}alarms"] = len(removed & liars), len(removed - liars)
            row[f"{kind}accuracy"] = images.accuracy(ledger.solve(join(sent, removed)))
        row["accuracy-before"] = images.accuracy(ledger.solve(total))
        row["accuracy-honest"] = images.accuracy(ledger.solve(join(sent, liars)))
        yield row
