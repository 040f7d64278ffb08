"""The graphs: degrees, connectedness, what is drawn anew, and what is said of those in parts."""

from collections.abc import Mapping
from logging import WARNING
from typing import Any, get_args

import networkx as nx
import numpy as np
import pytest

from fedntk.strategies import Topology, mixing_matrix, spectral_gap
from fedntk.strategies.gossip.topology import TopologyKind

KINDS = [kind for kind in get_args(TopologyKind) if kind != "own"]
CLIENTS = [3, 7, 8, 20, 21, 22, 40, 41, 50, 60, 61, 99]


def graph_of(neighbours: Mapping[int, tuple[int, ...]]) -> nx.Graph:
    return nx.Graph({client: list(others) for client, others in neighbours.items()})


def degrees(neighbours: Mapping[int, tuple[int, ...]]) -> list[int]:
    return sorted(map(len, neighbours.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_mutual_sorted_without_oneself_and_of_those_that_take_part(kind):
    topology = Topology(kind, degree=3, dynamic=False)
    for count in range(len(CLIENTS) + 1):
        found = topology.neighbours(2, reversed(CLIENTS[:count]))
        assert list(found) == CLIENTS[:count]
        assert count < 2 or max(degrees(found)) >= 1
        for client, others in found.items():
            assert list(others) == sorted(set(others))
            assert client not in others
            assert all(client in found[other] for other in others)


@pytest.mark.parametrize(
    ("kind", "degree", "expected"),
    [
        ("regular", 3, [3] * 12),
        ("regular", 50, [11] * 12),  # no more than there are others
        ("ring", 5, [2] * 12),
        ("line", 5, [1, 1, *[2] * 10]),
        ("complete", 1, [11] * 12),
        ("clustered", 4, [*[1] * 2, *[4] * 10]),  # 5, 5 and what is left
        ("clustered", 20, [11] * 12),
    ],
)
def test_degrees_of_each_kind(kind, degree, expected):
    for number in range(1, 4):
        assert degrees(Topology(kind, degree=degree).neighbours(number, CLIENTS)) == expected


@pytest.mark.parametrize(("count", "degree"), [(11, 3), (301, 5)])
def test_where_clients_times_degree_is_odd_as_many_have_one_fewer(count, degree):
    """A client more is drawn with them, and left out: its `degree` neighbours miss it."""
    found = Topology(degree=degree).neighbours(2, range(count))
    assert degrees(found) == [degree - 1] * degree + [degree] * (count - degree)


def test_erdos_renyi_graphs_have_the_degree_in_the_mean():
    """Over 40 draws of 60 clients: the mean of 40 x 1,770 edges' draws, within five deviations."""
    topology = Topology("erdos-renyi", degree=6)
    share = 6 / 59
    counts = [graph_of(topology.neighbours(k, range(60))).number_of_edges() for k in range(40)]
    deviation = np.sqrt(1770 * share * (1 - share) / 40)
    assert abs(np.mean(counts) - 1770 * share) < 5 * deviation
    assert len(set(counts)) > 10


@pytest.mark.parametrize(("kind", "degree"), [("regular", 2), ("erdos-renyi", 4)])
def test_a_draw_that_falls_apart_is_drawn_again(kind, degree, caplog):
    """Some of the 20 first draws of 16 clients do."""
    topology, apart = Topology(kind, degree=degree), 0
    with caplog.at_level(WARNING, "flwr"):
        for number in range(20):
            assert nx.is_connected(graph_of(topology.neighbours(number, range(16))))
            generator = np.random.default_rng([0, number, *b"topology"])
            apart += not nx.is_connected(topology._draw(range(16), generator))
    assert not caplog.records
    assert apart > 0


def test_a_graph_that_is_not_connected_is_reported_with_its_parts(caplog):
    """With one neighbour each, 30 clients have 15 edges: at least 15 parts. Clusters are meant."""
    with caplog.at_level(WARNING, "flwr"):
        Topology(degree=1).neighbours(4, range(30))
        own = Topology("own", graph=[(0, 1), (2, 3)])
        own.neighbours(1, range(4))
        own.neighbours(2, [0, 1])
        found = Topology("clustered", degree=3).neighbours(1, CLIENTS)
        Topology("clustered", degree=3, dynamic=False)
    parts = "round {}: the graph is not connected, its parts have {} clients; {}".format
    assert caplog.messages == [
        parts(4, ", ".join(["2"] * 10) + ", ...", "raise degree"),
        parts(1, "2, 2", "add edges"),
        "static clusters never exchange anything with each other",
    ]
    assert [len(part) for part in nx.connected_components(graph_of(found))] == [4, 4, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_drawn_from_the_seed_and_with_dynamic_from_the_round(kind):
    """Whatever was drawn before, and in whatever order clients come."""
    one, other = (Topology(kind, degree=3, seed=9) for _ in range(2))
    rounds = [str(one.neighbours(number, CLIENTS)) for number in range(1, 9)]
    assert str(other.neighbours(5, CLIENTS[::-1])) == rounds[4]
    static = Topology(kind, degree=3, dynamic=False, seed=9)
    assert len({str(static.neighbours(number, CLIENTS)) for number in range(1, 9)}) == 1
    if kind != "complete":
        seeds = {str(Topology(kind, degree=3, seed=k).neighbours(5, CLIENTS)) for k in range(6)}
        assert min(len(seeds), len(set(rounds))) > 1


def test_own_graph_of_pairs_or_networkx_without_those_that_are_not_there():
    """Edges to ids that no client has, loops, and edges named twice count for nothing."""
    edges = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 77), (88, 99)]
    expected = {0: (1,), 1: (0, 2), 2: (1,), 5: ()}
    for graph in (edges, nx.Graph(edges), nx.MultiGraph(edges), np.array(edges)):
        assert Topology("own", graph=graph).neighbours(1, [5, 2, 1, 0]) == expected


def test_settings_tell_one_graph_from_another():
    a, b = (Topology("own", graph=g).settings() for g in ([(0, 1)], [(1, 2)]))
    assert a != b
    assert a == Topology("own", graph=nx.Graph([(1, 0)])).settings()
    assert Topology(dynamic=True).settings() != Topology(dynamic=False).settings()


# ------------------------------------------------------------------ mixing matrices


def mixing_of(kind: Any, rule: Any) -> tuple[Mapping[int, tuple[int, ...]], np.ndarray]:
    near = Topology(kind, degree=3, seed=2).neighbours(1, range(12))
    return near, mixing_matrix(near, {k: 5 + k * k for k in range(12)}, rule)


@pytest.mark.parametrize("rule", ["examples", "equal", "metropolis"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_mixing_matrix_sum_to_one_follow_the_graph_and_have_its_gap(kind, rule):
    """Its general eigenvalues, in float64; those of a defective zero are off by 1e-8."""
    near, matrix = mixing_of(kind, rule)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-15)
    for i, row in enumerate(matrix):
        assert set(np.flatnonzero(row)) - {i} == set(near[i])
    if rule == "metropolis":
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-16)
    sizes = np.sort(np.abs(np.linalg.eigvals(matrix)))
    assert spectral_gap(matrix) == pytest.approx(1 - sizes[-2], abs=1e-7)


def test_spectral_gaps_that_are_known():
    """1 on the complete graph, 0 in parts, and of a ring of equals that of a circulant matrix.

    W has 1/3 for oneself and each neighbour: eigenvalues (1 + 2 cos(2 pi k / n)) / 3.
    """
    found = [
        spectral_gap(mixing_of(*case)[1])
        for case in (("complete", "examples"), ("clustered", "examples"), ("ring", "equal"))
    ]
    assert found == pytest.approx([1, 0, 1 - (1 + 2 * np.cos(2 * np.pi / 12)) / 3])
    assert spectral_gap(np.ones((1, 1))) == 1


def test_clients_that_are_not_there_leave_their_shares_to_the_others():
    near = {0: (1, 2), 1: (0, 2), 2: (0, 1)}
    equal = mixing_matrix(near, {0: 7, 2: 7}, "equal")
    np.testing.assert_allclose(equal, [[0.5, 0.5], [0.5, 0.5]])
    rest = mixing_matrix(near, {0: 7, 2: 7}, "metropolis")
    np.testing.assert_allclose(rest, [[2 / 3, 1 / 3], [1 / 3, 2 / 3]])


def test_hubs_are_drawn_anew_in_each_round_where_clusters_stay():
    """One cluster of six: the chance that ten draws gave one and the same is 6^-9."""
    topology = Topology("clustered", degree=5, dynamic=False, seed=3)
    drawn, again = (
        [next(iter(topology.hubs(k, topology.neighbours(k, range(6))))) for k in range(10)]
        for _ in range(2)
    )
    assert len(set(drawn)) > 1
    assert drawn == again
