"""Accuracy with differential privacy: one release of sums with noise, of features nobody trains.

A client makes rows of norm at most R, in whole numbers, of its images' features: scattering (J = 2,
L = 8), logarithms standardised within the image, then the p lowest frequencies of these, or a
seeded Gaussian projection to p. The sums Z^T Z and Z^T Y over the clients that survive are released
once, with noise. Either a trusted server adds Gaussian noise; or each client adds a share of
Skellam noise, sized for the fewest survivors that are allowed, so that nobody sees sums with less.
The model follows from the release only. Ten per cent of the clients are lost: their images and
their shares of the noise are not in the sums.

p, R, the parts of the budget, the ridge's fraction and the exponents of the frequencies were chosen
on 10,000 held-out training images of MNIST, which no noise protects (--evaluate validation).

    python benchmarks/private_sums.py --data-dir FOLDER [--dataset fashion-mnist] [--kind ...]
        [--features 2000] [--seeds 0,1,2,3,4] [--epsilons 0,8,3,1] [--evaluate test] [--keep FOLDER]
        [--clients 100] [--alpha 0.1] [--client-examples 0]

With --client-examples E the epsilon counts a client that comes or goes with all its data: it draws
E of its images if it has more, and the noise is E times as large.

Each row is one release; epsilon 0 is without noise. Without --client-examples the epsilon counts an
example that is added or removed; `epsilon-of-survivors` is that of the shares which came.
"""

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import keep_rows, parse_options, write

from fedntk.ntk.convex.private_sums import SumNoise, bound_rows, solve_noisy
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.projection import random_projection
from fedntk.ntk.features.scattering import ScatteringFrequencies
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup

TRUST = {"server": "Gaussian", "clients": "Skellam"}  # and its noise
KEYS = ["dataset", "evaluated-on", "features", "p", "trust", "epsilon", "seed", "clients",
        "client-examples"]  # fmt: skip
DELTA, RADIUS, CLASSES, CHUNK = 1e-5, 127, 10, 500


def config_of(
    dataset: str, data_dir: str, seed: int, clients: int = 100, alpha: float = 0.1
) -> Config:
    return Config(
        method="one-exchange", dataset=dataset, data_dir=data_dir, model="scattering", rounds=1,
        standardise=False, num_clients=clients, partition="dirichlet", alpha=alpha, seed=seed,
        one_exchange={"sums": {"auto_ridge": False, "validation_share": 0.0}},
        clients_per_round=clients, random_features=1000,
    )  # fmt: skip


def all_rows(
    dataset: str, data_dir: str, kind: str, width: int, kept: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return whole numbers of training and test images, int8 (n, p), and their labels.

    Scattering coefficients are kept in the folder `kept`, if there is one, in float16.
    """
    setup = load_setup(config_of(dataset, data_dir, 0))
    scattering, logarithms = setup.network[0], setup.network[1]
    numbers = scattering.num_channels, math.prod(scattering.map_size)
    frequencies = ScatteringFrequencies(scattering, math.prod(numbers), width)
    parts = setup.data.train(np.arange(len(setup.data.y_train))), setup.data.test()
    images = torch.cat([x for x, _ in parts])
    path = Path(kept) / f"{dataset}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        found = [scattering(x).flatten(3).squeeze(1).half() for x in images.split(CHUNK)]
        np.save(path, torch.cat(found).numpy())
    coefficients = np.load(path, mmap_mode="r")

    def rows(start: int) -> torch.Tensor:
        own = torch.from_numpy(coefficients[start : start + CHUNK].astype(np.float32))
        found = logarithms(own)
        found = frequencies(found) if kind == "frequencies" else random_projection(found, width, 0)
        return bound_rows(found, RADIUS).to(torch.int8)

    with torch.no_grad():
        z = torch.cat([rows(start) for start in range(0, len(images), CHUNK)])
    sizes = [len(x) for x, _ in parts]
    return [(own, y) for own, (_, y) in zip(z.split(sizes), parts, strict=True)]


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, dataset="fashion-mnist", kind=["frequencies", "projection"],
        features=2000, seeds=(0, 1, 2, 3, 4), epsilons=(0.0, 8.0, 3.0, 1.0),
        evaluate=["test", "validation"], clients=100, alpha=0.1, client_examples=0,
        keep="runs/private-sums",
    )  # fmt: skip
    width = options.features
    training, test = all_rows(options.dataset, options.data_dir, options.kind, width, options.keep)
    allowed = np.ones(len(training[1]), bool)
    if options.evaluate == "validation":
        held = np.random.default_rng(0).permutation(len(allowed))[:10000]
        allowed[held] = False
        test = training[0][held], training[1][held]
    fixed = FixedPoint(np.ones(width, np.float32), 8)

    def sums(indices: np.ndarray) -> FeatureStatistics:
        z, y = training[0][indices], training[1][indices]
        return FeatureStatistics.of((part.float() for part in z.split(CHUNK)), y, CLASSES,
                                    fixed_point=fixed)  # fmt: skip

    clients, most = options.clients, options.client_examples
    survivors = clients * 9 // 10
    everyone = None if most else sums(np.flatnonzero(allowed))
    for seed in options.seeds:
        config = config_of(options.dataset, options.data_dir, seed, clients, options.alpha)
        split = [part[allowed[part]] for part in load_setup(config).split.clients]
        order = np.random.default_rng([seed, *b"lost"]).permutation(clients)
        if everyone is None:
            rng = np.random.default_rng([seed, *b"drawn"])
            own = sums(
                np.concatenate([rng.permutation(split[k])[:most] for k in order[:survivors]])
            )
        else:
            own = everyone - sums(np.concatenate([split[k] for k in order[survivors:]]))
        for epsilon in options.epsilons:
            for trust in TRUST if epsilon else ["none"]:
                fewest = survivors if trust == "clients" else 0
                noise = SumNoise(
                    radius=RADIUS, width=width, num_classes=CLASSES, examples=max(1, most),
                    fewest=fewest,
                )  # fmt: skip
                start = time.perf_counter()
                if epsilon:
                    noise = noise.calibrated(epsilon, DELTA)
                    # the sum of all shares is Skellam noise itself, of the sum of the variances
                    multiplier = noise.noise_multiplier * noise.examples
                    drawn = replace(
                        noise, fewest=min(fewest, 1), examples=1, noise_multiplier=multiplier
                    )
                    noisy = drawn.add(own, np.random.default_rng([seed, *b"noise"]))
                    variance = float(noise.variances()[0])
                else:
                    noisy, variance = own, 1e-3 * own.diagonal.mean() ** 2
                gram, cross = map(torch.from_numpy, (noisy.matrix(), noisy.class_sums.T.copy()))
                if epsilon:
                    linear = solve_noisy(gram, cross, variance)
                else:
                    ridge = 1e-6 * float(gram.diagonal().sum())
                    identity = torch.eye(width, dtype=torch.float64)
                    linear = torch.linalg.solve(gram + ridge * identity, cross.double())
                scores = torch.cat([part.float() @ linear.float() for part in test[0].split(CHUNK)])
                accuracy = float((scores.argmax(1) == test[1]).float().mean())
                row = {
                    "dataset": options.dataset, "evaluated-on": options.evaluate,
                    "features": options.kind, "p": width, "trust": trust, "epsilon": epsilon,
                    "seed": seed, "accuracy": accuracy,
                    "epsilon-of-survivors": noise.epsilon(DELTA) if epsilon else 0.0,
                    "delta": DELTA,
                    "protects": f"one {'client' if most else 'example'}, added or removed",
                    "noise-multiplier": noise.noise_multiplier if epsilon else 0.0,
                    "noise": TRUST.get(trust, "none"),
                    "part-gram": noise.gram_part, "part-class-sums": 1 - noise.gram_part,
                    "radius": RADIUS, "fraction": 0.15,
                    "clients": clients, "client-examples": most, "fewest-survivors": survivors,
                    "survivors": survivors, "split": f"Dirichlet {options.alpha}",
                    "images": own.num_examples, "releases": 1,
                    "seconds": time.perf_counter() - start,
                }  # fmt: skip
                print({name: row[name] for name in (*KEYS, "accuracy", "seconds")}, flush=True)
                keep_rows("private_sums", [row], KEYS)
    write("private_sums", summary={})


if __name__ == "__main__":
    main()
