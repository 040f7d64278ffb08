"""Methods that go through the relay: their graphs, their averages, sealed parcels and faults."""

import contextlib
import shutil
from collections import Counter
from types import SimpleNamespace
from typing import get_args

import networkx as nx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord
from torch import nn

import fedntk.clients
import fedntk.strategies
from fedntk.clients import (
    DFedAvgClient,
    DFedSAMClient,
    DisPFLClient,
    DPSGDClient,
    LocalSGD,
    SGDClient,
    cache_dir,
)
from fedntk.clients.core import disk_store
from fedntk.clients.gossip.dispfl import layer_densities
from fedntk.ntk.payloads.gossip_options import REFUSED
from fedntk.strategies import (
    DPSGD,
    DFedAvg,
    DFedSAM,
    DisPFL,
    NoUsableReply,
    SeededFedAvg,
    Topology,
    mixing_matrix,
    spectral_gap,
)
from fedntk.strategies.gossip.relay import count_refused, deviation
from fedntk.strategies.gossip.topology import TopologyKind
from fedntk.trust import KeyServer, ParcelKeys, new_key, open_parcel, public_bytes

from ..conftest import refused
from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    examples,
    failed,
    kept_by,
    lost,
    network,
    start,
    told,
)

SGD = {"learning_rate": 0.1, "batch_size": 4, "epochs": 2}
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
COMPLETE, REGULAR = Topology("complete"), Topology("regular", degree=3)
GRAPH = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (0, 2)]
EVERYONE = set(range(6))
MASKED = ("0.weight", "3.weight")  # of the network's arrays, those of two axes


def contract(kind, client, *, personal=False, **options):
    """How the contract tests run a decentralised strategy whose clients train by SGD."""
    options = {"topology": REGULAR, **options}
    return Contract(
        lambda **more: kind(**options, **more),
        app(client, sgd=LocalSGD(**SGD)),
        sends_arrays=False,
        one_exchange=False,
        personal=personal,
    )


LINE = {"topology": Topology("line"), "mixing": "metropolis", "gossip_steps": 2}
SPARSE = {"sparsity": 0.3, "same_masks": False, "mixing": "examples", "annealing_rounds": 4}
CONTRACT = {
    "DFedAvg": contract(DFedAvg, DFedAvgClient),
    "DFedAvg, line, two gossip steps": contract(DFedAvg, DFedAvgClient, same_weights=False, **LINE),
    "DFedSAM": contract(DFedSAM, DFedSAMClient),
    "DPSGD": contract(DPSGD, DPSGDClient),
    "DisPFL": contract(DisPFL, DisPFLClient, personal=True, **SPARSE),
}

# ------------------------------------------------------------------------------- graphs

KINDS = [kind for kind in get_args(TopologyKind) if kind != "own"]
CLIENTS = [3, 7, 8, 20, 21, 22, 40, 41, 50, 60, 61, 99]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_neighbours_are_mutual_sorted_without_oneself_and_of_those_that_take_part(kind):
    topology = Topology(kind, degree=3, dynamic=False)
    for count in range(len(CLIENTS) + 1):
        neighbours = topology.neighbours(2, reversed(CLIENTS[:count]))
        assert list(neighbours) == CLIENTS[:count]
        assert count < 2 or any(neighbours.values())
        for client, others in neighbours.items():
            assert list(others) == sorted(set(others) - {client})
            assert all(client in neighbours[other] for other in others)


@pytest.mark.parametrize(
    ("kind", "degree", "expected"),
    [
        ("regular", 3, [3] * 12),
        ("regular", 50, [11] * 12),  # no more than there are others
        ("regular", 5, [4] * 5 + [5] * 296),  # five miss the client that was one too many
        ("ring", 5, [2] * 12),
        ("line", 5, [1, 1, *[2] * 10]),
        ("complete", 1, [11] * 12),
        ("clustered", 4, [*[1] * 2, *[4] * 10]),  # 5, 5 and what is left
    ],
)
def test_degrees_of_each_kind(kind, degree, expected):
    neighbours = Topology(kind, degree=degree).neighbours(1, range(len(expected)))
    assert sorted(map(len, neighbours.values())) == expected


def test_erdos_renyi_graphs_have_the_degree_in_the_mean():
    """Over 40 draws of 60 clients: the mean of 40 x 1,770 edges' draws, within five deviations."""
    topology, share = Topology("erdos-renyi", degree=6), 6 / 59
    counts = [nx.Graph(topology.neighbours(k, range(60))).number_of_edges() for k in range(40)]
    error = np.sqrt(1770 * share * (1 - share) / 40)
    assert abs(np.mean(counts) - 1770 * share) < 5 * error
    assert len(set(counts)) > 10


@pytest.mark.parametrize(("kind", "degree"), [("regular", 2), ("erdos-renyi", 4)])
def test_a_draw_that_falls_apart_is_drawn_again(kind, degree):
    topology, apart = Topology(kind, degree=degree), 0
    for number in range(20):
        assert nx.is_connected(nx.Graph(topology.neighbours(number, range(16))))
        generator = np.random.default_rng([0, number, *b"topology"])
        apart += not nx.is_connected(topology._draw(range(16), generator))
    assert apart > 0


@each_kind
def test_a_graph_is_drawn_from_the_seed_and_with_dynamic_from_the_round(kind):
    """Whatever was drawn before, and in whatever order clients come."""

    def drawn(number, clients=CLIENTS, **options):
        return str(Topology(kind, degree=3, **options).neighbours(number, clients))

    one = Topology(kind, degree=3, seed=9)
    rounds = [str(one.neighbours(number, CLIENTS)) for number in range(1, 9)]
    assert drawn(5, CLIENTS[::-1], seed=9) == rounds[4]
    assert len({drawn(number, dynamic=False, seed=9) for number in range(1, 9)}) == 1
    seeds = {drawn(5, seed=seed) for seed in range(6)}
    assert min(len(seeds), len(set(rounds))) > 1 or kind == "complete"


def test_own_graph_of_pairs_or_networkx_without_those_that_are_not_there():
    """Edges to ids that no client has, loops, and edges named twice count for nothing."""
    edges = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 77), (88, 99)]
    made = [Topology("own", graph=graph) for graph in (edges, nx.MultiGraph(edges))]
    for topology in made:
        assert topology.neighbours(1, [5, 2, 1, 0]) == {0: (1,), 1: (0, 2), 2: (1,), 5: ()}
    assert made[0].settings() == made[1].settings() != Topology("own", graph=[]).settings()


@pytest.mark.parametrize("rule", ["examples", "equal", "metropolis"])
@each_kind
def test_rows_of_the_mixing_matrix_sum_to_one_follow_the_graph_and_have_its_gap(kind, rule):
    """Its general eigenvalues, in float64; those of a defective zero are off by 1e-8."""
    near = Topology(kind, degree=3, seed=2).neighbours(1, range(12))
    matrix = mixing_matrix(near, {k: 5 + k * k for k in range(12)}, rule)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-15)
    others = [tuple(np.flatnonzero(row)) for row in matrix - np.diag(matrix.diagonal())]
    assert dict(enumerate(others)) == near
    if rule == "metropolis":
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-16)
    sizes = np.sort(np.abs(np.linalg.eigvals(matrix)))
    assert spectral_gap(matrix) == pytest.approx(1 - sizes[-2], abs=1e-7)


@pytest.mark.parametrize(("rule", "other"), [("equal", 1 / 2), ("metropolis", 1 / 3)])
def test_clients_that_are_not_there_leave_their_shares_to_the_others(rule, other):
    matrix = mixing_matrix({0: (1, 2), 1: (0, 2), 2: (0, 1)}, {0: 7, 2: 7}, rule)
    np.testing.assert_allclose(matrix, [[1 - other, other], [other, 1 - other]])
    assert spectral_gap(mixing_matrix({0: ()}, {0: 7}, rule)) == 1


def test_a_static_graph_stays_as_it_is_if_a_client_is_missing():
    """Drawn among those who are there, one client fewer would give all of them other neighbours."""
    static = Topology(degree=3, dynamic=False, seed=4)
    strategy, resumed = (DFedAvg(topology=static) for _ in range(2))
    before, present = strategy.graph(1, range(6)), [0, 1, 2, 4, 5]
    after = strategy.graph(2, present)
    assert after == {k: tuple(j for j in before[k] if j != 3) for k in present}
    assert after != static.neighbours(2, present)
    resumed.load_state_dict(strategy.state_dict())
    assert resumed.graph(2, present) == after


# --------------------------------------------------------------- methods by their equations


def net():
    """In float64: what one program computes and another agrees to 1e-12."""
    return network().double()


def in_double(kind, sgd=None, **options):
    local = LocalSGD(**SGD | (sgd or {}))
    return app(lambda _, x, y, **more: kind(net(), x.double(), y, sgd=local, **more, **options))


def learn(strategy, grid, rounds=1, **options):
    return start(strategy, grid, rounds, net(), **options)


def within(strategy, client, number):
    """Weights that a client kept within a round, in DFedAvg the trained ones."""
    return kept_by(strategy, f"{client}-weights-within-round", number)


def agree(a, b, atol=1e-12):
    """Weights of size 1, some hundred sums in float64: 1e-12."""
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


def mixing_by_hand(rule):
    """W of the graph: row i sums to one."""
    near = nx.to_numpy_array(nx.Graph(GRAPH), range(6))
    if rule == "metropolis":
        degrees = near.sum(1)
        w = near / (1 + np.maximum.outer(degrees, degrees))
        return w + np.diag(1 - w.sum(1))
    w = (near + np.eye(6)) * (np.arange(5, 11) if rule == "examples" else 1)
    return w / w.sum(axis=1, keepdims=True)


def test_on_the_complete_graph_dfedavg_is_fedavg():
    """BatchNorm's counters, which differ, are averaged in float64 and rounded on both sides."""
    expected = learn(SeededFedAvg(**OPTIONS), Grid(in_double(SGDClient)), 2)
    strategy = DFedAvg(topology=COMPLETE, collect_both=True, **OPTIONS)
    agree(learn(strategy, Grid(in_double(DFedAvgClient)), 2), expected)
    for client in range(6):
        agree(kept_by(strategy, client, 2), expected)
        agree(strategy.models_at["trained"][client], within(strategy, client, 2))


@pytest.mark.parametrize(("rule", "steps"), [("examples", 3), ("equal", 1), ("metropolis", 1)])
def test_without_epochs_rounds_are_powers_of_the_mixing_matrix(rule, steps):
    """An uneven graph: after two rounds of Q gossip steps W^2Q X, X the weights of round 0."""
    options = {"topology": Topology("own", graph=GRAPH), "same_weights": False, **OPTIONS}
    strategy = DFedAvg(mixing=rule, gossip_steps=steps, **options)
    learn(strategy, grid := Grid(in_double(DFedAvgClient, {"epochs": 0})), 2)
    assert grid.exchanges.count(("train", 6)) == 2 * (1 + steps)
    w = mixing_by_hand(rule)
    first, last = ([kept_by(strategy, k, n)["3.weight"].ravel() for k in range(6)] for n in (0, 2))
    expected = np.linalg.matrix_power(w, 2 * steps) @ np.stack(first)
    np.testing.assert_allclose(last, expected, atol=1e-12)
    assert told(strategy, "spectral-gap") == pytest.approx([spectral_gap(w)] * 2)


def test_without_neighbours_it_is_local_training_at_a_rate_that_falls_by_its_factor():
    """Two rounds of client 4 are two visits of SGD, one from where the other ended."""
    topology, sgd = Topology("own", graph=[]), SGD | {"momentum": 0.5}
    strategy = DFedAvg(topology=topology, learning_rate_factor=0.5, collect=False, **OPTIONS)
    learn(strategy, Grid(in_double(DFedAvgClient, {"momentum": 0.5})), 2)
    (x, y), weights = examples(4), [tensor.numpy() for tensor in net().state_dict().values()]
    for number, rate in ((1, 0.1), (2, 0.05)):
        local = LocalSGD(**sgd | {"learning_rate": rate})
        client = SGDClient(net(), x.double(), y, seed=(0, 4), sgd=local)
        weights, _, _ = client.fit(weights, {"server-round": number})
    kept = kept_by(strategy, 4, 2)
    assert bits(kept) == bits(dict(zip(kept, map(np.asarray, weights), strict=True)))


def test_dfedsam_of_a_radius_of_zero_is_dfedavg_bit_for_bit_with_the_papers_factor():
    """0.95 by default; with momentum it is DFedAvgM. Another radius is something else."""
    ring = {"topology": Topology("ring", seed=1), **OPTIONS}
    sgd = {"momentum": 0.9, "weight_decay": 5e-4}
    expected, zero = DFedAvg(learning_rate_factor=0.95, **ring), DFedSAM(**ring)
    mean = learn(expected, Grid(in_double(DFedAvgClient, sgd)), 2)
    same = learn(zero, Grid(in_double(DFedSAMClient, sgd, rho=0.0)), 2)
    other = learn(DFedSAM(**ring), Grid(in_double(DFedSAMClient, sgd)), 2)
    assert bits(mean) == bits(same) != bits(other)
    assert bits(kept_by(zero, 2, 2)) == bits(kept_by(expected, 2, 2))


def test_a_round_of_d_psgd_of_one_batch_is_its_algorithm_1():
    """Full batches, a linear softmax model: W X - gamma G(X). Float64, few operations: 1e-12."""
    w, rate, first = mixing_by_hand("metropolis"), 0.3, np.full((3, 4), 0.1)
    topology, sgd = Topology("own", graph=GRAPH), LocalSGD(learning_rate=rate, batch_size=20)
    strategy = DPSGD(topology=topology, mixing="metropolis", collect_both=True, **OPTIONS)
    layer = nn.Linear(4, 3, bias=False).double
    linear = app(lambda _, x, y, **more: DPSGDClient(layer(), x.double(), y, sgd=sgd, **more))
    strategy.start(Grid(linear), ArrayRecord({"weight": Array(first)}), num_rounds=3)
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
        kept = [kept_by(strategy, k, number)["weight"] for k in range(6)]
        np.testing.assert_allclose(kept, held, rtol=0, atol=1e-12)
    before = [strategy.models_at["averaged"][k]["weight"] for k in range(6)]
    np.testing.assert_allclose(before, averaged, rtol=0, atol=1e-12)
    assert np.abs(held[0] - held[5]).max() > 0.01


# ------------------------------------------------------------------------------- DisPFL


def masks_of(strategy, client, number, name):
    kept = kept_by(strategy, client, number)
    return kept[f"sent {name}"], kept[f"next {name}"]


def test_with_no_sparsity_clients_of_dispfl_train_as_in_dfedavg():
    """DFedAvg averages at the end of a round, DisPFL at the beginning: what is trained is alike."""
    options = {"topology": Topology("own", graph=GRAPH), "mixing": "examples", **OPTIONS}
    dense, expected = DisPFL(sparsity=0.0, **options), DFedAvg(**options)
    learn(dense, Grid(in_double(DisPFLClient)), 2)
    learn(expected, Grid(in_double(DFedAvgClient)), 2)
    for client in range(6):
        trained, kept = within(expected, client, 2), kept_by(dense, client, 2)
        agree({name: kept[name] for name in trained}, trained)


def test_masks_keep_their_densities_and_change_as_the_cosine_has_it_and_weights_stay_in_them():
    """T = 2: nothing changes in round 3. The model is the mean over those that have a number."""
    strategy = DisPFL(topology=Topology("ring"), same_masks=False, annealing_rounds=2, **OPTIONS)
    grid = Grid(in_double(DisPFLClient, {"momentum": 0.9, "weight_decay": 1e-3}))
    mean, models = learn(strategy, grid, 3), [kept_by(strategy, k, 3) for k in range(6)]
    densities = layer_densities({n: tuple(p.shape) for n, p in net().named_parameters()}, 0.5)
    up = [m.content for way, m in grid.seen if way == "up" and "to-neighbours" in m.content]
    sent = [arrays_of(content["to-neighbours"]) for content in up]
    assert len(sent) == 6 * 4
    assert any((masks_of(strategy, 0, 1, n)[0] != masks_of(strategy, 1, 1, n)[0]).any()
               for n in MASKED)  # fmt: skip
    for name in MASKED:
        holders = np.maximum(sum((w[name] != 0).astype(int) for w in models), 1)
        np.testing.assert_allclose(mean[name], sum(w[name] for w in models) / holders, atol=1e-12)
        wanted = round(densities[name] * mean[name].size)
        assert {parcel[name].shape for parcel in sent} == {(wanted,)}
        for client in range(6):
            for number in (1, 2, 3):
                mask, following = masks_of(strategy, client, number, name)
                assert mask.sum() == following.sum() == wanted < mask.size
                weights = kept_by(strategy, client, number)[name]
                assert (weights[~mask] == 0).all()
                assert (weights[mask] != 0).any()
                after = masks_of(strategy, client, number + 1, name)[0] if number < 3 else mask
                np.testing.assert_array_equal(after, following)
    assert np.not_equal(*masks_of(strategy, 0, 1, MASKED[0])).any()
    changed = told(strategy, "mask-changed")
    assert changed[0] > changed[1] > changed[2] == 0


def test_an_average_of_dispfl_is_over_those_that_have_the_coordinate():
    """Without epochs or search, on the complete graph: by hand, from what round 1 kept."""
    options = {"prune_share": 0.0, "same_masks": False, "same_weights": False, **OPTIONS}
    strategy = DisPFL(topology=COMPLETE, **options)
    learn(strategy, Grid(in_double(DisPFLClient, {"epochs": 0})), 2)
    before, after = ([kept_by(strategy, k, number) for k in range(6)] for number in (1, 2))
    for name in MASKED:
        masks = [masks_of(strategy, k, 1, name)[0] for k in range(6)]
        holders = sum(mask.astype(int) for mask in masks)
        assert set(np.unique(holders)) - {0, 6}  # some have it, and others lack it
        mean = sum(w[name] for w in before) / np.maximum(holders, 1)
        for k in range(6):
            np.testing.assert_allclose(after[k][name], mean * masks[k], atol=1e-12)


# ------------------------------------------------------------- what all methods share

LOCAL = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
MSE = {"loss": "mse"}
ALL = {"topology": COMPLETE, "collect": False, **OPTIONS}
METHODS = {  # options of strategies and clients
    "NTKDFL": ({"learning_rate": 0.1, "steps": (2.0, 5.0), **MSE}, MSE),
    "DFedAvg": ({"gossip_steps": 2}, LOCAL),
    "DPSGD": ({"mixing": "metropolis"}, LOCAL),
    "DisPFL": ({"same_masks": False}, LOCAL),
}
each_method = pytest.mark.parametrize("name", sorted(METHODS))


def make(name, **options):
    return getattr(fedntk.strategies, name)(**METHODS[name][0] | ALL | options)


def clients(name, **options):
    kind, options = getattr(fedntk.clients, f"{name}Client"), METHODS[name][1] | options
    return app(lambda *data, **more: kind(*data, **options, **more))


def run(name, rounds=1, changes=lambda _: {}, **options):
    """Run a strategy; `changes` makes those of replies, given the strategy."""
    strategy = make(name, **options)
    grid = Grid(clients(name), changes=changes(strategy))
    start(strategy, grid, rounds)
    return strategy, grid


def alike(a, b, number=1):
    """Clients that ended a round of two runs with the same bits."""
    return {k for k in EVERYONE if bits(kept_by(a, k, number)) == bits(kept_by(b, k, number))}


def on_parcels(change, prefix="to-"):
    """Change the arrays of each parcel of a reply; None takes the parcel out."""

    def apply(reply):
        for name in [n for n in reply.content.array_records if n.startswith(prefix)]:
            changed = change(arrays_of(reply.content[name]))
            del reply.content[name]
            if changed is not None:
                reply.content[name] = as_record(changed)
        return reply

    return apply


silent = on_parcels(lambda _: None)


def in_step(strategy, number, position, change):
    at = number, position
    return lambda reply: (
        change(reply) if (strategy.server_round, strategy.progress.position) == at else reply
    )


def forgets(strategy, what):
    def change(reply):
        folder = f"run-{strategy.trained.run_key}"  # is drawn when a run begins
        shutil.rmtree(cache_dir() / "personal" / f"client-{what}" / folder)
        return reply

    return change


# ------------------------------------------------------------------ sealed parcels


@each_method
def test_sealed_runs_have_the_bits_of_others_and_send_nothing_in_clear(name):
    """First weights travel once, and keys. Graphs are drawn anew."""
    (plain, clear), (strategy, sealed) = (
        run(name, 2, seal=seal, topology=REGULAR) for seal in (False, True)
    )
    assert alike(strategy, plain, 2) == EVERYONE
    assert told(strategy, "parcels-rejected") == [0, 0]
    assert told(strategy, "neighbours-heard") == [3, 3]
    for grid in (clear, sealed):
        down = [m for way, m in grid.seen if way == "down" and "arrays" in m.content]
        assert sorted(m.metadata.dst_node_id for m in down) == [1, 2, 3, 4, 5, 6]
    assert [n for kind, n in sealed.exchanges if kind == "query.public_key"] == [6]
    parcels = [
        names
        for way in ("down", "up")
        for records in sealed.records(way)
        for record, names in records.items()
        if record != "arrays"
    ]
    assert {name.partition("-")[0] for names in parcels for name in names} == {"content", "key"}


def keys_of(name, limits):
    """Private keys of six clients, and the clients that have them."""
    kind, options = getattr(fedntk.clients, f"{name}Client"), METHODS[name][1]
    keys = [new_key() for _ in range(6)]

    def with_key(*data, seed):
        parcel_keys = ParcelKeys(keys[seed[1]], **limits)
        return kind(*data, seed=seed, parcel_keys=parcel_keys, **options)

    return keys, app(with_key)


def parcels_in(grid):
    return [
        (message.metadata.dst_node_id - 1, int(name.removeprefix("from-")), record)
        for way, message in grid.seen
        if way == "down"
        for name, record in message.content.array_records.items()
        if name.startswith("from-")
    ]


def opens(parcel, key, run_key, sender):
    """Whether a key opens a parcel of some exchange of round 1."""
    for exchange in range(4):
        info = f"fedntk parcel 1\0{run_key}\x001\0{exchange}\0{sender}".encode()
        with contextlib.suppress(ValueError):
            open_parcel(arrays_of(parcel), key, info)
            return True
    return False


def test_parcels_open_only_with_their_receivers_keys():
    """Weights and averages are for both of a client's neighbours, Jacobians for one of them."""
    keys, with_keys = keys_of("NTKDFL", {})
    strategy = make("NTKDFL", seal=True, topology=Topology("ring"))
    start(strategy, grid := Grid(with_keys))
    opened, run_key = Counter(), strategy.trained.run_key
    for receiver, sender, parcel in parcels_in(grid):
        for k, key in enumerate(keys):
            opened[k == receiver] += opens(parcel, key, run_key, sender)
    assert opened == {True: 6 * 2 * 3, False: 6 * 2 * 2}


def flip(arrays):
    return {n: a ^ (np.arange(a.size) == 20) if n == "content" else a for n, a in arrays.items()}


def test_a_parcel_that_is_damaged_replayed_or_in_clear_counts_as_none():
    """Those of clients 2, 1 (its very first one, in every later exchange) and 3."""
    first = {}

    def replay(reply):
        for name, record in list(reply.content.array_records.items()):
            reply.content[name] = first.setdefault(name, record)
        return reply

    def leave_out(strategy):
        def later(reply):
            begins = (strategy.server_round, strategy.progress.position) == (1, 0)
            return reply if begins else silent(reply)

        return {1: later, 2: silent, 3: silent}

    clear = on_parcels(lambda _: {"a": np.zeros(3, np.float32)})
    damage = {1: replay, 2: on_parcels(flip), 3: clear}
    damaged, without = (
        run("DFedAvg", 2, changes, seal=True, topology=REGULAR)[0]
        for changes in (lambda _: damage, leave_out)
    )
    assert alike(damaged, without, 2) == EVERYONE
    # of three neighbours each, in both averages; client 1's not in the first of round 1
    assert told(damaged, "parcels-rejected") == [2 * 3 * 2 + 3, 3 * 3 * 2]
    assert (told(damaged), told(without, "parcels-rejected")) == ([6, 6], [0, 0])


def test_keys_are_asked_for_again_of_clients_that_failed():
    """Client 3 sends what is no key in round 1, and client 2 loses its own at the end of it."""
    strategy = make("DFedAvg", seal=True)

    def odd(reply):
        if (strategy.server_round, reply.metadata.message_type) == (1, "query.public_key"):
            reply.content["properties"]["public-key"] = b"no key"
        return reply

    changes = {3: odd, 2: in_step(strategy, 1, 2, forgets(strategy, "2-keys"))}
    grid = Grid(clients("DFedAvg"), changes=changes, changed_kind="query.public_key train")
    start(strategy, grid, rounds=3)
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6, 1, 1]
    assert (told(strategy), told(strategy, "parcels-rejected")[2]) == ([5, 5, 6], 0)


def test_a_client_with_keys_of_its_own_refuses_to_work_in_clear():
    grid = Grid(clients("DFedAvg", parcel_keys=ParcelKeys(new_key())))
    said = "the strategy does not have parcels sealed"
    refused(said, start, make("DFedAvg"), grid, error=NoUsableReply)


class Swapping(DFedAvg):
    """A relay that names a key of its own for client 2, and reads what is sealed for it."""

    thief = new_key()

    def _keys_for(self, client):
        held = self.public_keys[2]
        if client != 2:
            self.public_keys[2] = (public_bytes(self.thief).hex(), held[1])
        keys = super()._keys_for(client)
        self.public_keys[2] = held
        return keys


@pytest.mark.parametrize("vouched", [False, True])
def test_a_relay_that_swaps_keys_reads_along_unless_a_key_server_vouches(vouched):
    """Client 5 is not enrolled, and so has no voucher: it is sent nothing, and fails."""
    limits, options = {}, {}
    keys, with_keys = keys_of("DFedAvg", limits)
    server = KeyServer(bytes(32), map(public_bytes, keys[:5]), Ed25519PrivateKey.generate())
    if vouched:
        limits |= {"run": "a", "verify_key": server.verify_key}
        options = {"vouching": server, "run": "a"}
    strategy = Swapping(seal=True, **ALL, **options)
    start(strategy, grid := Grid(with_keys))
    run_key, thief = strategy.trained.run_key, strategy.thief
    readable = [opens(parcel, thief, run_key, k) for _, k, parcel in parcels_in(grid)]
    assert (any(readable), told(strategy)) == (not vouched, [6 - vouched])


# ------------------------------------------------------------------------- faults


def test_deviation_is_eq_12_and_grows_with_the_root_of_the_number_of_clients():
    rng = np.random.default_rng(0)
    models = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(5)]
    flat = np.stack([np.concatenate([m["a"].ravel(), m["b"]]) for m in models])
    expected = np.sqrt(((flat - flat.mean(0)) ** 2).sum(0)).mean()
    assert [deviation(models), deviation(models * 4)] == pytest.approx([expected, 2 * expected])


def nan(arrays):
    return {n: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def enlarge(arrays):
    """Multiply all numbers of a parcel by a million; they stay finite and well formed."""
    large = {n: a.dtype.kind == "f" and n not in ("targets", "inputs") for n, a in arrays.items()}
    return {n: (a * 1e6).astype(a.dtype) if large[n] else a for n, a in arrays.items()}


def unreadable(reply):
    if record := reply.content.array_records.get("to-neighbours"):
        record[next(iter(record))] = Array("float32", (2,), "numpy.ndarray", b"not an array")
    return reply


@each_method
def test_what_hostile_neighbours_send_is_dropped_and_counted(name):
    """Also a norm out of all proportion, and bytes that are no arrays, handed on unread."""
    kinds = {1: nan, 2: enlarge, 3: lambda arrays: arrays | {"num-examples": np.array(21)}}
    hostile = {k: on_parcels(of, "to-neighbours") for k, of in kinds.items()} | {4: unreadable}
    quiet = dict.fromkeys(hostile, on_parcels(lambda _: None, "to-neighbours"))
    attacked, without = (
        run(name, 1, lambda _, changes=changes: changes, max_examples=20)[0]
        for changes in (hostile, quiet)
    )
    assert alike(attacked, without) == EVERYONE
    exchanges = {"NTKDFL": 2, "DFedAvg": 2, "DPSGD": 1, "DisPFL": 1}[name]
    assert (told(attacked, "parcels-rejected"), told(attacked)) == ([4 * 5 * exchanges], [6])


def test_a_hostile_jacobian_of_a_neighbour_is_refused():
    """Rows a million times as large, after weights and averages as they should be."""
    strategy, _ = run("NTKDFL", 1, lambda made: {2: in_step(made, 1, 2, on_parcels(enlarge))})
    assert (told(strategy, "parcels-rejected"), told(strategy)) == ([5], [6])


def test_a_model_of_a_huge_norm_is_left_out_of_the_mean_and_is_no_sign_of_first_weights():
    """The client's first training is lost; its model comes, and is as if it were lost."""
    results, far = [], on_parcels(enlarge, "arrays")
    for change in (far, lost):
        strategy, gone = make("DPSGD", collect=True), {"train": lost, "evaluate.model": change}

        def first(reply, strategy=strategy, gone=gone):
            kind = reply.metadata.message_type
            return gone[kind](reply) if strategy.server_round == 1 else reply

        grid = Grid(clients("DPSGD"), changes={2: first}, changed_kind="train evaluate.model")
        results.append(bits(start(strategy, grid, 2)))
    assert results[0] == results[1]
    strategy = make("DPSGD", collect=True)
    grid = Grid(clients("DPSGD"), changes={2: far}, changed_kind="evaluate.model")
    assert np.abs(start(strategy, grid)["0.weight"]).max() < 1e3
    assert told(strategy, "models-collected") == [len(strategy.models)] == [5]


def test_replies_with_weights_or_parcels_for_strangers_are_refused():
    """The relay tells weights by their record's name: parcels named like them are handed on."""

    def copied(name):
        def apply(reply):
            reply.content[name] = reply.content["to-neighbours"]
            return reply

        return apply

    as_network = on_parcels(lambda a: {n: w for n, w in a.items() if n != "num-examples"})
    changes = {1: copied("to-5"), 2: as_network, 3: copied("arrays")}
    path = Topology("own", graph=[(k, k + 1) for k in range(5)])
    strategy, _ = run("DFedAvg", 1, lambda _: changes, topology=path)
    for reason in ("weights", "arrays"):
        assert told(strategy, f"rejected-{reason}") == [1]
    assert told(strategy) == [4]
    assert f"is the client a {strategy.client}?" in strategy.channel.last_refusal


def test_what_clients_say_of_refused_parcels_counts_within_reason():
    """At most as many as there are clients, each; what is no whole number above 0 does not."""
    said = [[1, 2], -5, 0.5, 10**15, 2, 0]
    assert count_refused([SimpleNamespace(metrics={REFUSED: n}) for n in said]) == 6 + 2


@each_method
def test_a_client_that_returns_after_rounds_goes_on_with_its_weights(name, monkeypatch):
    """Two rounds are kept: those of round 1 stay while client 5 fails in rounds 2 and 3."""
    monkeypatch.setattr(disk_store, "KEPT", 2)
    strategy, collected = make(name, collect=True, collect_both=True), []

    def absent(reply):
        last = strategy.progress.position == len(strategy.progress.steps) - 1
        return failed(reply) if strategy.server_round in (2, 3) and last else reply

    def note(*_):
        collected.append(tuple(map(len, strategy.models_at.values())))

    grid = Grid(clients(name), changes={5: absent})
    start(strategy, grid, rounds=4, evaluate_fn=note)
    assert told(strategy) == [6, 5, 5, 6]
    assert strategy.trained.last == dict.fromkeys(range(6), 4)
    assert strategy.train_metrics[4].get("restarted", 0) == 0
    planned = sum(len(strategy.plan(first=first)) for first in (True, False, True, True))
    assert [kind for kind, _ in grid.exchanges].count("train") == planned
    assert collected[3] == (6, 5)


@each_method
def test_a_client_that_lost_its_weights_sends_its_neighbours_none(name):
    """It takes over their average, with which NTK-DFL evolves and DFedAvg ends (float32: 1e-5)."""

    def losing(strategy):
        last = len(strategy.plan(first=True)) - 1
        return {5: in_step(strategy, 1, last, forgets(strategy, "5"))}

    def hushing(strategy):
        lose, hush = losing(strategy)[5], in_step(strategy, 2, 0, silent)
        return {5: lambda reply: hush(lose(reply))}

    options = {"seal": True} | ({"gossip_steps": 1} if name == "DFedAvg" else {})
    loser, hushed = (run(name, 2, changes, **options)[0] for changes in (losing, hushing))
    assert alike(loser, hushed, 2) >= EVERYONE - {5}
    if name in ("NTKDFL", "DFedAvg"):
        agree(kept_by(loser, 5, 2), kept_by(loser, 0, 2), 1e-5)
    # client 5 has 10 of the 45 examples
    assert (told(loser), told(loser, "restarted")) == ([6, 6], [0, pytest.approx(10 / 45)])
