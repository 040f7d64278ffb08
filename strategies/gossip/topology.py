"""Who is whose neighbour in a round of decentralised learning.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, section 5 and appendix C.4: regular graphs of kappa
neighbours, rings, lines, Erdos-Renyi graphs and clusters, drawn anew in each round or once.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING, getLogger
from typing import Literal, get_args

import networkx as nx
import numpy as np
from numpy.typing import NDArray

__all__ = ["MixingMatrix", "Topology", "TopologyKind", "mixing_matrix", "spectral_gap"]

logger = getLogger("flwr")
TopologyKind = Literal["regular", "ring", "line", "erdos-renyi", "clustered", "complete", "own"]
MixingMatrix = Literal["examples", "equal", "metropolis"]
TRIES = 100  # to draw a connected graph
Neighbours = dict[int, tuple[int, ...]]


class Topology:
    """A graph of the clients for each round.

    Parameters
    ----------
    kind : str
        ``"regular"``: each client has `degree` neighbours, drawn at random (where clients times
        degree is odd, some have one fewer). ``"ring"``, ``"line"``: two, in an order drawn at
        random. ``"erdos-renyi"``: each pair is joined with the same probability, `degree`
        neighbours in the mean. ``"clustered"``: groups of ``degree + 1`` clients, all joined within
        a group and none between groups. ``"complete"``: all joined. ``"own"``: `graph`.
    degree : int
        kappa, at least 1.
    dynamic : bool
        Whether each round draws anew.
    seed : int
        Of the draws, with the round.
    graph : networkx.Graph, or iterable of pairs of int, optional
        Of kind ``"own"``: its edges, between clients' ids (partitions). Edges have no direction.

    Raises
    ------
    ValueError
        If an argument is out of range, or a graph is missing or not used.

    Examples
    --------
    >>> ring = Topology("ring", seed=1)
    >>> sorted(map(len, ring.neighbours(1, range(5)).values()))
    [2, 2, 2, 2, 2]
    """

    def __init__(
        self,
        kind: TopologyKind = "regular",
        *,
        degree: int = 5,
        dynamic: bool = True,
        seed: int = 0,
        graph: nx.Graph | Iterable[Sequence[int]] | None = None,
    ) -> None:
        if kind not in get_args(TopologyKind):
            known = ", ".join(get_args(TopologyKind))
            raise ValueError(f"topology: expected one of {known}, got {kind!r}")
        if degree < 1:
            raise ValueError(f"degree: expected at least 1, got {degree}")
        if (kind == "own") != (graph is not None):
            raise ValueError(
                "graph: expected one with topology = 'own', and none with another, got "
                f"{'none' if graph is None else 'one'} with {kind!r}"
            )
        self.kind, self.degree, self.dynamic, self.seed = kind, degree, dynamic, seed
        self.edges = frozenset() if graph is None else _edges(graph)
        if kind == "clustered" and not dynamic:
            logger.log(WARNING, "static clusters never exchange anything with each other")

    def neighbours(self, server_round: int, clients: Iterable[int]) -> Neighbours:
        """Return the neighbours of each client in a round.

        A random graph that falls apart is drawn again, up to 100 times; what then is left is
        logged. So is a graph of one's own that is not connected.

        Parameters
        ----------
        server_round : int
            Its number; without `dynamic` it plays no part, as long as the clients are the same.
        clients : iterable of int
            Ids of those that take part.

        Returns
        -------
        dict of int to tuple of int
            Client -> ids of its neighbours, sorted, without its own.
        """
        members = sorted(clients)
        drawn = server_round if self.dynamic else 0
        generator = np.random.default_rng([self.seed, drawn, *b"topology"])
        whole = len(members) > 1 and self.kind != "clustered"
        for _ in range(TRIES if self.kind in ("regular", "erdos-renyi") else 1):
            graph = self._graph(members, generator)
            if not whole or nx.is_connected(graph):
                break
        else:
            self._report(server_round, graph)
        return {client: tuple(sorted(graph.neighbors(client))) for client in members}

    def hubs(self, server_round: int, neighbours: Neighbours) -> Neighbours:
        """Return the clusters of a round as stars: all are joined to one member, drawn at random.

        Parameters
        ----------
        server_round : int
            Its number: each round draws anew.
        neighbours : dict of int to tuple of int
            Of those that take part, as from :meth:`neighbours`.

        Returns
        -------
        dict of int to tuple of int
            Hub -> ids of its cluster's other members, sorted.

        Raises
        ------
        ValueError
            If the kind is not ``"clustered"``.

        Examples
        --------
        >>> clusters = Topology("clustered", degree=2)
        >>> clusters.hubs(1, clusters.neighbours(1, range(5)))
        {1: (0,), 2: (3, 4)}
        """
        if self.kind != "clustered":
            raise ValueError(f"hubs: expected the topology 'clustered', got {self.kind!r}")
        clusters = sorted({tuple(sorted((k, *others))) for k, others in neighbours.items()})
        generator = np.random.default_rng([self.seed, server_round, *b"hubs"])
        chosen = [(c[int(generator.integers(len(c)))], c) for c in clusters]
        return {hub: tuple(k for k in members if k != hub) for hub, members in chosen}

    def settings(self) -> Mapping[str, object]:
        """Return what a run depends on, as JSON holds it."""
        return {
            "topology": self.kind,
            "degree": self.degree,
            "dynamic": self.dynamic,
            "topology_seed": self.seed,
            "edges": sorted(map(list, self.edges)),
        }

    def _report(self, server_round: int, graph: nx.Graph) -> None:
        sizes = sorted(map(len, nx.connected_components(graph)), reverse=True)
        logger.log(
            WARNING,
            "round %d: the graph is not connected, its parts have %s clients; %s",
            server_round,
            ", ".join(map(str, sizes[:10])) + (", ..." if len(sizes) > 10 else ""),
            "add edges" if self.kind == "own" else "raise degree",
        )

    def _graph(self, members: Sequence[int], generator: np.random.Generator) -> nx.Graph:
        count, order = len(members), [members[i] for i in generator.permutation(len(members))]
        seed = int(generator.integers(2**31))
        degree = min(self.degree, count - 1)
        if count < 2:
            return nx.empty_graph(members)
        match self.kind:
            case "ring":
                numbered = nx.cycle_graph(count) if count > 2 else nx.path_graph(count)
            case "line":
                numbered = nx.path_graph(count)
            case "complete":
                numbered = nx.complete_graph(count)
            case "erdos-renyi":
                share = degree / (count - 1)
                numbered = nx.gnp_random_graph(count, share, seed=seed)
            case "clustered":
                size = self.degree + 1
                numbered = nx.empty_graph(count)
                for start in range(0, count, size):
                    own = range(start, min(start + size, count))
                    numbered.add_edges_from(nx.complete_graph(own).edges)
            case "own":
                graph = nx.Graph()
                graph.add_nodes_from(members)
                graph.add_edges_from((a, b) for a, b in self.edges if {a, b} <= set(members))
                return graph
            case _:
                odd = count * degree % 2  # one more, which is left out again
                numbered = nx.random_regular_graph(degree, count + odd, seed=seed)
                numbered.remove_nodes_from(range(count, count + odd))
        return nx.relabel_nodes(numbered, dict(enumerate(order)))


def _edges(graph: nx.Graph | Iterable[Sequence[int]]) -> frozenset[tuple[int, int]]:
    """Return a graph's edges between different clients, each once, the lower id first."""
    if isinstance(graph, nx.Graph) and graph.is_directed():
        raise ValueError(
            "graph: expected one without directions, as neighbours send each other parcels, got a "
            f"{type(graph).__name__}; give graph.to_undirected()"
        )
    edges = set()
    for pair in graph.edges() if isinstance(graph, nx.Graph) else graph:
        try:
            a, b = sorted(map(operator.index, pair))
        except (TypeError, ValueError):
            raise ValueError(
                f"graph: expected edges as pairs of clients' ids, whole numbers, got {pair!r}"
            ) from None
        if a != b:
            edges.add((a, b))
    return frozenset(edges)


def mixing_matrix(
    neighbours: Mapping[int, Sequence[int]], examples: Mapping[int, int], mixing: MixingMatrix
) -> NDArray[np.float64]:
    """Return W, with which clients average: row i has the shares of i's average.

    Parameters
    ----------
    neighbours : mapping of int to sequence of int
        Client -> its neighbours. Those that have no examples here are left out, and what they
        would have had is the others' of the row, or in ``"metropolis"`` the client's own.
    examples : mapping of int to int
        Client -> how many it has.
    mixing : {"examples", "equal", "metropolis"}
        The rule: see :class:`~fedntk.strategies.GossipStrategy`.

    Returns
    -------
    ndarray of float64, shape (M, M)
        Of the M clients with examples, in their order. Rows sum to one.

    Examples
    --------
    >>> mixing_matrix({0: [1], 1: [0]}, {0: 30, 1: 10}, "examples")
    array([[0.75, 0.25],
           [0.75, 0.25]])
    """
    members = sorted(client for client in neighbours if client in examples)
    place = {client: i for i, client in enumerate(members)}
    matrix = np.zeros((len(members), len(members)))
    for i, client in enumerate(members):
        heard = [other for other in neighbours[client] if other in place]
        near = [i, *(place[other] for other in heard)]
        if mixing == "metropolis":
            degree = len(neighbours[client])
            matrix[i, near[1:]] = [1 / (1 + max(degree, len(neighbours[j]))) for j in heard]
            matrix[i, i] = 1 - matrix[i].sum()
        else:
            counts = [examples[client], *(examples[j] for j in heard)]
            shares = np.ones(len(near)) if mixing == "equal" else np.array(counts, np.float64)
            matrix[i, near] = shares / shares.sum()
    return matrix


def spectral_gap(matrix: NDArray[np.float64]) -> float:
    """Return 1 - |lambda_2| of a mixing matrix: how fast repeated averaging leads to one model.

    1 where one average does, as on the complete graph; 0 where it never does, as the graph is in
    parts. (Definition 4.2 of Thompson et al. has (1 - lambda)^2 with lambda = |lambda_2|.)

    Parameters
    ----------
    matrix : ndarray of float64, shape (M, M)
        Of :func:`mixing_matrix`. It is reversible, so sqrt(W_ij W_ji) has its eigenvalues, and is
        symmetric.

    Returns
    -------
    float
        Between 0 and 1, but for rounding; 1 for fewer than two clients.
    """
    if len(matrix) < 2:
        return 1.0
    sizes = np.sort(np.abs(np.linalg.eigvalsh(np.sqrt(matrix * matrix.T))))
    return float(1 - sizes[-2])
