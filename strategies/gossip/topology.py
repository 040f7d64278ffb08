"""The clients' neighbours in a round of decentralised learning, and how fast averages spread.

Source: Thompson et al., *NTK-DFL: Enhancing Decentralized Federated Learning in Heterogeneous
Settings via Neural Tangent Kernel*, ICML 2025, section 5 and appendix C.4: regular graphs of kappa
neighbours, rings, lines, Erdos-Renyi graphs and clusters, drawn anew in each round or once.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from fedntk.ntk.options import Declared, argument, option
from fedntk.ntk.payloads.gossip_options import MixingMatrix, mixing_row

if TYPE_CHECKING:  # slow to import
    import networkx as nx

logger = getLogger("flwr")
TopologyKind = Literal["regular", "ring", "line", "erdos-renyi", "clustered", "complete", "own"]
TRIES = 100  # to draw a connected graph
Neighbours = dict[int, tuple[int, ...]]
Edges: TypeAlias = Union["nx.Graph", Iterable[Sequence[int]]]


class Topology(Declared):
    """A graph of the clients for each round.

    Examples
    --------
    >>> ring = Topology("ring", seed=1)
    >>> sorted(map(len, ring.neighbours(1, range(5)).values()))
    [2, 2, 2, 2, 2]
    """

    kind: TopologyKind = option(
        "regular: each client has `degree` random neighbours (if clients times degree is odd, some "
        "have one fewer); ring, line: two, in a random order; erdos-renyi: each pair is joined "
        "with the same probability, `degree` neighbours in the mean; clustered: groups of "
        "degree + 1 clients, all joined within a group and none between groups; complete: all "
        "joined; own: `graph`",
        default="regular",
        kw_only=False,
    )
    degree: int = option("kappa, neighbours of a client (in the mean)", default=5, at_least=1)
    dynamic: bool = option("the graph is drawn anew in each round", default=True)
    seed: int = option("seed of the draws, with the round", default=0, at_least=0)
    graph: Edges | None = argument(
        "networkx graph without directions, or pairs of clients' ids, if the kind is own",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.edges = frozenset() if self.graph is None else _edges(self.graph)
        if self.kind == "clustered" and not self.dynamic:
            logger.warning("static clusters never exchange anything with each other")

    @classmethod
    def key(cls, name: str) -> str:
        """Name the kind as strategies do: topology."""
        return "topology" if name == "kind" else name

    def check(self) -> None:
        """Refuse a graph that is missing or not used."""
        if (self.kind == "own") != (self.graph is not None):
            got = f"{'none' if self.graph is None else 'one'} with {self.kind!r}"
            raise ValueError(f"graph: expected one with topology = 'own', and only then, got {got}")

    def neighbours(self, server_round: int, clients: Iterable[int]) -> Neighbours:
        """Return each client's neighbours in a round, sorted, without its own id.

        A random graph that falls apart is drawn again, up to 100 times; else its parts are logged.
        """
        import networkx as nx

        members = sorted(clients)
        drawn = server_round if self.dynamic else 0
        generator = np.random.default_rng([self.seed, drawn, *b"topology"])
        for _ in range(TRIES if self.kind in ("regular", "erdos-renyi") else 1):
            graph = self._draw(members, generator)
            if len(members) < 2 or self.kind == "clustered" or nx.is_connected(graph):
                break
        else:
            sizes = sorted(map(len, nx.connected_components(graph)), reverse=True)
            logger.warning(
                "round %d: the graph is not connected, its parts have %s clients; %s",
                server_round,
                sizes[:10],
                "add edges" if self.kind == "own" else "raise degree",
            )
        return {client: tuple(sorted(graph.neighbors(client))) for client in members}

    def hubs(self, server_round: int, neighbours: Neighbours) -> Neighbours:
        """Return a round's clusters as stars: random hub -> its cluster's other members, sorted."""
        clusters = sorted({tuple(sorted((k, *others))) for k, others in neighbours.items()})
        generator = np.random.default_rng([self.seed, server_round, *b"hubs"])
        chosen = [(c[int(generator.integers(len(c)))], c) for c in clusters]
        return {hub: tuple(k for k in members if k != hub) for hub, members in chosen}

    def settings(self) -> dict[str, Any]:
        """Return what a run depends on, as JSON holds it."""
        options = self.compared_options()
        renamed = {"topology": options.pop("kind"), "topology_seed": options.pop("seed")}
        return {**renamed, **options, "edges": sorted(map(list, self.edges))}

    def _draw(self, members: Sequence[int], generator: np.random.Generator) -> "nx.Graph":
        import networkx as nx

        count, order = len(members), [members[i] for i in generator.permutation(len(members))]
        seed = int(generator.integers(2**31))
        degree = min(self.degree, count - 1)
        if count < 2:
            return nx.empty_graph(members)
        match self.kind:
            case "ring" if count > 2:
                numbered = nx.cycle_graph(count)
            case "line" | "ring":
                numbered = nx.path_graph(count)
            case "complete":
                numbered = nx.complete_graph(count)
            case "erdos-renyi":
                numbered = nx.gnp_random_graph(count, degree / (count - 1), seed=seed)
            case "clustered":
                size = self.degree + 1
                sizes = [min(size, count - start) for start in range(0, count, size)]
                numbered = nx.disjoint_union_all(map(nx.complete_graph, sizes))
            case "own":
                graph = nx.empty_graph(members)
                graph.add_edges_from((a, b) for a, b in self.edges if {a, b} <= set(members))
                return graph
            case _:
                extra = count * degree % 2  # one more, which is left out again
                numbered = nx.random_regular_graph(degree, count + extra, seed=seed)
                numbered.remove_nodes_from(range(count, count + extra))
        return nx.relabel_nodes(numbered, dict(enumerate(order)))


def _edges(graph: Edges) -> frozenset[tuple[int, int]]:
    """Return a graph's edges between different clients, each once, the lower id first."""
    import networkx as nx

    if isinstance(graph, nx.Graph) and graph.is_directed():
        kind = type(graph).__name__
        raise ValueError(f"graph: expected no directions, got a {kind}; give graph.to_undirected()")
    edges = set()
    for pair in graph.edges() if isinstance(graph, nx.Graph) else graph:
        try:
            a, b = sorted(map(operator.index, pair))
        except (TypeError, ValueError):
            raise ValueError(f"graph: expected pairs of clients' ids, got {pair!r}") from None
        if a != b:
            edges.add((a, b))
    return frozenset(edges)


def mixing_matrix(
    neighbours: Mapping[int, Sequence[int]], examples: Mapping[int, int], mixing: MixingMatrix
) -> NDArray[np.float64]:
    """Return W of the clients with examples, in order: row i has the shares of i's average.

    Neighbours without examples are left out: their shares go to the others of the row, or with
    ``"metropolis"`` to the client itself. :class:`~fedntk.strategies.RelayStrategy` has the rules.
    """
    members = sorted(client for client in neighbours if client in examples)
    place = {client: i for i, client in enumerate(members)}
    matrix = np.zeros((len(members), len(members)))
    for i, client in enumerate(members):
        near = [client, *(other for other in neighbours[client] if other in place)]
        counts, degrees = [examples[k] for k in near], [len(neighbours[k]) for k in near]
        matrix[i, [place[k] for k in near]] = mixing_row(mixing, counts, degrees)
    return matrix


def spectral_gap(matrix: NDArray[np.float64]) -> float:
    """Return 1 - |lambda_2| of a mixing matrix: how fast repeated averaging leads to one model.

    1 if one average does, as on the complete graph; 0 if it never does, as the graph is in parts.
    (Definition 4.2 of Thompson et al. has (1 - lambda)^2 with lambda = |lambda_2|.)

    A result of :func:`mixing_matrix` is reversible: sqrt(W_ij W_ji) has its eigenvalues, and is
    symmetric.
    """
    if len(matrix) < 2:
        return 1.0
    sizes = np.sort(np.abs(np.linalg.eigvalsh(np.sqrt(matrix * matrix.T))))
    return float(1 - sizes[-2])
