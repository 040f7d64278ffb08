"""D-PSGD against algorithm 1 by hand, and how it differs from one epoch of DFedAvg."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import nn

from fedntk.clients import DFedAvgClient, DPSGDClient
from fedntk.strategies import DPSGD, DFedAvg, Topology

from .federation import Contract, Grid, app, examples, failed, kept_by, with_arrays
from .test_dfedavg import (
    GRAPH,
    OPTIONS,
    agree,
    check_as_if_not_heard,
    in_double,
    mixing_matrix,
    nan,
    net,
    run,
)

SGD: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 4}
CLIENTS = app(DPSGDClient, **SGD)


def strategy(**options: Any) -> DPSGD:
    return DPSGD(**{"topology": Topology("regular", degree=3), **options})


CONTRACT = {"DPSGD": Contract(strategy, CLIENTS, sends_arrays=False, one_exchange=False)}


@pytest.mark.parametrize("rule", ["examples", "equal", "metropolis"])
def test_a_round_of_one_batch_is_algorithm_1(rule):
    """Three rounds of full batches on a linear softmax model, by hand: W X - gamma G(X).

    Float64, a few dozen operations on numbers of size 1: 1e-12.
    """
    counts, rate = [len(examples(k)[1]) for k in range(6)], 0.3
    w = mixing_matrix(nx.Graph(GRAPH), rule, counts)

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3, bias=False).double()

    def make(_: nn.Module, x: torch.Tensor, y: torch.Tensor, **more: Any) -> DPSGDClient:
        return DPSGDClient(
            linear(), x.double(), y, learning_rate=rate, batch_size=len(x), **more
        )  # fmt: skip

    own = DPSGD(topology=Topology("own", graph=GRAPH), mixing=rule, **OPTIONS)
    first = linear().weight.detach().numpy()
    own.start(Grid(app(make)), ArrayRecord({"weight": Array(first)}), num_rounds=3)
    held = np.stack([first] * 6)
    for number in (1, 2, 3):
        slopes = []
        for k in range(6):
            x, y = (part.numpy() for part in examples(k))
            scores = x.astype(np.float64) @ held[k].T
            shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            slopes.append((shares - np.eye(3)[y]).T @ x.astype(np.float64) / len(x))
        held = np.einsum("ij,jcd->icd", w, held) - rate * np.stack(slopes)
        for k in range(6):
            found = kept_by(own, k, number)["weight"]
            np.testing.assert_allclose(found, held[k], rtol=0, atol=1e-12)
    assert np.abs(held[0] - held[5]).max() > 0.01


def test_with_equal_weights_the_first_round_is_local_training():
    """So its average, taken by hand, is what DFedAvg has after its own first round.

    Of parameters: statistics are averaged with those that neighbours had before.
    """
    own, other = (kind(topology=Topology("complete"), **OPTIONS) for kind in (DPSGD, DFedAvg))
    run(own, Grid(in_double(DPSGDClient)), 1)
    run(other, Grid(in_double(DFedAvgClient)), 1)
    counts = np.array([len(examples(k)[1]) for k in range(6)])
    trained = [kept_by(own, k, 1) for k in range(6)]
    average = {
        name: sum(t[name] * n for t, n in zip(trained, counts, strict=True)) / counts.sum()
        for name, _ in net().named_parameters()
    }
    found = kept_by(other, 3, 1)
    agree({name: found[name] for name in average}, average)


def test_without_neighbours_it_is_local_training():
    """Sums of differences round otherwise than the steps themselves: 1e-12, of float64."""
    own, other = (kind(topology=Topology("own", graph=[]), **OPTIONS) for kind in (DPSGD, DFedAvg))
    run(own, Grid(in_double(DPSGDClient)), 2)
    run(other, Grid(in_double(DFedAvgClient)), 2)
    for client in range(6):
        agree(kept_by(own, client, 2), kept_by(other, client, 2))


def test_running_variances_stay_positive():
    """They are averaged, not moved by a difference that may be larger than what is there."""
    own = DPSGD(topology=Topology("ring"), same_weights=False, **OPTIONS)
    run(own, Grid(in_double(DPSGDClient, local_epochs=10)), 4)
    for client in range(6):
        assert (kept_by(own, client, 4)["1.running_var"] > 0).all()
    assert own.train_metrics[4]["parcels-rejected"] == 0


def test_what_a_hostile_neighbour_sends_is_dropped_and_counted():
    check_as_if_not_heard(DPSGD, in_double(DPSGDClient), [with_arrays(nan)], rounds=2)


def test_a_client_that_failed_goes_on_from_the_round_before():
    """A round is one exchange; one more if a client lacks its neighbours' weights."""
    own = DPSGD(topology=Topology("complete"), **OPTIONS)

    def change(reply: Message) -> Message:
        return failed(reply) if own.server_round == 2 else reply

    grid = Grid(in_double(DPSGDClient), changes={2: change})
    run(own, grid, 4)
    kinds = [count for kind, count in grid.exchanges if kind == "train"]
    assert kinds == [6, 6, 6, 6, 6, 6]  # two in rounds 1 and 3, one in rounds 2 and 4
    assert [own.train_metrics[k]["replies-accepted"] for k in (1, 2, 3, 4)] == [6, 5, 6, 6]
    assert own.trained == dict.fromkeys(range(6), 4)
