"""The graphs: degrees, connectedness, and what is drawn anew."""

from typing import get_args

import networkx as nx
import numpy as np
import pytest

from fedntk.strategies import Topology, mixing_matrix, spectral_gap
from fedntk.strategies.gossip.topology import TopologyKind

KINDS = [kind for kind in get_args(TopologyKind) if kind != "own"]
CLIENTS = [3, 7, 8, 20, 21, 22, 40, 41, 50, 60, 61, 99]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_neighbours_are_mutual_sorted_without_oneself_and_of_those_that_take_part(kind):
    topology = Topology(kind, degree=3, dynamic=False)
    for count in range(len(CLIENTS) + 1):
        found = topology.neighbours(2, reversed(CLIENTS[:count]))
        assert list(found) == CLIENTS[:count]
        assert count < 2 or any(found.values())
        for client, others in found.items():
            assert list(others) == sorted(set(others) - {client})
            assert all(client in found[other] for other in others)


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
    found = Topology(kind, degree=degree).neighbours(1, range(len(expected)))
    assert sorted(map(len, found.values())) == expected


def test_erdos_renyi_graphs_have_the_degree_in_the_mean():
    """Over 40 draws of 60 clients: the mean of 40 x 1,770 edges' draws, within five deviations."""
    topology, share = Topology("erdos-renyi", degree=6), 6 / 59
    counts = [nx.Graph(topology.neighbours(k, range(60))).number_of_edges() for k in range(40)]
    deviation = np.sqrt(1770 * share * (1 - share) / 40)
    assert abs(np.mean(counts) - 1770 * share) < 5 * deviation
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
        found = topology.neighbours(1, [5, 2, 1, 0])
        assert found == {0: (1,), 1: (0, 2), 2: (1,), 5: ()}
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
    found = mixing_matrix({0: (1, 2), 1: (0, 2), 2: (0, 1)}, {0: 7, 2: 7}, rule)
    np.testing.assert_allclose(found, [[1 - other, other], [other, 1 - other]])
    assert spectral_gap(mixing_matrix({0: ()}, {0: 7}, rule)) == 1
