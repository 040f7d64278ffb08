"""DFedAvg: FedAvg on the complete graph, local training without edges, consensus without steps."""

import networkx as nx
import numpy as np
import pytest

from fedntk.clients import DFedAvgClient, LocalSGD, SGDClient
from fedntk.strategies import DFedAvg, SeededFedAvg, Topology, spectral_gap

from .federation import Contract, Grid, app, bits, examples, kept_by, network, start, told

SGD = {"learning_rate": 0.1, "batch_size": 4, "epochs": 2}
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
COMPLETE = Topology("complete")
GRAPH = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (0, 2)]


def contract(kind, client, *, personal=False, **options):
    """How the contract tests run a decentralised strategy whose clients train by SGD."""
    given = {"topology": Topology("regular", degree=3), **options}
    return Contract(
        lambda **more: kind(**given, **more),
        app(client, sgd=LocalSGD(**SGD)),
        sends_arrays=False,
        one_exchange=False,
        personal=personal,
    )


LINE = {"topology": Topology("line"), "mixing": "metropolis", "gossip_steps": 2}
CONTRACT = {
    "DFedAvg": contract(DFedAvg, DFedAvgClient),
    "DFedAvg, line, two gossip steps": contract(DFedAvg, DFedAvgClient, same_weights=False, **LINE),
}


def net():
    """In float64: what one program computes and another agrees to 1e-12."""
    return network().double()


def in_double(kind, sgd=None, **options):
    local = LocalSGD(**SGD | (sgd or {}))
    return app(lambda _, x, y, **more: kind(net(), x.double(), y, sgd=local, **more, **options))


def run(of, grid, rounds=1, **options):
    return start(of, grid, rounds, net(), **options)


def within(of, client, number):
    """Weights that a client kept within a round, in DFedAvg the trained ones."""
    return kept_by(of, f"{client}-weights-within-round", number)


def agree(a, b, atol=1e-12):
    """Weights of size 1, some hundred sums in float64: 1e-12."""
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


def mixing_matrix(rule):
    """W of the graph by hand: row i sums to one."""
    near = nx.to_numpy_array(nx.Graph(GRAPH), range(6))
    if rule == "metropolis":
        degrees = near.sum(1)
        w = near / (1 + np.maximum.outer(degrees, degrees))
        return w + np.diag(1 - w.sum(1))
    w = (near + np.eye(6)) * (np.arange(5, 11) if rule == "examples" else 1)
    return w / w.sum(axis=1, keepdims=True)


def test_on_the_complete_graph_it_is_fedavg():
    """BatchNorm's counters, which differ, are averaged in float64 and rounded on both sides."""
    expected = run(SeededFedAvg(**OPTIONS), Grid(in_double(SGDClient)), 2)
    own = DFedAvg(topology=COMPLETE, collect_both=True, **OPTIONS)
    agree(run(own, Grid(in_double(DFedAvgClient)), 2), expected)
    for client in range(6):
        agree(kept_by(own, client, 2), expected)
        agree(own.models_at["trained"][client], within(own, client, 2))


@pytest.mark.parametrize(("rule", "steps"), [("examples", 3), ("equal", 1), ("metropolis", 1)])
def test_without_epochs_rounds_are_powers_of_the_mixing_matrix(rule, steps):
    """An uneven graph: after two rounds of Q gossip steps W^2Q X, X the weights of round 0."""
    options = {"topology": Topology("own", graph=GRAPH), "same_weights": False, **OPTIONS}
    own = DFedAvg(mixing=rule, gossip_steps=steps, **options)
    run(own, grid := Grid(in_double(DFedAvgClient, {"epochs": 0})), 2)
    assert grid.exchanges.count(("train", 6)) == 2 * (1 + steps)
    w = mixing_matrix(rule)
    first, last = ([kept_by(own, k, n)["3.weight"].ravel() for k in range(6)] for n in (0, 2))
    expected = np.linalg.matrix_power(w, 2 * steps) @ np.stack(first)
    np.testing.assert_allclose(last, expected, atol=1e-12)
    assert told(own, "spectral-gap") == pytest.approx([spectral_gap(w)] * 2)


def test_without_neighbours_it_is_local_training_at_a_rate_that_falls_by_its_factor():
    """Two rounds of client 4 are two visits of SGD, one from where the other ended."""
    topology, sgd = Topology("own", graph=[]), SGD | {"momentum": 0.5}
    own = DFedAvg(topology=topology, learning_rate_factor=0.5, collect=False, **OPTIONS)
    run(own, Grid(in_double(DFedAvgClient, {"momentum": 0.5})), 2)
    (x, y), weights = examples(4), [tensor.numpy() for tensor in net().state_dict().values()]
    for number, rate in ((1, 0.1), (2, 0.05)):
        client = SGDClient(
            net(), x.double(), y, seed=(0, 4), sgd=LocalSGD(**sgd | {"learning_rate": rate})
        )
        weights, _, _ = client.fit(weights, {"server-round": number})
    kept = kept_by(own, 4, 2)
    assert bits(kept) == bits(dict(zip(kept, map(np.asarray, weights), strict=True)))
