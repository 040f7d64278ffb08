"""DFedAvg: FedAvg on the complete graph, local training without edges, consensus without steps."""

import shutil
from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import nn

from fedntk.clients import DFedAvgClient, SGDClient, cache_dir
from fedntk.strategies import DFedAvg, SeededFedAvg, Topology

from .federation import (
    Change,
    Contract,
    Grid,
    app,
    archive,
    bits,
    boasting,
    examples,
    failed,
    garbage,
    kept_by,
    with_arrays,
)

SGD: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 4, "local_epochs": 2}
CLIENTS = app(DFedAvgClient, **SGD)
OPTIONS: dict[str, Any] = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
COMPLETE = Topology("complete")


def strategy(**options: Any) -> DFedAvg:
    return DFedAvg(**{"topology": Topology("regular", degree=3), **options})


CONTRACT = {
    "DFedAvg": Contract(strategy, CLIENTS, sends_arrays=False, one_exchange=False),
    "DFedAvg, line, two gossip steps": Contract(
        lambda **o: strategy(
            topology=Topology("line"), mixing="metropolis", gossip_steps=2, same_weights=False, **o
        ),
        CLIENTS,
        sends_arrays=False,
        one_exchange=False,
    ),
}


def net() -> nn.Module:
    """In float64: what one program computes and another agrees to 1e-12."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model.double()


def in_double(kind: type, equal: bool = False, **options: Any) -> Any:
    """An app of clients in float64, all with as many examples if wanted."""

    def make(_: nn.Module, x: torch.Tensor, y: torch.Tensor, **more: Any) -> Any:
        x, y = (x[:5], y[:5]) if equal else (x, y)
        return kind(net(), x.double(), y, **more, **{**SGD, **options})

    return app(make)


def run(of: Any, grid: Grid, rounds: int = 1) -> dict[str, np.ndarray]:
    initial = ArrayRecord({name: Array(t.numpy()) for name, t in net().state_dict().items()})
    result = of.start(grid=grid, initial_arrays=initial, num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


def within(of: Any, client: int, number: int) -> dict[str, np.ndarray]:
    """Weights that a client kept within a round, in DFedAvg the trained ones."""
    kept = kept_by(of, f"{client}-within-round", number)
    return {n.removeprefix("weights "): a for n, a in kept.items() if n.startswith("weights ")}


def agree(a: Any, b: Any, atol: float = 1e-12) -> None:
    """Weights of size 1, some hundred sums in float64: 1e-12."""
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("mixing", ["examples", "equal", "metropolis"])
def test_on_the_complete_graph_it_is_fedavg(mixing):
    """All clients hold FedAvg's model after two rounds.

    By examples as they are; equally, and by Metropolis and Hastings' rule, where all clients have
    as many. BatchNorm's counters, which differ, are averaged in float64 and rounded on both sides.
    """
    equal = mixing != "examples"
    central = SeededFedAvg(**OPTIONS)
    own = DFedAvg(topology=COMPLETE, mixing=mixing, **OPTIONS)
    expected = run(central, Grid(in_double(SGDClient, equal)), 2)
    agree(run(own, Grid(in_double(DFedAvgClient, equal)), 2), expected)
    for client in range(6):
        agree(kept_by(own, client, 2), expected)


def mixing_matrix(graph: nx.Graph, rule: str, counts: Sequence[int]) -> np.ndarray:
    """W of a graph by hand: row i sums to one."""
    n = len(graph)
    w = np.zeros((n, n))
    for i in range(n):
        for j in graph.neighbors(i):
            degrees = (graph.degree(i), graph.degree(j))
            w[i, j] = {
                "examples": counts[j], "equal": 1.0, "metropolis": 1 / (1 + max(degrees))
            }[rule]  # fmt: skip
        w[i, i] = {"examples": counts[i], "equal": 1.0, "metropolis": 1 - w[i].sum()}[rule]
    return w / w.sum(axis=1, keepdims=True)


GRAPH = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (0, 2)]


@pytest.mark.parametrize("rule", ["examples", "equal", "metropolis"])
def test_without_steps_rounds_are_powers_of_the_mixing_matrix(rule):
    """No epochs, weights of one's own, an uneven graph: after five rounds the clients have W^5 X.

    They approach the mean of W's stationary distribution, by at least the second eigenvalue a
    round: W is reversible (of counts, of degrees + 1, or symmetric), so in the norm that its
    stationary distribution weights, the distance shrinks by |lambda_2| each round. Of Metropolis
    and Hastings' rule that mean is the equal one.
    """
    own = DFedAvg(topology=Topology("own", graph=GRAPH), mixing=rule, same_weights=False, **OPTIONS)
    run(own, Grid(in_double(DFedAvgClient, local_epochs=0)), 5)
    name, counts = "3.weight", [len(examples(k)[1]) for k in range(6)]
    w = mixing_matrix(nx.Graph(GRAPH), rule, counts)
    found = {k: np.stack([kept_by(own, c, k)[name].ravel() for c in range(6)]) for k in range(1, 6)}
    np.testing.assert_allclose(found[5], np.linalg.matrix_power(w, 4) @ found[1], atol=1e-12)
    values, vectors = np.linalg.eig(w.T)
    order = np.argsort(-np.abs(values))
    stationary = np.real(vectors[:, order[0]] / vectors[:, order[0]].sum())
    second = float(np.abs(values[order[1]]))
    assert 0.3 < second < 0.95
    assert own.train_metrics[5]["spectral-gap"] == pytest.approx(1 - second)
    if rule == "metropolis":
        np.testing.assert_allclose(stationary, 1 / 6, atol=1e-12)
    mean = stationary @ found[1]
    distances = [np.sqrt(stationary @ (found[k] - mean) ** 2).max() for k in range(1, 6)]
    np.testing.assert_allclose(stationary @ found[5], mean, atol=1e-12)
    for near, far in zip(distances[1:], distances, strict=False):
        assert near <= second * far + 1e-12
    assert distances[-1] > 1e-6  # not there at once, as it would be on the complete graph


def test_gossip_steps_are_powers_of_the_mixing_matrix():
    """Three averages in one round: W^3 X. First weights travel once, and are kept as round 0."""
    options = {"topology": Topology("own", graph=GRAPH), "same_weights": False, **OPTIONS}
    own, grid = DFedAvg(gossip_steps=3, **options), Grid(in_double(DFedAvgClient, local_epochs=0))
    run(own, grid)
    assert grid.exchanges.count(("train", 6)) == 4
    w = mixing_matrix(nx.Graph(GRAPH), "examples", [len(examples(k)[1]) for k in range(6)])
    first, last = (
        np.stack([kept_by(own, k, number)["3.weight"].ravel() for k in range(6)])
        for number in (0, 1)
    )
    np.testing.assert_allclose(last, np.linalg.matrix_power(w, 3) @ first, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_without_neighbours_it_is_local_training_at_a_rate_that_falls_by_its_factor(factor):
    """Two rounds of client 4 are two visits of SGD, one from where the other ended."""
    own = DFedAvg(
        topology=Topology("own", graph=[]), learning_rate_factor=factor, collect=False, **OPTIONS
    )
    run(own, Grid(in_double(DFedAvgClient, learning_rate=0.2, momentum=0.5)), 2)
    x, y = examples(4)
    weights = [tensor.numpy() for tensor in net().state_dict().values()]
    for number in (1, 2):
        options = {**SGD, "learning_rate": 0.2 * factor ** (number - 1), "momentum": 0.5}
        alone = SGDClient(net(), x.double(), y, seed=(0, 4), **options)
        weights, _, _ = alone.fit(weights, {"server-round": number})
    for kept, expected in zip(kept_by(own, 4, 2).values(), weights, strict=True):
        assert kept.tobytes() == np.asarray(expected).tobytes()


def nan(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def on_parcels(change: Change) -> Change:
    """Damage the record for the neighbours, if a reply has one."""

    def apply(reply: Message) -> Any:
        if "to-neighbours" not in reply.content:
            return reply
        reply.content["arrays"] = reply.content["to-neighbours"]
        changed: Any = change(reply)
        changed.content["to-neighbours"] = changed.content["arrays"]
        del changed.content["arrays"]
        return changed

    return apply


def check_as_if_not_heard(
    make: Any, clients: Any, kinds: Sequence[Change], rounds: int = 1
) -> None:
    """Show that bad parcels of client 2 and others leave the rest as if these had sent nothing.

    On the complete graph; the bad ones are whole themselves.
    """
    attacked, without = (make(topology=COMPLETE, collect=False, **OPTIONS) for _ in range(2))
    senders = range(2, 2 + len(kinds))
    changes = dict(zip(senders, map(on_parcels, kinds), strict=True))
    run(attacked, Grid(clients, changes=changes), rounds)

    def quiet(reply: Message) -> Message:
        for name in list(reply.content.array_records):
            del reply.content[name]
        return reply

    run(without, Grid(clients, changes=dict.fromkeys(senders, quiet)), rounds)
    for client in range(6):
        assert bits(kept_by(attacked, client, rounds)) == bits(kept_by(without, client, rounds))
    metrics = attacked.train_metrics[rounds]
    assert metrics["parcels-rejected"] == 5 * len(kinds)
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (6, 0)
    assert without.train_metrics[rounds]["parcels-rejected"] == 0


def test_what_hostile_neighbours_send_is_dropped_and_counted(caplog):
    """NaN, and bytes that are no arrays, which the relay hands on unread."""
    kinds = [with_arrays(nan), garbage, archive, boasting]
    check_as_if_not_heard(DFedAvg, in_double(DFedAvgClient), kinds)
    assert "dropped what came from-3" in caplog.text


def test_weights_that_count_stay_however_many_rounds_fail():
    """Client 2's second reply fails in rounds 2 to 22, more than are kept: it has not lost any."""
    own = DFedAvg(topology=COMPLETE, collect=False, **OPTIONS)

    def change(reply: Message) -> Message:
        averaged = "to-neighbours" not in reply.content
        return failed(reply) if averaged and 2 <= own.server_round <= 22 else reply

    run(own, Grid(in_double(DFedAvgClient, local_epochs=0), changes={2: change}), 23)
    assert own.train_metrics[22]["replies-accepted"] == 5
    assert own.train_metrics[23]["replies-accepted"] == 6
    assert own.train_metrics[23]["restarted"] == 0


def test_one_that_lost_its_weights_takes_over_its_neighbours_average():
    """Client 5's folder goes after round 1: in round 2 it sends nothing, and says so."""
    own = DFedAvg(topology=COMPLETE, **OPTIONS)

    def forget(reply: Message) -> Message:
        if own.server_round == 1 and "to-neighbours" not in reply.content:
            for folder in (cache_dir() / "personal").glob(f"run-{own.run_key}-client-5*"):
                shutil.rmtree(folder)
        return reply

    run(own, Grid(in_double(DFedAvgClient), changes={5: forget}), 2)
    trained = [within(own, k, 2) for k in range(5)]
    counts = [len(examples(k)[1]) for k in range(5)]
    for client in range(6):
        expected = {
            name: sum(t[name] * n for t, n in zip(trained, counts, strict=True)) / sum(counts)
            for name in net().state_dict()
        }
        expected["1.num_batches_tracked"] = np.rint(expected["1.num_batches_tracked"])
        agree(kept_by(own, client, 2), expected)
    assert own.train_metrics[2]["restarted"] == pytest.approx(10 / sum(range(5, 11)))


def test_training_that_diverges_leaves_the_weights_and_the_run_goes_on():
    own = DFedAvg(topology=COMPLETE, **OPTIONS)
    grid = Grid(in_double(DFedAvgClient, learning_rate=1e200))
    mean = run(own, grid, 2)
    assert all(np.isfinite(array).all() for array in mean.values())
    assert own.train_metrics[2]["replies-accepted"] == 6
