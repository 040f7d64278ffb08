"""One exchange of sums of features of all examples, with a ridge that was chosen on some."""

import functools
import operator
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk import FeatureMap, Normaliser
from fedntk.ntk.convex.pooled_statistics import NormalEquations, best_ridge
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.simulations import Config, run
from fedntk.simulations.engine.building import Setup, load_setup
from fedntk.strategies.core.array_archive import checksum

Figures = Iterator[tuple[str, None, float]]
RIDGES = tuple(10.0**k for k in range(-6, 2))  # of `untrained`


def closed_form(settings: dict[str, Any], seed: int) -> Figures:
    """Yield test accuracy in %, ridge, and MB up of a client, after one exchange.

    With ``training``, settings of FedAvg, the network is trained first; ``method = "fedavg"``
    evaluates only that. The ridge of Fed3R is chosen on as many examples as ``validation`` says.
    """
    options, ridge = {"server-threads": 1, **settings}, np.nan
    training, validation = options.pop("training", None), options.pop("validation")
    with tempfile.TemporaryDirectory() as folder:
        if training:
            config = Config({**options, **training}, seed=seed, out=f"{folder}/fedavg")
            done = run(config, progress=False)
            options["weights"] = f"{folder}/fedavg/model.safetensors"
        if options["method"] != "fedavg":
            config = Config(options, seed=seed, out=f"{folder}/exchange")
            if config.method == "fed3r":
                ridge = chosen_ridge(load_setup(config.replace(validation_examples=validation)))
                config = config.replace(fed3r={"ridge": ridge})
            done = run(config, progress=False)
        if options["method"] == "tct":
            ridge = done.curve("ridge").iloc[-1]
        yield "accuracy", None, 100 * done.curve().iloc[-1]
        yield "ridge", None, ridge
        yield "up", None, done.curve("bytes-up").iloc[-1] / config.num_clients / 1e6


def chosen_ridge(setup: Setup) -> float:
    """Return the ridge with the least squared error on the validation examples."""
    groups = np.concatenate(setup.split.clients), setup.split.validation
    sums = [sums_of(setup, [group], 2048) for group in groups]
    identity = Normaliser.identity(sums[0].width)
    return best_ridge(*(NormalEquations.of(s, identity, bias=True, centred=False) for s in sums))


def untrained(settings: dict[str, Any], seed: int) -> Figures:
    """Yield test accuracy in %, ridge, MB up of a client, and 32 bits of the sums' checksum.

    Features are cosines of what nobody trains, rounded to 8 bits. One example in six chooses the
    ridge, and is held out by its client until then.
    """
    config = Config(settings, seed=seed)
    setup, width = load_setup(config), config.random_features
    fixed = FixedPoint.within((2 / width) ** 0.5, width, bits=8)  # no cosine is above sqrt(2 / p)
    clients, held = setup.split.clients, np.zeros(len(setup.data.y_train), bool)
    every = np.sort(np.concatenate(clients))
    held[np.random.default_rng(seed).choice(every, len(every) // 6, False)] = True
    fitting, validation = (
        sums_of(setup, [ids[held[ids] == part] for ids in clients], 1000, fixed)
        for part in (False, True)
    )
    total, identity = fitting + validation, Normaliser.identity(width)
    equations = [
        NormalEquations.of(sums.scaled(fixed), identity, bias=True)
        for sums in (fitting, validation, total)
    ]
    ridge = best_ridge(*equations[:2], RIDGES)
    linear = equations[2].solve(ridge).float()
    extract = FeatureMap("last-layer").extractor(setup.network)
    x, y = setup.data.test()
    scores = torch.cat([extract(part) @ linear[:-1] + linear[-1] for part in x.split(1000)])
    yield "accuracy", None, 100 * (scores.argmax(1) == y).float().mean()
    yield "ridge", None, ridge
    yield "up", None, sum(array.nbytes for array in total.to_arrays(fixed).values()) / 1e6
    yield "checksum", None, int(checksum(total.gram, total.class_sums, total.counts)[:8], 16)


def sums_of(
    setup: Setup, groups: Iterable[NDArray[np.int64]], size: int, fixed: FixedPoint | None = None
) -> FeatureStatistics:
    """Return the sums of groups of training examples, `size` at a time, added up."""
    extract, classes = FeatureMap("last-layer").extractor(setup.network), setup.data.num_classes
    parts = (setup.data.train(group) for group in groups if len(group))
    sums = (
        FeatureStatistics.of(map(extract, x.split(size)), y, classes, fixed_point=fixed)
        for x, y in parts
    )
    return functools.reduce(operator.add, sums)
