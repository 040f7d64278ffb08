"""Distributions over models, and the ensemble's prediction: the mathematics of FedBE.

Sources: Chen and Chao, *FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning*,
ICLR 2021. With n_i the examples of client i, n their sum and w_i its model, a model is drawn as

    Gaussian    w = mean + sqrt(var) * e,    e ~ N(0, I),
                mean = sum_i (n_i / n) w_i,    var = sum_i (n_i / n) (w_i - mean)^2
    Dirichlet   w = sum_i gamma_i n_i w_i / sum_i gamma_i n_i,    gamma ~ Dir(alpha, ..., alpha)

and the prediction is the mean of the models' probabilities.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import NetworkPredictor
from fedntk.ntk.averages import all_alike, put_back
from fedntk.ntk.predictors.network import load_arrays

Arrays = Mapping[str, NDArray[Any]]
Distribution = Literal["gaussian", "dirichlet"]


def standard_deviation(
    models: Sequence[Arrays], num_examples: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    """Return the clients' standard deviation at each coordinate, weighted by their examples.

    Deviations are taken from the first model's weights, which the variance does not depend on: it
    is exactly 0 where all clients agree. Arrays of floating point have one, in float64.
    """
    shares = np.asarray(num_examples, dtype=np.float64) / sum(num_examples)
    deviations = {}
    for name, first in models[0].items():
        if not np.issubdtype(first.dtype, np.floating):
            continue
        origin = first.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite numbers on which all agree
            shifts = [model[name].astype(np.float64) - origin for model in models]
        pairs = list(zip(shares, shifts, strict=True))
        mean = sum(share * shift for share, shift in pairs)
        squares = sum(share * np.square(shift - mean) for share, shift in pairs)
        alike = all_alike([model[name] for model in models])
        deviation = np.asarray(np.sqrt(squares), dtype=np.float64)
        deviations[name] = put_back(deviation, np.zeros(first.shape), alike)
    return deviations


def gaussian_model(
    mean: Arrays, deviation: Arrays, models: Sequence[Arrays], generator: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Draw a model from N(mean, diag(deviation^2)), in float64, given the clients' models.

    Whole numbers, such as BatchNorm's counters, are the mean's. A running variance is at least the
    smallest of the clients': it stays a variance, and no layer divides by next to nothing. Numbers
    that would leave their dtype's range stay at its end. An array that clients move under several
    names, such as tied weights, is drawn once.
    """
    drawn: dict[str, NDArray[Any]] = {}
    for name, centre in mean.items():
        if name not in deviation:
            drawn[name] = centre
            continue
        if deviation[name].any():
            alike = (n for n in drawn if all(np.array_equal(m[n], m[name]) for m in models))
            if (first := next(alike, None)) is not None:
                drawn[name] = drawn[first]
                continue
        array = centre + deviation[name] * generator.standard_normal(centre.shape)
        if name.endswith("running_var"):
            array = np.maximum(array, np.minimum.reduce([model[name] for model in models]))
        limits = np.finfo(centre.dtype)
        array = np.asarray(np.clip(array, float(limits.min), float(limits.max)))
        drawn[name] = put_back(array, centre, deviation[name] == 0)
    return drawn


def dirichlet_shares(
    num_examples: Sequence[int], alpha: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw gamma_i n_i / sum_i gamma_i n_i: shape (number of clients,), at least 0, of sum 1.

    With a large `alpha` they are n_i / n, the shares of FedAvg; with a small one a single client's
    is 1, each client's as often.
    """
    gamma = generator.dirichlet(np.full(len(num_examples), float(alpha)))
    weights = gamma * np.asarray(num_examples, dtype=np.float64)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def mean_probabilities(
    network: nn.Module, models: Iterable[Arrays], x: Tensor, *, device: str = "cpu"
) -> Tensor:
    """Return the mean of the models' probabilities of examples (n, ...): Bayesian model averaging.

    A copy of the network holds one model at a time. The result (n, C) is float64, on the CPU.
    """
    predictor = NetworkPredictor(network, device=device)
    total, count = torch.zeros(()), 0
    for model in models:
        load_arrays(predictor.network, model)
        total = total + predictor.predict(x).double().softmax(1)
        count += 1
    return total / count
