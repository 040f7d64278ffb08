"""The exact ridge solution on all clients' features, beside the linear model of a run of TCT."""

import functools

import numpy as np
import torch

from fedntk.ntk import TCTModel, one_hot, ridge_regression
from fedntk.simulations import Run, load_model
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.reproduction.measures import NO_ROUND

RIDGE = 1e-4


@functools.cache
def _solved(run: Run) -> tuple[float, float]:
    setup, arrays = load_setup(run.config), load_model(run.folder)
    model = run.config.chosen_method.predictor(setup, arrays, "linear-model")
    x, y = setup.data.train(np.concatenate(setup.split.clients))
    z, targets = torch.cat(list(model.features(x))).double(), one_hot(y, 10).double()
    means, shares = z.mean(0), targets.mean(0)
    z -= means
    ridge = z.T @ ridge_regression(z @ z.T, targets - shares, RIDGE)
    ridge = torch.cat([ridge, (shares - 0.1 - means @ ridge)[None]]).float()
    x, y = setup.evaluation_set()
    both = torch.cat([ridge, model.linear], 1)
    scores = torch.cat([TCTModel.scores(part, both) for part in model.features(x)])
    exact, reached = scores.split(10, 1)
    distance = (reached - exact).norm() / exact.norm()
    return float((exact.argmax(1) == y).float().mean()), float(distance)


def accuracy(run: Run) -> dict[int, float]:
    """Return the test accuracy of the ridge solution, in percent."""
    return {NO_ROUND: 100 * _solved(run)[0]}


def distance(run: Run) -> dict[int, float]:
    """Return how far the test scores are from the ridge solution's, over those' norm."""
    return {NO_ROUND: _solved(run)[1]}
