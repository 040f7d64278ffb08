"""FedCOF: covariances from the spread of class means, and the classifier that they give."""

from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch

from fedntk.clients import ClosedFormClient
from fedntk.ntk import FeatureMap
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.strategies import FedCOF, FedNCM
from fedntk.strategies.closed_form.fed_cof import deviations

from .federation import Contract, Grid, app, examples, network, start
from .test_afl import BIAS, OPTIONS, WEIGHT

CLIENTS = app(ClosedFormClient)
CONTRACT = {"FedCOF": Contract(partial(FedCOF, network=network()), CLIENTS, once=True)}
strategy = partial(FedCOF, network=network(), **OPTIONS)


def prototypes(z, y, num_classes=3):
    return Prototypes.of(lambda x: x, torch.from_numpy(z), torch.from_numpy(y), num_classes)


def of_all_clients():
    extract = FeatureMap("last-layer").extractor(network())
    return [prototypes(extract(x).numpy(), y.numpy()) for x, y in (examples(k) for k in range(6))]


def test_the_mean_over_all_ways_to_deal_examples_is_their_covariance():
    """Means travel in float32: 1e-6. All 120 orders of five examples, dealt 2, 2, 1."""
    z = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    label = np.zeros(5, np.int64)
    total, orders = np.zeros((3, 3)), [np.array(order) for order in permutations(range(5))]
    for order in orders:
        hands = np.split(order, [2, 4])
        rows = deviations([prototypes(z[hand], label[hand], 1) for hand in hands])
        total += rows.T @ rows
    np.testing.assert_allclose(total / len(orders), 4 * np.cov(z.T), rtol=1e-5, atol=1e-6)


def test_it_is_the_program_of_the_paper_class_by_class():
    """Pooled means are float32: 1e-5 through a system of condition number below 100."""
    clients, gamma, p = of_all_clients(), 0.3, 8
    counts, gram, rights = np.zeros(3), np.zeros((p, p)), np.zeros((3, p))
    for c in range(3):
        own = [(k.counts[c], k.means[c].astype(float)) for k in clients if k.counts[c]]
        counts[c] = sum(n for n, _ in own)
        rights[c] = sum(n * mean for n, mean in own)
    square = (rights**2 / counts[:, None]).sum() / (counts.sum() * p)
    for c in range(3):
        own = [(k.counts[c], k.means[c].astype(float)) for k in clients if k.counts[c]]
        away = [(n, mean - rights[c] / counts[c]) for n, mean in own]
        covariance = sum(n * np.outer(d, d) for n, d in away) / (len(own) - 1)
        gram += (counts[c] - 1) * (covariance + gamma * square * np.eye(p))
    mean = rights.sum(0) / counts.sum()
    gram += counts.sum() * np.outer(mean, mean)
    expected = np.linalg.solve(gram, rights.T).T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    after = start(strategy(shrinkage=gamma), Grid(CLIENTS))
    np.testing.assert_allclose(after[WEIGHT], expected, rtol=1e-5, atol=1e-5)
    assert not after[BIAS].any()


def test_with_much_shrinkage_it_is_fed_ncm():
    """1e9 times the features' mean square: weights differ by about 1e-9, below float32."""
    clients = of_all_clients()
    found, _ = strategy(shrinkage=1e9).last_layer(clients)
    expected, _ = FedNCM(network=network()).last_layer(clients)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 1)])
def test_a_class_of_one_client_and_classes_of_one_example_have_only_gamma(sizes):
    """No spread is seen: G is a multiple of I, plus m m^T. A class that nobody has gets 0."""
    generator = np.random.default_rng(1)
    clients = [
        prototypes(generator.standard_normal((n, 8)).astype(np.float32), np.full(n, c % 2))
        for c, n in enumerate(sizes)
    ]
    assert not deviations(clients[:2]).any()
    weight, _ = strategy().last_layer(clients)
    assert np.isfinite(weight).all()
    assert not weight[2].any()
