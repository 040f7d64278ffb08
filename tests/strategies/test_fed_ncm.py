"""FedNCM: the classifier is the normalised class means over all clients' examples."""

from functools import partial

import numpy as np
import pytest

from fedntk.clients import ClosedFormClient
from fedntk.strategies import FedNCM

from .federation import Contract, Grid, app, damaged, network, run_as_if_lost, start
from .test_afl import BIAS, OPTIONS, WEIGHT, pooled

CLIENTS = app(ClosedFormClient)
CONTRACT = {"FedNCM": Contract(partial(FedNCM, network=network()), CLIENTS, once=True)}
strategy = partial(FedNCM, network=network(), **OPTIONS)


def test_weights_are_the_class_means_over_all_examples_divided_by_their_norms():
    """Means travel in float32: 1e-6."""
    z, labels = (part.numpy() for part in pooled())
    after = start(strategy(), Grid(CLIENTS))
    means = np.stack([z[labels[:, c] == 1].mean(0) for c in range(3)])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(after[WEIGHT], expected, rtol=1e-6, atol=1e-7)
    assert not after[BIAS].any()


def test_a_class_that_nobody_has_gets_no_weights():
    """Client 0 has two of three classes."""
    after = start(strategy(min_available_nodes=1, min_train_nodes=1), Grid(CLIENTS, num_clients=1))
    assert not after[WEIGHT][2].any()
    np.testing.assert_allclose(np.linalg.norm(after[WEIGHT][:2], axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(1, lambda counts: counts * 2), "num-examples"),
        (damaged(0, lambda means: means * 1000), "scale"),
    ],
)
def test_false_counts_and_features_of_another_size_are_refused(change, reason):
    run_as_if_lost(strategy, CLIENTS, change, reason)
