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

from fedntk.clients import DFedAvgClient, NTKDFLClient, SGDClient, cache_dir
from fedntk.clients.personal.personal_store import PersonalStore
from fedntk.strategies import DFedAvg, NoUsableReply, SeededFedAvg, Topology

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


def weights_of(of: Any, client: int, server_round: int, what: str = "") -> dict[str, np.ndarray]:
    kept = PersonalStore(None, of.run_key, f"{client}{what}").load(server_round)
    assert kept is not None
    return kept


def agree(a: Any, b: Any, atol: float = 1e-12) -> None:
    """Weights of size 1, some hundred sums in float64: 1e-12."""
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("mixing", ["examples", "equal", "metropolis"])
def test_on_the_complete_graph_it_is_fedavg(mixing):
    """All clients hold FedAvg's model after each of three rounds.

    By examples as they are; equally, and by Metropolis and Hastings' rule, where all clients have
    as many. BatchNorm's counters, which differ, are averaged in float64 and rounded on both sides.
    """
    equal = mixing != "examples"
    central = SeededFedAvg(**OPTIONS)
    own = DFedAvg(topology=COMPLETE, mixing=mixing, **OPTIONS)
    for rounds in (1, 3):
        expected = run(central, Grid(in_double(SGDClient, equal)), rounds)
        mean = run(own, Grid(in_double(DFedAvgClient, equal)), rounds)
        agree(mean, expected)
        for client in range(6):
            agree(weights_of(own, client, rounds), expected)


def test_momentum_zero_is_dfedavg_and_another_is_not():
    plain, zero, heavy = (DFedAvg(topology=COMPLETE, **OPTIONS) for _ in range(3))
    a = run(plain, Grid(in_double(DFedAvgClient)), 2)
    b = run(zero, Grid(in_double(DFedAvgClient, momentum=0.0)), 2)
    c = run(heavy, Grid(in_double(DFedAvgClient, momentum=0.9)), 2)
    assert bits(a) == bits(b) != bits(c)


def test_without_neighbours_it_is_local_training():
    """Two rounds of client 4 are two visits of SGD, one from where the other ended."""
    own = DFedAvg(topology=Topology("own", graph=[]), **OPTIONS)
    run(own, Grid(in_double(DFedAvgClient)), 2)
    x, y = examples(4)
    alone = SGDClient(net(), x.double(), y, seed=(0, 4), **SGD)
    weights = [tensor.numpy() for tensor in net().state_dict().values()]
    for number in (1, 2):
        weights, _, _ = alone.fit(weights, {"server-round": number})
    for kept, expected in zip(weights_of(own, 4, 2).values(), weights, strict=True):
        assert kept.tobytes() == np.asarray(expected).tobytes()


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
    found = {
        k: np.stack([weights_of(own, c, k)[name].ravel() for c in range(6)]) for k in range(1, 6)
    }
    np.testing.assert_allclose(found[5], np.linalg.matrix_power(w, 4) @ found[1], atol=1e-12)
    values, vectors = np.linalg.eig(w.T)
    order = np.argsort(-np.abs(values))
    stationary = np.real(vectors[:, order[0]] / vectors[:, order[0]].sum())
    second = float(np.abs(values[order[1]]))
    assert 0.3 < second < 0.95
    if rule == "metropolis":
        np.testing.assert_allclose(stationary, 1 / 6, atol=1e-12)
    mean = stationary @ found[1]
    distances = [np.sqrt(stationary @ (found[k] - mean) ** 2).max() for k in range(1, 6)]
    np.testing.assert_allclose(stationary @ found[5], mean, atol=1e-12)
    for near, far in zip(distances[1:], distances, strict=False):
        assert near <= second * far + 1e-12
    assert distances[-1] > 1e-6  # not there at once, as it would be on the complete graph


def test_gossip_steps_are_powers_of_the_mixing_matrix_too():
    """Three averages in one round: W^3 X."""
    options = {"topology": Topology("own", graph=GRAPH), "same_weights": False, **OPTIONS}
    one, three = DFedAvg(**options), DFedAvg(gossip_steps=3, **options)
    run(one, Grid(in_double(DFedAvgClient, local_epochs=0)), 3)
    grid = Grid(in_double(DFedAvgClient, local_epochs=0))
    run(three, grid, 1)
    assert grid.exchanges.count(("train", 6)) == 4
    for client in range(6):
        agree(weights_of(three, client, 1), weights_of(one, client, 3))


def test_the_learning_rates_factor_is_that_of_a_smaller_rate():
    """In round 3 the rate is 0.2 times 0.5 squared."""
    own = DFedAvg(topology=Topology("own", graph=[]), learning_rate_factor=0.5, **OPTIONS)
    run(own, Grid(in_double(DFedAvgClient, learning_rate=0.2)), 3)
    x, y = examples(4)
    weights = [tensor.numpy() for tensor in net().state_dict().values()]
    for number in (1, 2, 3):
        rate = 0.2 * 0.5 ** (number - 1)
        alone = SGDClient(net(), x.double(), y, seed=(0, 4), **{**SGD, "learning_rate": rate})
        weights, _, _ = alone.fit(weights, {"server-round": number})
    for kept, expected in zip(weights_of(own, 4, 3).values(), weights, strict=True):
        assert kept.tobytes() == np.asarray(expected).tobytes()


HOSTILE = {
    "NaN": lambda a: {k: np.full_like(v, np.nan) if v.dtype.kind == "f" else v
                      for k, v in a.items()},
    "another name": lambda a: {f"x{k}": v for k, v in a.items()},
    "a matrix for a vector": lambda a: {k: np.zeros((2, 2), v.dtype) for k, v in a.items()},
    "no examples": lambda a: {**a, "num-examples": np.array(0)},
    "half a float": lambda a: {k: v.astype(np.float16) for k, v in a.items()},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_what_a_hostile_neighbour_sends_is_dropped_and_counted(kind):
    """Client 2 is whole itself, and the others are as if they had not heard it."""
    change = with_arrays(HOSTILE[kind], "to-neighbours")
    topology = Topology("own", graph=GRAPH)

    def first_step_only(reply: Message) -> Message:
        return change(reply) if "to-neighbours" in reply.content else reply

    attacked = DFedAvg(topology=topology, **OPTIONS)
    run(attacked, Grid(in_double(DFedAvgClient), changes={2: first_step_only}), 1)
    without = DFedAvg(topology=Topology("own", graph=[e for e in GRAPH if 2 not in e]), **OPTIONS)
    run(without, Grid(in_double(DFedAvgClient)), 1)
    for client in (0, 1, 3, 4, 5):
        assert bits(weights_of(attacked, client, 1)) == bits(weights_of(without, client, 1))
    metrics = attacked.train_metrics[1]
    assert metrics["parcels-rejected"] == 3  # of 0, 1 and 3
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (6, 0)
    assert without.train_metrics[1]["parcels-rejected"] == 0


def on_parcels(change: Change) -> Change:
    """Damage the record for the neighbours, where a reply has one."""

    def apply(reply: Message) -> Any:
        if "to-neighbours" not in reply.content:
            return reply
        reply.content["arrays"] = reply.content["to-neighbours"]
        changed: Any = change(reply)
        changed.content["to-neighbours"] = changed.content["arrays"]
        del changed.content["arrays"]
        return changed

    return apply


@pytest.mark.parametrize("kind", [garbage, archive, boasting])
def test_bytes_that_are_no_arrays_end_no_neighbour(kind, caplog):
    """The relay hands them on unread; each of the three that get them goes on without them."""
    own = DFedAvg(topology=Topology("own", graph=GRAPH), **OPTIONS)
    grid = Grid(in_double(DFedAvgClient), changes={2: on_parcels(kind)})
    run(own, grid, 1)
    without = DFedAvg(topology=Topology("own", graph=[e for e in GRAPH if 2 not in e]), **OPTIONS)
    run(without, Grid(in_double(DFedAvgClient)), 1)
    for client in (0, 1, 3, 4, 5):
        assert bits(weights_of(own, client, 1)) == bits(weights_of(without, client, 1))
    assert own.train_metrics[1]["parcels-rejected"] == 3
    assert own.train_metrics[1]["replies-accepted"] == 6
    assert "dropped what came from-2" in caplog.text


def test_a_client_that_fails_within_a_round_leaves_the_others_at_work():
    """Client 2's second reply of round 1 is an error: it goes on from the first weights."""
    own = DFedAvg(topology=COMPLETE, **OPTIONS)

    def change(reply: Message) -> Message:
        averaged = "to-neighbours" not in reply.content
        return failed(reply) if averaged and own.server_round == 1 else reply

    run(own, Grid(in_double(DFedAvgClient), changes={2: change}), 2)
    assert own.train_metrics[1]["replies-accepted"] == 5
    assert own.train_metrics[2]["replies-accepted"] == 6
    assert own.trained == dict.fromkeys(range(6), 2)


def test_weights_that_count_stay_however_many_rounds_fail():
    """Client 2's second reply fails in rounds 2 to 24, more than are kept: it has not lost any."""
    own = DFedAvg(topology=COMPLETE, collect=False, **OPTIONS)

    def change(reply: Message) -> Message:
        averaged = "to-neighbours" not in reply.content
        return failed(reply) if averaged and 2 <= own.server_round <= 24 else reply

    run(own, Grid(in_double(DFedAvgClient, local_epochs=0), changes={2: change}), 25)
    assert own.train_metrics[24]["replies-accepted"] == 5
    assert own.train_metrics[25]["replies-accepted"] == 6
    assert own.train_metrics[25]["restarted"] == 0


def test_one_that_lost_its_weights_takes_over_its_neighbours_average():
    """Client 5's folder goes after round 1: in round 2 it sends nothing, and says so."""
    own = DFedAvg(topology=COMPLETE, **OPTIONS)

    def forget(reply: Message) -> Message:
        if own.server_round == 1 and "to-neighbours" not in reply.content:
            for folder in (cache_dir() / "personal").glob(f"run-{own.run_key}-client-5*"):
                shutil.rmtree(folder)
        return reply

    run(own, Grid(in_double(DFedAvgClient), changes={5: forget}), 2)
    trained = [weights_of(own, k, 2, "-within-round") for k in range(5)]
    counts = [len(examples(k)[1]) for k in range(5)]
    for client in range(6):
        expected = {
            name: sum(t[name] * n for t, n in zip(trained, counts, strict=True)) / sum(counts)
            for name in net().state_dict()
        }
        expected["1.num_batches_tracked"] = np.rint(expected["1.num_batches_tracked"])
        agree(weights_of(own, client, 2), expected)
    assert own.train_metrics[2]["restarted"] == pytest.approx(10 / sum(range(5, 11)))


def test_training_that_diverges_leaves_the_weights_and_the_run_goes_on():
    own = DFedAvg(topology=COMPLETE, **OPTIONS)
    grid = Grid(in_double(DFedAvgClient, learning_rate=1e200))
    mean = run(own, grid, 2)
    assert all(np.isfinite(array).all() for array in mean.values())
    assert own.train_metrics[2]["replies-accepted"] == 6


def test_first_weights_travel_once_and_trained_ones_once():
    """Down in round 1: the initial arrays, then 5 parcels; in round 2 the parcels alone."""
    sizes: list[tuple[int, int]] = []

    class Counting(Grid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            messages = list(messages)
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if messages and messages[0].metadata.message_type == "train":
                sizes.append(
                    tuple(len(each[0].content.array_records) for each in (messages, replies))
                )
            return replies

    run(DFedAvg(topology=COMPLETE, collect=False, **OPTIONS), Counting(in_double(DFedAvgClient)), 2)
    assert sizes == [(1, 1), (5, 0), (0, 1), (5, 0)]


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="mixing: expected one of examples, equal, metropolis"):
        DFedAvg(mixing="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="learning_rate_factor: expected a finite number above 0"):
        DFedAvg(learning_rate_factor=0.0)
    with pytest.raises(ValueError, match="gossip_steps: expected at least 1"):
        DFedAvg(gossip_steps=0)


def test_another_client_is_told_what_to_use():
    with pytest.raises(NoUsableReply, match="client_fn return a DFedAvgClient"):
        run(DFedAvg(**OPTIONS), Grid(app(SGDClient)))
    with pytest.raises(NoUsableReply):
        run(DFedAvg(**OPTIONS), Grid(app(NTKDFLClient)))
