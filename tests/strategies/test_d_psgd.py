"""D-PSGD against algorithm 1 by hand."""

import numpy as np
from flwr.app import Array, ArrayRecord
from torch import nn

from fedntk.clients import DPSGDClient, LocalSGD
from fedntk.strategies import DPSGD, Topology

from .federation import Grid, app, examples, kept_by
from .test_dfedavg import GRAPH, OPTIONS, contract, mixing_matrix

CONTRACT = {"DPSGD": contract(DPSGD, DPSGDClient)}


def test_a_round_of_one_batch_is_algorithm_1():
    """Full batches, a linear softmax model: W X - gamma G(X). Float64, few operations: 1e-12."""
    w, rate, first = mixing_matrix("metropolis"), 0.3, np.full((3, 4), 0.1)
    topology = Topology("own", graph=GRAPH)
    own = DPSGD(topology=topology, mixing="metropolis", collect_both=True, **OPTIONS)

    def make(_, x, y, **more):
        layer = nn.Linear(4, 3, bias=False).double()
        return DPSGDClient(
            layer, x.double(), y, sgd=LocalSGD(learning_rate=rate, batch_size=20), **more
        )

    own.start(Grid(app(make)), ArrayRecord({"weight": Array(first)}), num_rounds=3)
    held = np.stack([first] * 6)
    for number in (1, 2, 3):
        slopes = []
        for k in range(6):
            x, y = (part.numpy() for part in examples(k))
            scores = x.astype(np.float64) @ held[k].T
            shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            slopes.append((shares - np.eye(3)[y]).T @ x.astype(np.float64) / len(x))
        averaged = np.einsum("ij,jcd->icd", w, held)
        held = averaged - rate * np.stack(slopes)
        found = [kept_by(own, k, number)["weight"] for k in range(6)]
        np.testing.assert_allclose(found, held, rtol=0, atol=1e-12)
    found = [own.models_at["averaged"][k]["weight"] for k in range(6)]
    np.testing.assert_allclose(found, averaged, rtol=0, atol=1e-12)
    assert np.abs(held[0] - held[5]).max() > 0.01
