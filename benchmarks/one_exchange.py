"""One exchange of sums of features that nobody trains: accuracy on all images, whatever the split.

A client computes scattering coefficients of its images, their logarithms, standardised within each
image, and p cosines of a Gaussian projection that a seed gives; rounds these to 8 bits; and sends
Z^T Z, Z^T Y and the classes' counts, once. The server adds up and solves ridge regression. The
ridge is chosen on sums over one image in six, which the clients hold out; then the sums of all
images are solved. Nothing is chosen on the test set; the bandwidth was chosen
on validation images of Fashion-MNIST.

    python benchmarks/one_exchange.py --data-dir FOLDER [--dataset fashion-mnist] [--features 8000]
        [--seeds 0,1,2] [--splits ...] [--clients 100] [--examples 0]

`sums` is a checksum of the clients' sums, which must not depend on the split. A model is solved for
once for the same sums, so `seconds` of a later split lack that.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import keep_rows, parse_options
from torch import Tensor

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations, best_ridge
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config
from fedntk.simulations.engine.building import load_setup
from fedntk.strategies.core.array_archive import checksum

KEYS = ["dataset", "features", "seed", "split", "clients", "examples"]
RIDGES = tuple(10.0**k for k in range(-6, 2))
BANDWIDTH = 1.6
SPLITS = {
    "one class a client": {
        "partition": "pathological",
        "classes_per_client": 1,
        "class_assignment": "deterministic",
    },
    "two classes a client": {"partition": "pathological", "classes_per_client": 2},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "Dirichlet 0.5": {"partition": "dirichlet", "alpha": 0.5},
}


def exchange(config: Config, solved: dict[tuple[str, ...], dict[str, float]]) -> dict[str, object]:
    """Return what one exchange measures; models are taken from `solved` and added to it."""
    setup = load_setup(config)
    width, classes = config.random_features, setup.data.num_classes
    extract = FeatureMap("last-layer").extractor(setup.network)
    step = 2 ** np.ceil(np.log2(np.sqrt(2 / width) / 127))  # no cosine is larger than sqrt(2 / p)
    fixed = FixedPoint(np.full(width, step, np.float32), bits=8)
    every = np.concatenate(setup.split.clients)
    held = np.zeros(len(setup.data.y_train), bool)
    held[np.random.default_rng(config.seed).choice(np.sort(every), len(every) // 6, False)] = True

    def sums(indices: np.ndarray) -> FeatureStatistics:
        x, y = setup.data.train(indices)
        return FeatureStatistics.of(map(extract, x.split(1000)), y, classes, fixed_point=fixed)

    def add(groups: list[np.ndarray]) -> FeatureStatistics:
        return functools.reduce(lambda total, own: total + sums(own), groups[1:], sums(groups[0]))

    start = time.perf_counter()
    fitting, validation = (
        add([own[held[own] == part] for own in setup.split.clients if (held[own] == part).any()])
        for part in (False, True)
    )
    on_clients = time.perf_counter() - start
    total = fitting + validation
    key = tuple(checksum(own.gram, own.class_sums, own.counts) for own in (fitting, total))
    if key not in solved:
        solved[key] = solve(setup, extract, [fitting, validation, total], fixed)
    return {
        **solved[key],
        "sums": key[1][:16],
        "client-seconds": on_clients,
        "seconds": time.perf_counter() - start,
        "bytes": sum(a.nbytes for a in total.to_arrays(fixed).values()),
    }


def solve(
    setup: Any,
    extract: Callable[[Tensor], Tensor],
    sums: list[FeatureStatistics],
    fixed: FixedPoint,
) -> dict[str, float]:
    identity = Normaliser.identity(len(fixed.step))
    equations = [NormalEquations.of(own.scaled(fixed), identity, bias=True) for own in sums]
    ridge = best_ridge(*equations[:2], RIDGES)
    linear = equations[2].solve(ridge).float()
    x, y = setup.data.test()
    hits = [
        (extract(part) @ linear[:-1] + linear[-1]).argmax(1) == own
        for part, own in zip(x.split(1000), y.split(1000), strict=True)
    ]
    return {"accuracy": float(torch.cat(hits).float().mean()), "ridge": ridge}


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, dataset="fashion-mnist", features=8000, seeds=(0, 1, 2),
        splits=tuple(SPLITS), clients=100, examples=0,
    )  # fmt: skip
    solved = {}
    for seed in options.seeds:
        for split in options.splits:
            more = {} if not options.examples else {"train_examples": options.examples}
            config = Config(
                method="afl", dataset=options.dataset, data_dir=options.data_dir,
                model="scattering", random_features=options.features, bandwidth=BANDWIDTH,
                standardise=False, num_clients=options.clients, seed=seed, **SPLITS[split], **more,
            )  # fmt: skip
            case = (
                options.dataset,
                options.features,
                seed,
                split,
                options.clients,
                options.examples,
            )
            row = dict(zip(KEYS, case, strict=True)) | exchange(config, solved)
            print(row, flush=True)
            keep_rows("one_exchange", [row], KEYS)


if __name__ == "__main__":
    main()
