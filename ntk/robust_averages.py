"""Means of clients' models that a few false ones cannot move far: numpy arrays by name.

With n models, f of them false, all as changes d_i of the model before the round:

- ``median``, ``trimmed-mean``: of each coordinate, the latter without its f largest and f smallest
  (Yin et al., *Byzantine-Robust Distributed Learning*, ICML 2018, definitions 1 and 2);
- ``krum``: the model with the least sum of squared distances to its n - f - 2 nearest others;
  ``multi-krum``: the mean of the n - f models with the least sums (Blanchard et al., *Machine
  Learning with Adversaries*, NeurIPS 2017, section 4);
- ``bulyan``: of the n - 2f models with the least sums, the mean of the n - 4f values of each
  coordinate nearest to their median (El Mhamdi et al., *The Hidden Vulnerability of Distributed
  Learning in Byzantium*, ICML 2018, section 4; chosen at once, as in Flower);
- ``nnm``: the trimmed mean after each model became the mean of the n - f nearest to it (Allouah et
  al., *Fixing by Mixing*, AISTATS 2023, algorithm 2);
- ``norm-bound``: the weighted mean of changes no longer than the median one (Sun et al., *Can You
  Really Backdoor Federated Learning?*, 2019, section 4).
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .averages import (
    Arrays,
    NewArrays,
    all_alike,
    change_size,
    exact_sum,
    moving_mean,
    put_back,
    weighted_mean,
)
from .errors import BadReply

RobustMean = Literal[
    "none", "median", "trimmed-mean", "krum", "multi-krum", "bulyan", "nnm", "norm-bound"
]
Defence = Literal[RobustMean, "geometric-median", "leave-one-out", "validation"]
DEFENCES: tuple[Defence, ...] = get_args(RobustMean)
LEAST_HARM = 0.005  # a model that raises the loss by more than this fraction is dropped


def least_models(defence: Defence, malicious: int) -> int:
    """Return the fewest models with which a rule withstands so many `malicious` ones."""
    if defence in ("none", "norm-bound"):
        return 1
    if defence in ("krum", "multi-krum"):
        return 2 * malicious + 3
    return 4 * malicious + 3 if defence == "bulyan" else 2 * malicious + 1


def robust_mean(
    before: Arrays,
    models: Sequence[Arrays],
    num_examples: Sequence[int],
    defence: Defence = "none",
    malicious: int = 1,
) -> NewArrays:
    """Return the mean of models by a rule that withstands some `malicious` ones.

    There are :func:`least_models` of them or more, with the names, shapes and dtypes of `before`,
    from which all started. `num_examples` are claims, so only ``none``, ``norm-bound`` and
    ``validation`` weight by them.
    """
    if defence in ("none", "validation"):
        return weighted_mean(models, num_examples)
    if defence == "norm-bound":
        return weighted_mean(bound_changes([before] * len(models), models), num_examples)
    count = len(models)
    num_kept = {"krum": 1, "multi-krum": count - malicious, "bulyan": count - 2 * malicious}
    remaining = num_kept.get(defence, count)
    near = np.empty(0)
    if defence == "nnm" or remaining < count:
        near = squared_distances(before, models)
    if remaining < count:  # by the sums of the n - f - 2 least distances to others
        scores = np.sort(near)[:, 1 : count - malicious - 1].sum(1)
        models = [models[i] for i in scores.argsort()[:remaining]]
    mean: NewArrays = {}
    for name in before:
        arrays = [np.asarray(model[name]) for model in models]
        alike = all_alike(arrays)
        if alike.all():
            mean[name] = np.array(arrays[0])
            continue
        rows = np.stack(arrays).astype(np.float64)
        if defence == "nnm":
            nearest = [distances.argsort()[: count - malicious] for distances in near]
            rows = np.stack([_mean_of_rows(rows[neighbours]) for neighbours in nearest])
        if defence == "median":
            mean[name] = np.asarray(np.median(rows, 0))
        elif defence in ("trimmed-mean", "nnm"):
            mean[name] = _mean_of_rows(np.sort(rows, 0)[malicious : count - malicious])
        elif defence == "bulyan":
            order = np.abs(rows - np.median(rows, 0)).argsort(0)[: count - 4 * malicious]
            mean[name] = _mean_of_rows(np.take_along_axis(rows, order, 0))
        else:
            mean[name] = _mean_of_rows(rows)
        mean[name] = put_back(mean[name], arrays[0], alike)
    return mean


def _mean_of_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return put_back(np.asarray(rows.mean(0)), rows[0], all_alike(list(rows)))


def screen_by_loss(
    models: Sequence[Arrays],
    num_examples: Sequence[int],
    loss: Callable[[Arrays], float],
    malicious: int,
) -> list[BadReply | None]:
    """Refuse up to `malicious` models without which the weighted mean of the others is better.

    One by one, the model without which the mean's loss is lowest is set aside, of equal ones the
    farthest from the mean; as many of them are refused as make the loss lowest if each has to lower
    it by 0.5 %. NaN counts as infinite; ValueError for a negative loss.
    """
    count, total = len(models), sum(num_examples)
    alike = {name: all_alike([model[name] for model in models]) for name in models[0]}
    changing = {n: [model[n] for model in models] for n in models[0] if not alike[n].all()}
    sums = {name: exact_sum(arrays, num_examples) for name, arrays in changing.items()}

    def loss_of(sums: Arrays, total: int) -> float:
        arrays: NewArrays = {}
        for name, first in models[0].items():
            whole = alike[name].all()
            mean = np.array(first) if whole else np.asarray(sums[name] / total)
            arrays[name] = put_back(mean, first, alike[name])
        value = float(np.nan_to_num(loss(arrays), nan=np.inf, posinf=np.inf))
        if value < 0:
            raise ValueError(f"validation_loss: expected 0 or more, got {value:g}")
        return value

    def sums_without(k: int) -> NewArrays:
        return {n: s - exact_sum([models[k][n]], [num_examples[k]]) for n, s in sums.items()}

    mean = {name: s / total for name, s in sums.items()}
    sizes = [change_size(mean, model) for model in models]
    losses, aside = [loss_of(sums, total)], list[int]()
    while len(aside) < min(malicious, count - 1):
        trials = {}
        for k in (k for k in range(count) if k not in aside):
            trials[k] = loss_of(sums_without(k), total - num_examples[k])
        worst = min(trials, key=lambda k: (trials[k], -sizes[k]))
        sums, total = sums_without(worst), total - num_examples[worst]
        aside.append(worst)
        losses.append(trials[worst])
    refused = min(range(len(losses)), key=lambda d: losses[d] / (1 - LEAST_HARM) ** d)
    verdicts: list[BadReply | None] = [None] * count
    for d, k in enumerate(aside[:refused]):
        message = f"the validation loss is {losses[d]:.3g}, and {losses[d + 1]:.3g} without it"
        verdicts[k] = BadReply("validation", message)
    return verdicts


def squared_distances(before: Arrays, models: Sequence[Arrays]) -> NDArray[np.float64]:
    """Return the squared Euclidean distances of models from each other (n, n)."""
    gram = np.zeros((len(models), len(models)))
    for name, origin in before.items():  # as changes, whose differences lose fewer digits
        alike = all_alike([origin, *(model[name] for model in models)])
        if alike.all():
            continue
        rows = []
        for model in models:
            change = np.zeros(origin.shape)
            rows.append(np.subtract(model[name], origin, out=change, where=~alike).ravel())
        gram += np.stack(rows) @ np.stack(rows).T
    squares = np.diag(gram)
    distances: NDArray[np.float64] = np.maximum(squares[:, None] + squares - 2 * gram, 0)
    np.fill_diagonal(distances, 0)
    return distances


def bound_changes(before: Sequence[Arrays], models: Sequence[Arrays]) -> list[NewArrays]:
    """Shorten each change from a model before to the median norm, over floating-point arrays."""
    sizes = [change_size(start, model) for start, model in zip(before, models, strict=True)]
    longest = statistics.median_low(sizes)
    return [
        moving_mean(start, model, longest / size) if size > longest else dict(model)
        for start, model, size in zip(before, models, sizes, strict=True)
    ]
