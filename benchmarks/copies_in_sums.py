"""Clients that count their true examples several times in their sums: who is found.

Clients send the sums of 200 scattering features, 8 bits each, of scikit-learn's digits; the server
has 200 validation examples. One client of at least the median size counts each of its examples 3,
10 or 30 times:

* **copies**: its sums and counts are multiplied;
* **noisy copies**: each copy of an image gets other noise, 5 % of the largest pixel.

Clients are removed by :func:`fedntk.ntk.convex.ledger.find_harmful` with alpha = 0.05, and by their
harm only, as if weights were not judged. The ridge is the best for the sums of all, liars
included, on the validation examples. Nothing is tuned on these federations.

    python benchmarks/copies_in_sums.py [--seeds 25]

A row is a federation. The seed is of the split, the validation examples, the liar and its noise;
the features are the same for all.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from common import parse_options, write
from liars_in_sums import WholeFeatures, large_clients
from torch import Tensor

from fedntk.ntk import FeatureMap
from fedntk.ntk.convex.ledger import ClientLedger, ValidationExamples, find_harmful
from fedntk.ntk.convex.pooled_statistics import best_ridge
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.data.partitions import split_data
from fedntk.simulations.engine.building import load_setup

WIDTH, LEVEL, VALIDATION, NOISE = 200, 0.05, 200, 0.05
WHOLE = WholeFeatures(WIDTH)
SPLITS = {
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "Dirichlet 0.5": {"partition": "dirichlet", "alpha": 0.5},
    "IID": {"partition": "iid"},
}
ATTACKS = [("nobody lies", 1), *((k, e) for k in ("copies", "noisy copies") for e in (3, 10, 30))]


class HarmOnly(ValidationExamples):
    """Validation examples by which no weight is judged."""

    def weight_score(self, sums: FeatureStatistics) -> float:
        """Return a score that is never too high."""
        return -np.inf


class Digits:
    """Scikit-learn's digits, and their features, int8."""

    def __init__(self) -> None:
        setup = load_setup(Config(
            method="afl", dataset="digits", model="scattering", random_features=WIDTH,
            bandwidth=1.6, standardise=False,
        ))  # fmt: skip
        self.data, self.extract = setup.data, FeatureMap("last-layer").extractor(setup.network)
        self.x, self.y = setup.data.train(np.arange(len(setup.data.y_train)))
        x_test, self.y_test = setup.data.test()
        self.features, self.tested = self.of(self.x), self.of(x_test)

    def of(self, x: Tensor) -> Tensor:
        """Return images' features."""
        return WHOLE.fixed(self.extract(x)).to(torch.int8)

    def copied(
        self, sums: FeatureStatistics, places: np.ndarray, times: int, seed: int | None
    ) -> object:
        """Return sums in which each example at some places counts several times."""
        if seed is None:
            parts = times * sums.gram.astype(np.int64), times * sums.class_sums.astype(np.int64)
            return replace(sums, gram=parts[0], class_sums=parts[1], counts=times * sums.counts)
        x, labels = (torch.cat([each[places]] * times) for each in (self.x, self.y))
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        return WHOLE.sums(self.of(x + NOISE * self.x.max() * noise), labels)

    def accuracy(self, linear: Tensor) -> float:
        """Share of the test images that a linear model classifies rightly."""
        return float((WHOLE.rows(self.tested) @ linear).argmax(1).eq(self.y_test).double().mean())


def federations(digits: Digits, name: str, num: int, seed: int) -> Iterable[dict[str, object]]:
    config = Config(
        method="afl", num_clients=num, clients_per_round=num, seed=seed,
        validation_examples=VALIDATION, **SPLITS[name],
    )  # fmt: skip
    split = split_data(config, digits.data)
    honest = {
        k: WHOLE.sums(digits.features[own], digits.y[own]) for k, own in enumerate(split.clients)
    }
    chosen = int(np.random.default_rng([seed, num]).choice(large_clients(split)))
    x, y = digits.features[split.validation], digits.y[split.validation]
    held = WHOLE.equations(WHOLE.sums(x, y))
    for attack, times in ATTACKS:
        clients, liars = dict(honest), {chosen} if times > 1 else set[int]()
        if liars:
            noise = seed if attack == "noisy copies" else None
            clients[chosen] = digits.copied(honest[chosen], split.clients[chosen], times, noise)
        total = FeatureStatistics.join(clients.values())
        ledger = ClientLedger(WHOLE.equations, best_ridge(WHOLE.equations(total), held), held)
        row = {"split": name, "clients": num, "attack": attack, "times": times, "seed": seed}
        row |= {"liars": len(liars), "harm": float(ledger.harm(
            ledger.solve(total), ledger.solve(FeatureStatistics.join(honest.values()))
        ))}  # fmt: skip
        # each of the two judgements has half of the level; without the other, harm has all of it
        for kind, rule, level in (("", ValidationExamples, LEVEL), ("harm-", HarmOnly, 2 * LEVEL)):
            removed = set(
                find_harmful(ledger, clients, rule(WHOLE.rows(x), y, 10, WHOLE.fixed), level)
            )
            left = FeatureStatistics.join(own for k, own in clients.items() if k not in removed)
            row[f"{kind}found"], row[f"{kind}alarms"] = len(removed & liars), len(removed - liars)
            row[f"{kind}accuracy"] = digits.accuracy(ledger.solve(left))
        row["accuracy-before"] = digits.accuracy(ledger.solve(total))
        without = FeatureStatistics.join(own for k, own in clients.items() if k not in liars)
        row["accuracy-honest"] = digits.accuracy(ledger.solve(without))
        yield row


def main() -> None:
    seeds = range(parse_options(__doc__, seeds=25).seeds)
    digits = Digits()
    cases = [(name, num, seed) for name in SPLITS for num in (10, 20) for seed in seeds]
    rows = [row for case in cases for row in federations(digits, *case)]
    write("copies_in_sums", rows)


if __name__ == "__main__":
    main()
