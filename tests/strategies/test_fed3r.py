"""Fed3R: ridge regression with a bias on all examples, each class's weights of norm 1."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import ClosedFormClient
from fedntk.strategies import AFL, Fed3R

from .federation import Contract, Grid, app, network, start
from .test_afl import BIAS, OPTIONS, WEIGHT, pooled, sums_of

CLIENTS = app(ClosedFormClient)
CONTRACT = {"Fed3R": Contract(partial(Fed3R, network=network()), CLIENTS, once=True)}
strategy = partial(Fed3R, network=network(), **OPTIONS)


@pytest.mark.parametrize("ridge", [1e-4, 1.0])
def test_it_is_the_papers_recursion_over_clients_with_lambda_once(ridge):
    z, y = pooled()
    z = torch.cat([z, torch.ones(len(z), 1).double()], 1)
    rho = ridge * z.square().sum(1).mean()
    a, b = rho * torch.eye(9).double(), torch.zeros(9, 3).double()
    for own, label in zip(z, y, strict=True):
        a, b = a + own.outer(own), b + own.outer(label)
    linear = torch.linalg.solve(a, b)
    norm = linear[:-1].norm(dim=0)
    after = start(strategy(ridge=ridge), Grid(CLIENTS))
    np.testing.assert_allclose(after[WEIGHT].T, linear[:-1] / norm, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[BIAS], linear[-1] / norm, rtol=1e-5, atol=1e-6)


def test_without_a_bias_it_is_afl_with_the_same_ridge_and_normalised_classes():
    """Nobody has the fourth class: its weights are 0."""
    head, (z, y) = nn.Linear(8, 4, bias=False), pooled()
    sums = [sums_of(z, torch.nn.functional.pad(y, (0, 1)))]
    expected, _ = AFL(network=head, ridge=0.1).last_layer(sums)
    found, bias = Fed3R(network=head, ridge=0.1).last_layer(sums)
    norm = np.linalg.norm(expected[:3], axis=1, keepdims=True)
    np.testing.assert_allclose(found[:3], expected[:3] / norm, rtol=1e-10)
    assert not found[3].any()
    assert not bias.any()
